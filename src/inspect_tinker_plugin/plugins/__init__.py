"""Everything that a package with hooks imports, in one place.

The names are looked up when they are first used: a plugin with rewards does not load samplers.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from inspect_tinker_plugin.contracts.episodes import EpisodeResult
    from inspect_tinker_plugin.contracts.errors import PluginError
    from inspect_tinker_plugin.contracts.observers import (
        EpisodeEnded,
        EpisodeObserver,
        EpisodeStarted,
        SampleStage,
        TurnTaken,
    )
    from inspect_tinker_plugin.contracts.sandboxes import SandboxMapper
    from inspect_tinker_plugin.contracts.wording import counted, part_of
    from inspect_tinker_plugin.plugins.expressions import ExpressionError, build
    from inspect_tinker_plugin.plugins.hookspecs import hookimpl
    from inspect_tinker_plugin.plugins.manager import (
        HOOKS,
        NAMING_HOOKS,
        Catalogue,
        Plugin,
        Plugins,
        default_plugins,
    )
    from inspect_tinker_plugin.rewards import (
        GroupAggregator,
        GroupMember,
        Mean,
        Reward,
        RewardAggregator,
    )
    from inspect_tinker_plugin.samplers import GroupOutcome, SamplePool, Sampler
    from inspect_tinker_plugin.tools import ToolExecutor, ToolInvocation, ToolScope

_HOMES = {
    "contracts.episodes": ["EpisodeResult"],
    "contracts.errors": ["PluginError"],
    "contracts.observers": [
        "EpisodeEnded",
        "EpisodeObserver",
        "EpisodeStarted",
        "SampleStage",
        "TurnTaken",
    ],
    "contracts.sandboxes": ["SandboxMapper"],
    "contracts.wording": ["counted", "part_of"],
    "plugins.expressions": ["ExpressionError", "build"],
    "plugins.hookspecs": ["hookimpl"],
    "plugins.manager": [
        "HOOKS",
        "NAMING_HOOKS",
        "Catalogue",
        "Plugin",
        "Plugins",
        "default_plugins",
    ],
    "rewards": ["GroupAggregator", "GroupMember", "Mean", "Reward", "RewardAggregator"],
    "samplers": ["GroupOutcome", "SamplePool", "Sampler"],
    "tools": ["ToolExecutor", "ToolInvocation", "ToolScope"],
}
__all__ = [
    "HOOKS",
    "NAMING_HOOKS",
    "Catalogue",
    "EpisodeEnded",
    "EpisodeObserver",
    "EpisodeResult",
    "EpisodeStarted",
    "ExpressionError",
    "GroupAggregator",
    "GroupMember",
    "GroupOutcome",
    "Mean",
    "Plugin",
    "PluginError",
    "Plugins",
    "Reward",
    "RewardAggregator",
    "SamplePool",
    "SampleStage",
    "Sampler",
    "SandboxMapper",
    "ToolExecutor",
    "ToolInvocation",
    "ToolScope",
    "TurnTaken",
    "build",
    "counted",
    "default_plugins",
    "hookimpl",
    "part_of",
]


def __getattr__(name: str) -> Any:
    for home, names in _HOMES.items():
        if name in names:
            return getattr(importlib.import_module(f"inspect_tinker_plugin.{home}"), name)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")


def __dir__() -> list[str]:
    return sorted(__all__)
