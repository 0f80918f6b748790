"""Rolls out groups for the commands, one after the other, and reports each rollout."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import TYPE_CHECKING, cast

if TYPE_CHECKING:
    from tinker_cookbook.completers import TokenCompleter
    from tinker_cookbook.renderers import Renderer

    from inspect_tinker_plugin.contracts.episodes import TurnRequest
    from inspect_tinker_plugin.rl.env import InspectEnv
    from inspect_tinker_plugin.rl.group import InspectGroupBuilder
    from inspect_tinker_plugin.rl.rollouts import PolicyFor, RolloutReport
    from inspect_tinker_plugin.testing import Script


async def roll_groups(
    builders: Sequence[InspectGroupBuilder],
    policy_for: PolicyFor,
    done: Callable[[bool], object],
    groups: list[list[RolloutReport]] | None = None,
) -> list[list[RolloutReport]]:
    """Roll out groups one after the other; the rollouts of a group run together.

    They are rolled out as the cookbook does, but for a rollout that fails: the others continue.

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
    from inspect_tinker_plugin.rl.rollouts import MemberRollout, report_rollout, roll_group

    members: list[MemberRollout] = []
    try:
        await roll_group(builder, policy_for, done=done, members=members)
    finally:
        task, sample_id = builder.handle.name, builder.sample.id
        reports = [report_rollout(each, task=task, sample_id=sample_id) for each in members]
        if reports:
            groups.append(_with_advantages(reports))


def _with_advantages(reports: Sequence[RolloutReport]) -> list[RolloutReport]:
    """Subtract the mean reward of the group, as group-relative training does."""
    rewards = [report.reward for report in reports if report.reward is not None]
    return [
        report
        if report.reward is None
        else replace(report, advantage=report.reward - sum(rewards) / len(rewards))
        for report in reports
    ]


def scripted_policy(
    env: InspectEnv, renderer: Renderer, script: Script, *, max_tokens: int | None = None
) -> TokenCompleter:
    """Make the policy that follows a script in one env's episode."""
    from inspect_tinker_plugin.testing import ScriptedPolicy

    def request() -> TurnRequest:
        assert env.request is not None
        return env.request

    # Only called, its class is never checked: a subclass would import the cookbook there.
    policy = ScriptedPolicy(renderer, script, request=request, max_tokens=max_tokens)
    return cast("TokenCompleter", policy)
