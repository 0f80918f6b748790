"""Rolls out groups as the cookbook does, and goes on when one of the rollouts fails."""

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
    done: Callable[[], object],
) -> list[list[RolloutReport]]:
    """Roll out groups one after the other; the rollouts of a group run together.

    Args:
        builders: The groups.
        policy_for: Makes the policy of each rollout.
        done: Called after each rollout.

    Returns:
        The reports of each group, in the order of the builders.
    """
    return [await _roll_group(builder, policy_for, done) for builder in builders]


async def _roll_group(
    builder: InspectGroupBuilder, policy_for: PolicyFor, done: Callable[[], object]
) -> list[RolloutReport]:
    envs: Sequence[Any] = await builder.make_envs()
    try:
        policies = [policy_for(env, builder.sample, i) for i, env in enumerate(envs)]
        results = await asyncio.gather(
            *(_roll(env, policy, done) for env, policy in zip(envs, policies, strict=True))
        )
        finished = {i: r for i, r in enumerate(results) if not isinstance(r, Exception)}
        rewards = await builder.compute_group_rewards(
            list(finished.values()), [envs[i] for i in finished]
        )
    finally:
        await builder.cleanup()
    group_rewards = dict(zip(finished, (reward for reward, _ in rewards), strict=True))
    reports = []
    for i, (env, result) in enumerate(zip(envs, results, strict=True)):
        report = report_rollout(env, i + 1, task=builder.handle.name, sample_id=builder.sample.id)
        if isinstance(result, Exception):
            report = replace(report, error=report.error or f"{type(result).__name__}: {result}")
        else:
            report = with_trajectory(report, result, group_rewards[i])
        reports.append(report)
    return with_advantages(reports)


async def _roll(
    env: InspectEnv, policy: TokenCompleter, done: Callable[[], object]
) -> Trajectory | Exception:
    from tinker_cookbook.rl.rollout_runner import run_rollout

    try:
        return await run_rollout(policy, env)
    except Exception as error:
        # The boundary of one rollout: its failure is reported beside the others.
        return error
    finally:
        done()
