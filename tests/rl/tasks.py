"""Small Inspect tasks that tests of the RL layer run, importable by worker processes."""

from __future__ import annotations

import asyncio

from inspect_ai import Task, task
from inspect_ai.agent import react
from inspect_ai.dataset import MemoryDataset, Sample
from inspect_ai.scorer import Score, Scorer, Target, accuracy, includes, match, scorer
from inspect_ai.solver import Generate, Solver, TaskState, generate, solver, use_tools
from inspect_ai.tool import Tool, bash, tool


def sums(count: int) -> MemoryDataset:
    return MemoryDataset(
        [Sample(id=f"s{i}", input=f"{i}+1?", target=str(i + 1)) for i in range(count)]
    )


@task
def arithmetic(count: int = 4) -> Task:
    return Task(dataset=sums(count), solver=generate(), scorer=match())


@tool
def look() -> Tool:
    async def execute(at: str) -> str:
        """Look at something.

        Args:
            at: What.
        """
        return f"{at} is there"

    return execute


@tool
def add() -> Tool:
    async def execute(x: int, y: int) -> str:
        """Add two numbers.

        Args:
            x: First number.
            y: Second number.
        """
        return str(x + y)

    return execute


@tool
def broken() -> Tool:
    async def execute(x: int) -> str:
        """Fail.

        Args:
            x: Any number.
        """
        raise RuntimeError("the tool is broken")

    return execute


@tool
def nap() -> Tool:
    async def execute() -> str:
        """Sleep for long."""
        await asyncio.sleep(60)
        return "awake"

    return execute


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


@scorer(metrics=[accuracy()])
def crashing() -> Scorer:
    async def score(state: TaskState, target: Target) -> Score:
        raise ValueError("the scorer is broken")

    return score


@scorer(metrics=[accuracy()])
def not_a_number() -> Scorer:
    async def score(state: TaskState, target: Target) -> Score:
        return Score(value=float("nan"))

    return score


@solver
def silent() -> Solver:
    async def solve(state: TaskState, generate: Generate) -> TaskState:
        state.output.completion = "1"
        return state

    return solve


@solver
def failing() -> Solver:
    async def solve(state: TaskState, generate: Generate) -> TaskState:
        await generate(state)
        raise KeyError("the solver is broken")

    return solve
