"""A time limit per rollout, so that one that hangs does not stall a run."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

import chz
from tinker_cookbook.completers import TokenCompleter
from tinker_cookbook.rl.rollout_strategy import (
    FailFast,
    MinViableGroup,
    RetryOnFailure,
    RolloutResult,
    RolloutStrategy,
)
from tinker_cookbook.rl.rollouts import do_single_rollout
from tinker_cookbook.rl.types import Env, EnvGroupBuilder, RolloutError, Trajectory

SECONDS = 3600.0
"""Time limit in the asynchronous loop, where groups that hang keep their places for ever."""


@dataclass(frozen=True)
class RetryHanging(RolloutStrategy):
    """Runs rollouts again that take too long; any other failure ends the group, as in `FailFast`.

    The new rollout is in a new env of the builder. When a group has used up its retries, its next
    time-out ends it.
    """

    per_rollout_timeout: float
    """Seconds after which a rollout is cancelled."""

    max_retries: int = 3
    """Rollouts of a group that are run again."""

    async def execute(
        self, env_group_builder: EnvGroupBuilder, policy: TokenCompleter
    ) -> RolloutResult:
        """Run the rollouts of a group."""
        running: dict[asyncio.Task[Trajectory], Env] = {}

        async def roll_out(env: Env) -> Trajectory:
            async with asyncio.timeout(self.per_rollout_timeout):
                return await do_single_rollout(policy, env)

        def launch(envs: Sequence[Env]) -> None:
            running.update({asyncio.create_task(roll_out(env)): env for env in envs})

        ended: list[Env] = []
        result = RolloutResult(trajectories=[], envs=ended, errors=[])
        launch(await env_group_builder.make_envs())
        try:
            while running:
                done, _ = await asyncio.wait(running, return_when=asyncio.FIRST_COMPLETED)
                for task in done:
                    env = running.pop(task)
                    try:
                        result.trajectories.append(task.result())
                        ended.append(env)
                    except TimeoutError:
                        problem = f"a rollout did not end within {self.per_rollout_timeout:g} s"
                        if len(result.errors) == self.max_retries:
                            raise TimeoutError(
                                f"{problem}, and its group has used up its retries "
                                f"({self.max_retries}); --rollout-timeout sets the time"
                            ) from None
                        result.errors.append(RolloutError("TimeoutError", problem))
                        launch((await env_group_builder.make_envs())[:1])
        finally:
            for task in running:
                task.cancel()
            await asyncio.gather(*running, return_exceptions=True)
        return result


def with_deadline(config: Any, seconds: float | None) -> Any:
    """Return a configuration of the cookbook whose rollouts have a time limit.

    A strategy that has one already keeps it.

    Args:
        config: The ``tinker_cookbook.rl.train.Config``.
        seconds: The limit; 0 for none, ``None`` for the default of the loop.
    """
    if seconds is None:
        seconds = SECONDS if config.async_config is not None else 0.0
    strategy = config.effective_rollout_strategy()
    if not seconds:
        return config
    if isinstance(strategy, FailFast):
        strategy = RetryHanging(seconds)
    elif isinstance(strategy, RetryOnFailure | MinViableGroup) and not strategy.per_rollout_timeout:
        strategy = replace(strategy, per_rollout_timeout=seconds)
    return chz.replace(config, rollout_error_tolerance=strategy)
