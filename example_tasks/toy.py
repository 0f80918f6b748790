"""Two tasks so easy that a tiny, untrained model learns them within a few training steps.

Both ask for replies made of a few letters only and pay the share of such letters, so even
random replies earn something to climb from. `letters` is one turn; `letters_agent` is an
agent with a tool that is asked three times.
"""

from __future__ import annotations

from inspect_ai import Task, task
from inspect_ai.agent import Agent, AgentState, agent, react
from inspect_ai.dataset import MemoryDataset, Sample
from inspect_ai.model import ChatMessageAssistant
from inspect_ai.scorer import Score, Scorer, Target, mean, scorer, stderr
from inspect_ai.solver import TaskState, generate
from inspect_ai.tool import Tool, tool

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


@task
def letters_agent(allowed: str = ALLOWED, samples: int = 64, turns: int = 3) -> Task:
    """The same with an agent that is offered a tool and asked several times.

    Args:
        allowed: the letters that count.
        samples: size of the dataset.
        turns: replies without a tool call after which the agent is done.
    """
    return Task(
        dataset=requests(allowed, samples),
        solver=patient_agent(allowed, turns),
        scorer=share_of_letters(allowed),
        message_limit=4 * turns + 4,
    )


def requests(allowed: str, samples: int) -> MemoryDataset:
    return MemoryDataset(
        [
            Sample(id=number, input=f"{number}. Write some of these letters: {allowed}")
            for number in range(1, samples + 1)
        ],
        name="letters",
    )


@agent
def patient_agent(allowed: str, turns: int) -> Agent:
    async def ask_again(state: AgentState) -> bool | str:
        if state.output.message.tool_calls:
            return True
        replies = [message for message in state.messages if is_answer(message)]
        return "Again." if len(replies) < turns else False

    return react(prompt=None, tools=[allowed_letters(allowed)], submit=False, on_continue=ask_again)


@tool
def allowed_letters(allowed: str) -> Tool:
    async def execute() -> str:
        """Say which letters are allowed."""
        return allowed

    return execute


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
