"""A task: an agent looks things up with a tool, and answers with a number."""

from __future__ import annotations

from inspect_ai import Task, task
from inspect_ai.agent import react
from inspect_ai.dataset import Sample
from inspect_ai.scorer import match
from inspect_ai.tool import Tool, ToolError, tool

STOCK = {"apples": 12, "pears": 7, "plums": 30}


@task
def stock() -> Task:
    """Answer questions about a stock that only a tool can see."""
    questions = [
        Sample(
            id=f"{one} and {other}",
            input=f"How many {one} and {other} are there in all? Submit a number.",
            target=str(STOCK[one] + STOCK[other]),
        )
        for one, other in [("apples", "pears"), ("pears", "plums"), ("plums", "apples")]
    ]
    return Task(
        dataset=questions,
        solver=react(tools=[count()]),
        scorer=match(numeric=True),
        message_limit=20,
    )


@tool
def count() -> Tool:
    async def execute(item: str) -> str:
        """Say how many of an item there are.

        Args:
            item: Name of the item, such as apples.
        """
        if item not in STOCK:
            raise ToolError(f"There is no {item}; there are {', '.join(STOCK)}.")
        return str(STOCK[item])

    return execute
