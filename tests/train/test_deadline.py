"""Rollouts that hang are cancelled and run again; other failures end the group as before."""

from __future__ import annotations

import asyncio
import pickle
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any, cast

import pytest
from inspect_ai import Task
from inspect_ai.dataset import Sample
from inspect_ai.scorer import includes
from inspect_ai.solver import Generate, TaskState
from tests.functions import make_solver
from tinker_cookbook.completers import TokenCompleter
from tinker_cookbook.rl.rollout_strategy import FailFast, RetryOnFailure
from tinker_cookbook.rl.rollouts import do_group_rollout
from tinker_cookbook.rl.types import TrajectoryGroup

from inspect_tinker_plugin import as_rl_dataset
from inspect_tinker_plugin.contracts.errors import EpisodeError
from inspect_tinker_plugin.testing import ScriptedPolicy, load_renderer
from inspect_tinker_plugin.train.config import build_config
from inspect_tinker_plugin.train.request import TrainRequest
from inspect_tinker_plugin.train.strategies import HangingRolloutError, RetryHanging

ASYNCHRONOUS = ("async_config.max_steps_off_policy=2", "async_config.groups_per_batch=3")


@make_solver
async def disturbed(
    state: TaskState, generate: Generate, disturb: Callable[[int], Any]
) -> TaskState:
    await disturb(state.epoch)
    return await generate(state)


async def rolled_out(disturb: Callable[[int], Any], *, timeout: float) -> TrajectoryGroup | None:
    task = Task(
        name="words",
        dataset=[Sample(input="?", target="yes")],
        solver=disturbed(disturb),
        scorer=includes(),
    )
    renderer = load_renderer()
    [builder] = as_rl_dataset(task, renderer, group_size=2).get_batch(0)
    policy = cast(TokenCompleter, ScriptedPolicy(renderer, lambda request: "yes"))
    strategy: Any = pickle.loads(pickle.dumps(RetryHanging(timeout, max_retries=1)))
    return await do_group_rollout(builder, policy, strategy)


async def test_a_rollout_that_hangs_is_run_again_and_counted() -> None:
    begun: list[int] = []

    async def go_on(epoch: int) -> None:
        pass

    async def hang_once(epoch: int) -> None:
        begun.append(epoch)
        if epoch == 2:
            await asyncio.Event().wait()

    await rolled_out(go_on, timeout=600)  # whatever takes long in a new process
    group = await rolled_out(hang_once, timeout=10)
    assert group is not None
    assert [float(reward) for reward in group.get_total_rewards()] == [1.0, 1.0]
    assert begun == [1, 2, 3]
    [error] = group.rollout_errors
    assert (error.error_type, error.error_message) == (
        "TimeoutError",
        "a rollout did not end within 10 s",
    )


async def test_one_that_hangs_again_ends_with_an_error() -> None:
    async def hang(epoch: int) -> None:
        await asyncio.Event().wait()

    with pytest.raises(HangingRolloutError, match=r"used up its retries \(1\); --rollout-timeout"):
        await rolled_out(hang, timeout=0.1)


async def test_one_that_fails_is_not_run_again() -> None:
    begun: list[int] = []

    async def fail(epoch: int) -> None:
        begun.append(epoch)
        raise OSError("broken")

    with pytest.raises(EpisodeError, match="broken"):
        await rolled_out(fail, timeout=600)
    assert begun == [1, 2]


@pytest.mark.parametrize(
    ("overrides", "seconds", "strategy"),
    [
        ((), None, FailFast()),
        ((), 60.0, RetryHanging(60.0)),
        (ASYNCHRONOUS, None, RetryHanging(3600.0)),
        (ASYNCHRONOUS, 0.0, FailFast()),
        (
            (*ASYNCHRONOUS, "rollout_error_tolerance=True"),
            None,
            RetryOnFailure(per_rollout_timeout=3600.0),
        ),
    ],
)
def test_the_asynchronous_loop_has_a_time_limit(
    overrides: tuple[str, ...], seconds: float | None, strategy: object
) -> None:
    request = TrainRequest(task="toy.py@letters", log_dir=Path("/runs/one"), local=True)
    request = replace(request, overrides=overrides, rollout_timeout=seconds)
    config = build_config(request, model="/models/tiny")
    assert config.effective_rollout_strategy() == strategy
