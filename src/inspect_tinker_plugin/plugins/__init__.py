"""Everything that a package with hooks imports, in one place."""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

from inspect_tinker_plugin.contracts.episodes import EpisodeResult
from inspect_tinker_plugin.contracts.errors import PluginError
from inspect_tinker_plugin.contracts.hooks import (
    EpisodeEnded,
    EpisodeObserver,
    EpisodeStarted,
    GroupOutcome,
    SamplePool,
    Sampler,
    SampleStage,
    ToolExecutor,
    ToolInvocation,
    ToolScope,
    TurnTaken,
)
from inspect_tinker_plugin.contracts.rewards import (
    GroupAggregator,
    GroupMember,
    Reward,
    RewardAggregator,
)
from inspect_tinker_plugin.contracts.sandboxes import SandboxMapper
from inspect_tinker_plugin.contracts.wording import counted, first_error, part_of, place_in_code
from inspect_tinker_plugin.plugins.expressions import Catalogue, ExpressionError, build
from inspect_tinker_plugin.plugins.hookspecs import hookimpl
from inspect_tinker_plugin.plugins.manager import (
    HOOKS,
    NAMING_HOOKS,
    Plugin,
    Plugins,
    default_plugins,
)

if TYPE_CHECKING:
    from inspect_tinker_plugin.rewards import Mean

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
    "first_error",
    "hookimpl",
    "part_of",
    "place_in_code",
]


def __getattr__(name: str) -> Any:
    if name == "Mean":  # from a folder above this one
        return importlib.import_module("inspect_tinker_plugin.rewards").Mean
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
