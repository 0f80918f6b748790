"""Whole rollouts through the dataset and the cookbook, for tests of what the trainer gets."""

from __future__ import annotations

from typing import Any, cast

from inspect_ai import Task
from tinker_cookbook.completers import TokenCompleter
from tinker_cookbook.rl.rollouts import do_group_rollout

from inspect_tinker_plugin import as_rl_dataset
from inspect_tinker_plugin.testing import Script, ScriptedPolicy, load_renderer


async def rewards_of(task: Task, script: Script, **options: Any) -> list[float]:
    """Roll out the first sample's group; raises what a failed episode raises."""
    renderer = load_renderer()
    [builder] = as_rl_dataset(task, renderer, limit=1, **options).get_batch(0)
    policy = cast(TokenCompleter, ScriptedPolicy(renderer, script))
    group = await do_group_rollout(builder, policy)
    assert group is not None
    return [float(reward) for reward in group.get_total_rewards()]
