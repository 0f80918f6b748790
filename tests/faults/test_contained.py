"""Errors that a task or a reward causes in its own process end one episode, with their cause."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Sequence
from contextlib import suppress
from typing import Any

import pytest
from inspect_ai import Task
from inspect_ai.dataset import Sample
from inspect_ai.model import get_model
from inspect_ai.scorer import Score, Scorer, Target, mean
from inspect_ai.solver import Generate, Solver, TaskState, chain, generate, use_tools
from tests.faults.rollouts import failure_of, rolled
from tests.functions import make_scorer, make_solver, make_tool
from tests.rl.policies import tool_call

from inspect_tinker_plugin.contracts.episodes import EpisodeResult
from inspect_tinker_plugin.contracts.errors import Cause
from inspect_tinker_plugin.rewards import GroupMember, UnscoredError

Deed = Callable[[], Awaitable[object]]


class Outcome(BaseException):
    """Not an ``Exception``, like what ``pytest.fail()`` raises."""


async def _cancels_itself() -> None:
    task = asyncio.current_task()
    assert task is not None
    task.cancel()
    await asyncio.sleep(0)


async def _exits() -> None:
    raise SystemExit(0)


async def _says_it_is_closed() -> None:
    raise GeneratorExit


async def _raises_no_exception() -> None:
    raise Outcome("failed")


async def _raises_a_group() -> None:
    raise BaseExceptionGroup("several", [Outcome("failed")])


async def _raises_a_cancellation() -> None:
    raise asyncio.CancelledError


async def _fails() -> None:
    raise ConnectionError("it is away")


OF_A_TOOL = [_fails, _exits, _says_it_is_closed, _raises_no_exception, _raises_a_group]
DEEDS = [_cancels_itself, _raises_a_cancellation, *OF_A_TOOL]
deeds = pytest.mark.parametrize("deed", DEEDS, ids=lambda deed: deed.__name__)


@make_scorer(mean())
async def does(state: TaskState, target: Target, deed: Deed | None = None) -> Score:
    if deed is not None:
        await deed()
    return Score(value=1.0)


@make_solver
async def replies_and(state: TaskState, generate: Generate, deed: Deed) -> TaskState:
    state = await generate(state)
    await deed()
    return state


def _task(scored: Scorer, solved: Solver | None = None) -> Task:
    return Task(
        dataset=[Sample(id=1, input="x", target="x")], solver=solved or generate(), scorer=scored
    )


async def _check(task: Task, cause: Cause, **options: Any) -> None:
    assert (await failure_of(task, retries=3, **options)).cause is cause
    priced = await rolled(task, on_error={cause: -2.0}, **options)
    assert priced.get_total_rewards() == [-2.0]


@deeds
async def test_a_scorer(deed: Deed) -> None:
    await _check(_task(does(deed)), Cause.SCORER)


async def test_a_judge_that_is_refused_is_no_zero_where_nobody_tells() -> None:
    @make_scorer(mean())
    async def falls_back(state: TaskState, target: Target) -> Score:
        with suppress(Exception):
            await get_model().generate("Good?")
        return Score(value=0)

    await _check(_task(falls_back()), Cause.JUDGE)


@deeds
async def test_a_solver(deed: Deed) -> None:
    await _check(_task(does(), replies_and(deed)), Cause.SOLVER)


@pytest.mark.parametrize("deed", OF_A_TOOL, ids=lambda deed: deed.__name__)
async def test_a_tool(deed: Deed) -> None:
    @make_tool
    async def doing() -> str:
        """Do it."""
        await deed()
        return "done"

    task = _task(does(), chain(use_tools(doing()), generate()))
    assert (await failure_of(task, tool_call("doing", "{}"), "done")).cause is Cause.TOOL


@deeds
async def test_a_clean_up_changes_no_reward(deed: Deed, caplog: pytest.LogCaptureFixture) -> None:
    async def clean_up(state: TaskState) -> None:
        await deed()

    task = _task(does())
    task.cleanup = clean_up
    assert (await rolled(task)).get_total_rewards() == [1.0]
    assert "the task's cleanup failed" in caplog.text


@deeds
async def test_a_reward(deed: Deed) -> None:
    async def reward(result: EpisodeResult) -> float:
        await deed()
        return 1.0

    await _check(_task(does()), Cause.REWARD, reward=reward)


@deeds
async def test_a_group_reward(deed: Deed) -> None:
    async def reward(members: Sequence[GroupMember]) -> list[float]:
        await deed()
        return [1.0] * len(members)

    await _check(_task(does()), Cause.REWARD, group_reward=reward)


def _misses_a_score(members: Sequence[GroupMember]) -> list[float]:
    raise UnscoredError("no score to compare")


def _too_large_for_a_float(result: EpisodeResult) -> Any:
    return 10**400


@pytest.mark.parametrize(
    "reward",
    [{"group_reward": _misses_a_score}, {"reward": _too_large_for_a_float}],
    ids=["no score", "too large"],
)
async def test_a_reward_that_is_none(reward: dict[str, Any]) -> None:
    await _check(_task(does()), Cause.REWARD, **reward)
