"""Rolls out groups as the cookbook does, and continues when one of the rollouts fails."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import TYPE_CHECKING, Any

from inspect_tinker_plugin.cli.report import (
    RolloutReport,
    report_rollout,
    with_advantages,
    with_trajectory,
)

if TYPE_CHECKING:
    from inspect_ai.dataset import Sample
    from tinker_cookbook.completers import TokenCompleter
    from tinker_cookbook.rl.types import Trajectory

    from inspect_tinker_plugin.rl.env import InspectEnv
    from inspect_tinker_plugin.rl.group import InspectGroupBuilder

PolicyFor = Callable[["InspectEnv", "Sample", int], "TokenCompleter"]
"""Makes the policy of one rollout, from its env, its sample and its position in the group."""


async def roll_groups(
    builders: Sequence[InspectGroupBuilder],
    policy_for: PolicyFor,
    done: Callable[[bool], object],
    groups: list[list[RolloutReport]] | None = None,
) -> list[list[RolloutReport]]:
    """Roll out groups one after the other; the rollouts of a group run together.

    Args:
        builders: The groups.
        policy_for: Makes the policy of each rollout.
        done: Called after each rollout with whether it failed.
        groups: Receives the reports of each group as soon as they are there, so that a caller
            that is interrupted has them, including the finished ones of the last group.

    Returns:
        The reports of each group, in the order of the builders.
    """
    groups = [] if groups is None else groups
    for builder in builders:
        await _roll_group(builder, policy_for, done, groups)
    return groups


async def _roll_group(
    builder: InspectGroupBuilder,
    policy_for: PolicyFor,
    done: Callable[[bool], object],
    groups: list[list[RolloutReport]],
) -> None:
    envs: Sequence[Any] = await builder.make_envs()
    results: dict[int, Trajectory | Exception] = {}
    group_rewards: dict[int, float] = {}
    try:
        policies = [policy_for(env, builder.sample, i) for i, env in enumerate(envs)]
        await asyncio.gather(
            *(
                _roll(env, policy, i, results, done)
                for i, (env, policy) in enumerate(zip(envs, policies, strict=True))
            )
        )
        finished = {i: r for i, r in sorted(results.items()) if not isinstance(r, Exception)}
        rewards = await builder.compute_group_rewards(
            list(finished.values()), [envs[i] for i in finished]
        )
        group_rewards = dict(zip(finished, (reward for reward, _ in rewards), strict=True))
    finally:
        reports = []
        for i, result in sorted(results.items()):
            report = report_rollout(
                envs[i], i + 1, task=builder.handle.name, sample_id=builder.sample.id
            )
            if isinstance(result, Exception):
                why = report.error or f"{type(result).__name__}: {result}"
                reports.append(replace(report, error=why))
            else:
                reports.append(with_trajectory(report, result, group_rewards.get(i, 0.0)))
        if reports:
            groups.append(with_advantages(reports))
        await builder.cleanup()


async def _roll(
    env: InspectEnv,
    policy: TokenCompleter,
    position: int,
    results: dict[int, Trajectory | Exception],
    done: Callable[[bool], object],
) -> None:
    """Roll out one env; its result goes into ``results``, unless it is cancelled."""
    from tinker_cookbook.rl.rollout_runner import run_rollout

    try:
        results[position] = await run_rollout(policy, env)
    except Exception as error:
        # The boundary of one rollout: its failure is reported beside the others.
        results[position] = error
    done(isinstance(results[position], Exception))
