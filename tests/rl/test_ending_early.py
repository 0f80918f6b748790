"""Rollouts that are cut off anywhere: every call returns or raises, nothing stays behind."""

from __future__ import annotations

import asyncio
import gc
import logging
from collections.abc import Iterator
from contextlib import suppress
from typing import Any

import pytest
from inspect_ai import Task
from inspect_ai.dataset import Sample
from inspect_ai.model import ModelOutput, get_model
from inspect_ai.scorer import Score, Target, includes, match, mean
from inspect_ai.solver import Generate, TaskState, generate
from tests.functions import make_scorer, make_solver
from tests.rl.policies import END, Words, encode, renderer, roll_out_task
from tests.rl.tasks import arithmetic, sums
from tinker_cookbook.rl.rollout_limits import RolloutLimits
from tinker_cookbook.rl.rollout_strategy import (
    FailFast,
    MinViableGroup,
    RetryOnFailure,
    RolloutStrategy,
)
from tinker_cookbook.rl.rollouts import do_group_rollout, do_single_rollout

from inspect_tinker_plugin.contracts.episodes import EpisodeResult, TurnRequest
from inspect_tinker_plugin.contracts.errors import Cause, EpisodeClosedError, EpisodeError
from inspect_tinker_plugin.episode import runner as episode_runner
from inspect_tinker_plugin.episode.runner import EpisodeRunner
from inspect_tinker_plugin.options import EpisodeOptions
from inspect_tinker_plugin.rl.dataset import as_rl_dataset
from inspect_tinker_plugin.rl.env import InspectEnv


@pytest.fixture(autouse=True)
def nothing_is_left() -> Iterator[None]:
    yield
    gc.collect()
    assert not episode_runner._running


def boxed(**options: Any) -> Any:
    """A dataset whose two episodes compete for the only place, which the first gives back late."""

    async def linger(state: TaskState) -> None:
        await asyncio.sleep(3)

    task = Task(
        dataset=[Sample(id="s", input="Say plum.", target="plum")],
        solver=generate(),
        scorer=includes(),
        sandbox="local",
        cleanup=linger,
        name="boxed",
    )
    return as_rl_dataset(task, renderer(), group_size=2, max_sandboxes=1, **options)


def slow_once() -> Words:
    """Keep the first prompt waiting, so that its episode keeps its place."""
    return Words(["plum"], first_s=30.0)


LIMITS = RolloutLimits(rollout_timeout_seconds=2.0)


async def test_a_timeout_while_waiting_for_a_place_is_the_sandboxs_failure() -> None:
    [builder] = boxed(rollout_limits=LIMITS).get_batch(0)
    with pytest.raises(EpisodeError, match="max_sandboxes=1") as raised:
        await do_group_rollout(builder, slow_once())
    assert raised.value.cause is Cause.SANDBOX
    assert (raised.value.task, raised.value.sample_id) == ("boxed", "s")


async def test_on_error_prices_an_episode_that_got_no_place() -> None:
    [builder] = boxed(rollout_limits=LIMITS, on_error={"sandbox": -1.0}).get_batch(0)
    group = await do_group_rollout(builder, slow_once())
    assert sorted(group.get_total_rewards()) == [-1.0, 0.0]
    assert sum(m.get("error/sandbox", 0) for m in group.metrics_G) == 1


def prepared(task: Task, **options: Any) -> EpisodeRunner:
    return EpisodeRunner(task, options=EpisodeOptions(**options))


def one_sample() -> Sample:
    return Sample(id=1, input="1+1?", target="2")


async def test_an_episode_stopped_before_its_first_step_has_a_result() -> None:
    episode = prepared(arithmetic()).episode(one_sample())
    starting = asyncio.create_task(episode.start())
    await asyncio.sleep(0)
    async with asyncio.timeout(60):
        result = await episode.stop("out of time")
        assert result is await starting
    assert result.error is not None
    assert "out of time" in str(result.error)
    await episode.close()


async def test_calls_out_of_turn_raise_and_leave_the_episode_alone() -> None:
    [builder] = as_rl_dataset(arithmetic(), renderer()).get_batch(0)
    [env] = await builder.make_envs()
    with pytest.raises(RuntimeError, match="initial_observation"):
        await env.step(encode("1"))
    await env.initial_observation()
    with pytest.raises(RuntimeError, match="once"):
        await env.initial_observation()
    assert (await env.step(encode("1" + END))).reward == 1.0
    with pytest.raises(RuntimeError, match="scored"):
        await env.step(encode("1" + END))
    await builder.cleanup()
    assert isinstance(env, InspectEnv)
    assert (await env.settle()).reward is not None, "a score survives being closed"


async def test_an_env_of_a_closed_group_runs_nothing() -> None:
    [builder] = as_rl_dataset(arithmetic(), renderer()).get_batch(0)
    [env] = await builder.make_envs()
    await builder.cleanup()
    with pytest.raises(EpisodeClosedError):
        await env.initial_observation()
    assert not episode_runner._running


# The cookbook abandons rollouts that have not begun when a group is cancelled.
@pytest.mark.filterwarnings("ignore::pytest.PytestUnraisableExceptionWarning")
@pytest.mark.parametrize("steps", [0, 1, 3, 6, 11])
@pytest.mark.parametrize(
    "strategy",
    [
        pytest.param(FailFast(), id="FailFast"),
        pytest.param(RetryOnFailure(max_retries=1, per_rollout_timeout=60), id="RetryOnFailure"),
        pytest.param(MinViableGroup(min_successful=1), id="MinViableGroup"),
    ],
)
async def test_a_group_cancelled_at_any_early_step_leaves_no_task(
    strategy: RolloutStrategy, steps: int
) -> None:
    before = asyncio.all_tasks()
    [builder] = boxed().get_batch(0)
    group = asyncio.create_task(do_group_rollout(builder, Words(["plum"]), strategy=strategy))
    for _ in range(steps):
        await asyncio.sleep(0)
    group.cancel()
    await asyncio.wait([group], timeout=60)
    assert group.done()
    if left := asyncio.all_tasks() - before:
        await asyncio.wait(left, timeout=60)
    assert not asyncio.all_tasks() - before
    await asyncio.sleep(0)  # callbacks of finished tasks


async def test_a_task_that_runs_many_rollouts_keeps_nothing_of_them() -> None:
    [builder] = as_rl_dataset(arithmetic(), renderer(), group_size=6).get_batch(0)
    for env in await builder.make_envs():
        await do_single_rollout(Words(["1"]), env)
    this = asyncio.current_task()
    assert this is not None
    await asyncio.sleep(0)
    ties = [c for c, _ in this._callbacks or [] if "episode" in repr(c).lower()]
    assert ties == []
    await builder.cleanup()


async def ask_the_policy(state: TaskState) -> None:
    state.metadata["said"] = (await get_model().generate("Anything else?")).completion


async def test_a_cleanup_that_asks_the_policy_is_refused_and_changes_no_score(
    caplog: pytest.LogCaptureFixture,
) -> None:
    scorer = match(location="any")
    task = Task(dataset=sums(1), solver=generate(), scorer=scorer, cleanup=ask_the_policy)
    with caplog.at_level(logging.WARNING):
        group = await roll_out_task(task, ["1", "2"])
    assert len(group.trajectories_G[0].transitions) == 1
    assert group.get_total_rewards() == [1.0]
    assert "after the solver had ended" in caplog.text


async def test_a_cleanup_that_asks_the_policy_does_not_hang_a_stop() -> None:
    task = Task(dataset=sums(1), solver=generate(), scorer=match(), cleanup=ask_the_policy)
    episode = prepared(task).episode(one_sample())
    assert isinstance(await episode.start(), TurnRequest)
    async with asyncio.timeout(60):
        result = await episode.stop("out of time")
    assert result.error is None
    assert result.limit is not None
    await episode.close()


@make_scorer(mean())
async def hanging(state: TaskState, target: Target) -> Score:
    await asyncio.sleep(3600)
    return Score(value=1)


_enough = asyncio.Event()


@make_solver
async def stubborn(state: TaskState, generate: Generate) -> TaskState:
    """Resists cancellation until it has been enough."""
    await generate(state)
    while not _enough.is_set():
        with suppress(asyncio.CancelledError):
            await asyncio.sleep(0.05)
    return state


@pytest.mark.parametrize(
    ("task", "cause"),
    [
        pytest.param(Task(dataset=sums(1), solver=generate(), scorer=hanging()), Cause.SCORER),
        pytest.param(Task(dataset=sums(1), solver=stubborn(), scorer=match()), Cause.SOLVER),
    ],
    ids=["scorer", "solver"],
)
async def test_what_does_not_end_after_a_stop_has_failed_in_time(task: Task, cause: Cause) -> None:
    _enough.clear()
    episode = prepared(task, stop_timeout=0.5).episode(one_sample())
    request = await episode.start()
    assert isinstance(request, TurnRequest)
    answering = asyncio.create_task(episode.reply(ModelOutput.from_content("rl/policy", "2")))
    await asyncio.sleep(0.1)
    async with asyncio.timeout(60):
        result = await episode.stop("out of time")
    assert result.error is not None
    assert result.error.cause is cause
    assert isinstance(await answering, EpisodeResult)
    _enough.set()
    await episode.close()
