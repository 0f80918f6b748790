"""Hooks: each only names its objects, which the other modules implement."""

from __future__ import annotations

from collections.abc import Callable, Mapping

from inspect_tinker_plugin.plugins import RewardAggregator, SandboxMapper, ToolExecutor, hookimpl
from newname_plugin.executor import Once
from newname_plugin.reward import Brief
from newname_plugin.sandboxes import here


@hookimpl
def inspect_rl_reward_aggregators() -> Mapping[str, Callable[..., RewardAggregator]]:
    return {"newname_brief": Brief}


@hookimpl
def inspect_rl_tool_executors() -> Mapping[str, Callable[..., ToolExecutor]]:
    return {"newname_once": Once}


@hookimpl
def inspect_rl_sandbox_providers() -> Mapping[str, SandboxMapper]:
    return {"newname_here": here}
