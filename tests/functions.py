"""Solvers, scorers and tools of tests, each from the function that it consists of."""

from __future__ import annotations

import inspect
from collections.abc import Awaitable, Callable
from functools import wraps
from typing import Any, Concatenate, ParamSpec, cast

from inspect_ai.scorer import Metric, Score, Scorer, Target, scorer
from inspect_ai.solver import Generate, Solver, TaskState, solver
from inspect_ai.tool import Tool, tool

P = ParamSpec("P")


def make_solver(
    solve: Callable[Concatenate[TaskState, Generate, P], Awaitable[TaskState]],
) -> Callable[P, Solver]:
    """Make a solver, whose arguments are those of the function after the first two."""
    return cast(Callable[P, Solver], solver(solve.__name__)(_bind(solve)))


def make_scorer(
    *metrics: Metric | dict[str, list[Metric]], name: str | None = None
) -> Callable[
    [Callable[Concatenate[TaskState, Target, P], Awaitable[Score | None]]], Callable[P, Scorer]
]:
    """Make a scorer, whose arguments are those of the function after the first two."""
    return lambda score: cast(
        Callable[P, Scorer], scorer(list(metrics), name=name or score.__name__)(_bind(score))
    )


def make_tool(execute: Callable[..., Awaitable[Any]]) -> Callable[[], Tool]:
    """Make a tool without arguments of its own."""

    def make() -> Tool:
        @wraps(execute)
        async def run(*args: Any, **kwargs: Any) -> Any:
            return await execute(*args, **kwargs)

        return run

    return tool(name=execute.__name__)(make)


def _bind(function: Callable[..., Awaitable[Any]]) -> Callable[..., Any]:
    def make(*args: Any, **kwargs: Any) -> Any:
        async def run(state: TaskState, other: Any) -> Any:
            return await function(state, other, *args, **kwargs)

        return run

    own = list(inspect.signature(function).parameters.values())[2:]
    make.__signature__ = inspect.Signature(own)  # type: ignore[attr-defined]
    return make
