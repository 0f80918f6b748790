"""A task so easy that a tiny, untrained model learns it within a few training steps.

It asks for a reply made of a few letters only and pays the share of such letters, so even random
replies earn something to climb from. For an agent that learns to use a tool, see boxes.py.
"""

from __future__ import annotations

from inspect_ai import Task, task
from inspect_ai.dataset import MemoryDataset, Sample
from inspect_ai.model import ChatMessageAssistant
from inspect_ai.scorer import Score, Scorer, Target, mean, scorer, stderr
from inspect_ai.solver import TaskState, generate

ALLOWED = "abcdefghijklm"


@task
def letters(allowed: str = ALLOWED, samples: int = 64) -> Task:
    """Reply with nothing but the allowed letters, in one turn.

    Args:
        allowed: the letters that count.
        samples: size of the dataset; the samples differ in their numbers only.
    """
    return Task(
        dataset=requests(allowed, samples),
        solver=generate(),
        scorer=share_of_letters(allowed),
    )


def requests(allowed: str, samples: int) -> MemoryDataset:
    return MemoryDataset(
        [
            Sample(id=number, input=f"{number}. Write some of these letters: {allowed}")
            for number in range(1, samples + 1)
        ],
        name="letters",
    )


@scorer(metrics=[mean(), stderr()])
def share_of_letters(allowed: str) -> Scorer:
    """The share of allowed letters in all that the model wrote, from 0 to 1."""

    async def score(state: TaskState, target: Target) -> Score:
        text = "".join(message.text for message in state.messages if is_answer(message))
        value = sum(letter in allowed for letter in text) / len(text) if text else 0.0
        return Score(value=value, answer=text)

    return score


def is_answer(message: object) -> bool:
    """Whether a message is the model's own and not a tool call."""
    return isinstance(message, ChatMessageAssistant) and not message.tool_calls
