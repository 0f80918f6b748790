"""The built-in plugin: the package's own implementations, through the same hooks as others'."""

from __future__ import annotations

from collections.abc import Callable, Mapping

from inspect_tinker_plugin.contracts.hooks import Sampler, ToolExecutor
from inspect_tinker_plugin.contracts.rewards import GroupAggregator, RewardAggregator
from inspect_tinker_plugin.plugins.hookspecs import hookimpl
from inspect_tinker_plugin.rewards.builtin import REWARD_AGGREGATORS
from inspect_tinker_plugin.rewards.group import GROUP_AGGREGATORS
from inspect_tinker_plugin.samplers import SAMPLERS
from inspect_tinker_plugin.tools import TOOL_EXECUTORS


@hookimpl
def inspect_rl_reward_aggregators() -> Mapping[str, Callable[..., RewardAggregator]]:
    """Return ``mean``, ``weighted``, ``length`` and the others."""
    return REWARD_AGGREGATORS


@hookimpl
def inspect_rl_group_aggregators() -> Mapping[str, Callable[..., GroupAggregator]]:
    """Return ``rank``, ``best_of``, ``diversity``, ``pairwise`` and ``ranking``."""
    return GROUP_AGGREGATORS


@hookimpl
def inspect_rl_tool_executors() -> Mapping[str, Callable[..., ToolExecutor]]:
    """Return ``inspect``, ``cached``, ``limited``, ``scripted`` and ``route``."""
    return TOOL_EXECUTORS


@hookimpl
def inspect_rl_samplers() -> Mapping[str, Callable[..., Sampler]]:
    """Return ``curriculum``."""
    return SAMPLERS
