"""Everything that a package with hooks imports, in one place.

The names are looked up when they are first used: a plugin with rewards does not load samplers.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from inspect_tinker_plugin.contracts.episodes import EpisodeResult
    from inspect_tinker_plugin.contracts.observers import (
        EpisodeEnded,
        EpisodeObserver,
        EpisodeStarted,
        SampleStage,
        TurnTaken,
    )
    from inspect_tinker_plugin.contracts.sandboxes import SandboxMapper
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
    "HOOKS": "plugins.manager",
    "NAMING_HOOKS": "plugins.manager",
    "Catalogue": "plugins.manager",
    "EpisodeEnded": "contracts.observers",
    "EpisodeObserver": "contracts.observers",
    "EpisodeResult": "contracts.episodes",
    "EpisodeStarted": "contracts.observers",
    "GroupAggregator": "rewards",
    "GroupMember": "rewards",
    "GroupOutcome": "samplers",
    "Mean": "rewards",
    "Plugin": "plugins.manager",
    "Plugins": "plugins.manager",
    "Reward": "rewards",
    "RewardAggregator": "rewards",
    "SamplePool": "samplers",
    "SampleStage": "contracts.observers",
    "Sampler": "samplers",
    "SandboxMapper": "contracts.sandboxes",
    "ToolExecutor": "tools",
    "ToolInvocation": "tools",
    "ToolScope": "tools",
    "TurnTaken": "contracts.observers",
    "default_plugins": "plugins.manager",
    "hookimpl": "plugins.hookspecs",
}

__all__ = [
    "HOOKS",
    "NAMING_HOOKS",
    "Catalogue",
    "EpisodeEnded",
    "EpisodeObserver",
    "EpisodeResult",
    "EpisodeStarted",
    "GroupAggregator",
    "GroupMember",
    "GroupOutcome",
    "Mean",
    "Plugin",
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
    "default_plugins",
    "hookimpl",
]


def __getattr__(name: str) -> Any:
    home = _HOMES.get(name)
    if home is None:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    value = getattr(importlib.import_module(f"inspect_tinker_plugin.{home}"), name)
    globals()[name] = value
    return value


def __dir__() -> list[str]:
    return sorted(__all__)
