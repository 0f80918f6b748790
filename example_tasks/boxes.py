"""An agent that has to find out which of four boxes holds a word: small enough to learn here.

    inspect eval example_tasks/boxes.py --model openai/gpt-4o-mini
    python -m example_tasks.train_boxes out/boxes

The second line trains a tiny model on it, on this machine and without a key.
"""

from __future__ import annotations

import random

from inspect_ai import Task, task
from inspect_ai.agent import react
from inspect_ai.dataset import MemoryDataset, Sample
from inspect_ai.scorer import match
from inspect_ai.solver import Generate, Solver, TaskState, solver
from inspect_ai.tool import Tool, ToolError, tool
from inspect_ai.util import store

BOXES = 4
FULL = 3
EMPTY = "empty"
WORDS = ("bash", "cat", "ink", "item", "python", "sand", "web", "zero")


@task
def boxes(samples: int = 64, seed: int = 0) -> Task:
    """Open boxes with a tool, and submit the word that was in one of them.

    It is always in the same box, which the model is not told: trying pays.

    Args:
        samples: size of the dataset.
        seed: another seed hides other words.
    """
    chance = random.Random(seed)
    hidden = [
        Sample(
            id=number,
            input=f"{number}. Which word is in the boxes?",
            target=chance.choice(WORDS),
        )
        for number in range(1, samples + 1)
    ]
    return Task(
        dataset=MemoryDataset(hidden, name="boxes"),
        setup=hide_word(),
        solver=react(prompt=None, tools=[open_box()]),
        scorer=match(location="exact"),
        message_limit=2 * BOXES,
    )


@solver
def hide_word() -> Solver:
    async def solve(state: TaskState, generate: Generate) -> TaskState:
        store().set("word", state.target.text)
        return state

    return solve


@tool
def open_box() -> Tool:
    async def execute(box: int) -> str:
        """Open a box.

        Args:
            box: 1 to 4.
        """
        if not 1 <= box <= BOXES:
            raise ToolError(f"There are boxes 1 to {BOXES}.")
        return str(store().get("word")) if box == FULL else EMPTY

    return execute
