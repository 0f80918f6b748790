"""Small Inspect tasks that tests of the RL layer run, importable by worker processes."""

from __future__ import annotations

import asyncio

from inspect_ai import Task, task
from inspect_ai.agent import react
from inspect_ai.dataset import MemoryDataset, Sample
from inspect_ai.scorer import Score, Target, accuracy, includes, match
from inspect_ai.solver import Generate, TaskState, generate, use_tools
from inspect_ai.tool import bash
from tests.functions import make_scorer, make_solver, make_tool


def sums(count: int) -> MemoryDataset:
    return MemoryDataset(
        [Sample(id=f"s{i}", input=f"{i}+1?", target=str(i + 1)) for i in range(count)]
    )


@task
def arithmetic(count: int = 4) -> Task:
    return Task(dataset=sums(count), solver=generate(), scorer=match())


@make_tool
async def look(at: str) -> str:
    """Look at something.

    Args:
        at: What.
    """
    return f"{at} is there"


@make_tool
async def add(x: int, y: int) -> str:
    """Add two numbers.

    Args:
        x: First number.
        y: Second number.
    """
    return str(x + y)


@make_tool
async def broken(x: int) -> str:
    """Fail.

    Args:
        x: Any number.
    """
    raise RuntimeError("the tool is broken")


@make_tool
async def nap() -> str:
    """Sleep for long."""
    await asyncio.sleep(60)
    return "awake"


@task
def adding() -> Task:
    return Task(dataset=sums(2), solver=[use_tools(add()), generate()], scorer=includes())


@task
def agent() -> Task:
    return Task(
        dataset=[Sample(id="a", input="Find the word.", target="plum", files={"word": "plum"})],
        solver=react(tools=[bash(timeout=20)]),
        scorer=includes(),
        sandbox="local",
    )


@make_scorer(accuracy())
async def crashing(state: TaskState, target: Target) -> Score:
    raise ValueError("the scorer is broken")


@make_scorer(accuracy())
async def not_a_number(state: TaskState, target: Target) -> Score:
    return Score(value=float("nan"))


@make_solver
async def silent(state: TaskState, generate: Generate) -> TaskState:
    state.output.completion = "1"
    return state


@make_solver
async def failing(state: TaskState, generate: Generate) -> TaskState:
    await generate(state)
    raise KeyError("the solver is broken")
