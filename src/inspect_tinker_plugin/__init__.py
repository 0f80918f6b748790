"""Turn any Inspect AI task into a Tinker reinforcement-learning environment.

Importing this package is cheap: its exports are loaded when they are first used, and the
Tinker cookbook (with PyTorch) only by those that need it.
"""

from __future__ import annotations

import importlib
import sys
from typing import TYPE_CHECKING, Any

if sys.platform == "win32":  # no signals, locks of files and process groups as used throughout
    raise ImportError(
        "inspect-tinker-plugin runs on Linux and macOS; on Windows, install it in WSL 2"
    )

from inspect_tinker_plugin import _startup

if TYPE_CHECKING:
    __version__: str
    """The installed release, from its tag."""

    from inspect_tinker_plugin.contracts.episodes import EpisodeResult, TurnRequest
    from inspect_tinker_plugin.contracts.errors import (
        Cause,
        ConfigError,
        EpisodeError,
        InspectRLError,
        SandboxError,
    )
    from inspect_tinker_plugin.episode.clean import clean_sandbox
    from inspect_tinker_plugin.episode.runner import Episode, EpisodeRunner
    from inspect_tinker_plugin.options import EpisodeOptions
    from inspect_tinker_plugin.plugins.hookspecs import hookimpl
    from inspect_tinker_plugin.processes.workers import freeze_memory
    from inspect_tinker_plugin.rewards import Reward
    from inspect_tinker_plugin.rl.builder import InspectRLDatasetBuilder
    from inspect_tinker_plugin.rl.dataset import InspectRLDataset, as_rl_dataset
    from inspect_tinker_plugin.rl.mixture import InspectRLMixture, MixedTask, as_rl_mixture
    from inspect_tinker_plugin.tasks.reference import TaskRef

_HOMES = {
    "contracts.episodes": ("EpisodeResult", "TurnRequest"),
    "contracts.errors": ("Cause", "ConfigError", "EpisodeError", "InspectRLError", "SandboxError"),
    "episode.clean": ("clean_sandbox",),
    "episode.runner": ("Episode", "EpisodeRunner"),
    "options": ("EpisodeOptions",),
    "plugins.hookspecs": ("hookimpl",),
    "processes.workers": ("freeze_memory",),
    "rewards": ("Reward",),
    "rl.builder": ("InspectRLDatasetBuilder",),
    "rl.dataset": ("InspectRLDataset", "as_rl_dataset"),
    "rl.mixture": ("InspectRLMixture", "MixedTask", "as_rl_mixture"),
    "tasks.reference": ("TaskRef",),
}

__all__ = [
    "Cause",
    "ConfigError",
    "Episode",
    "EpisodeError",
    "EpisodeOptions",
    "EpisodeResult",
    "EpisodeRunner",
    "InspectRLDataset",
    "InspectRLDatasetBuilder",
    "InspectRLError",
    "InspectRLMixture",
    "MixedTask",
    "Reward",
    "SandboxError",
    "TaskRef",
    "TurnRequest",
    "as_rl_dataset",
    "as_rl_mixture",
    "clean_sandbox",
    "freeze_memory",
    "hookimpl",
]


def __getattr__(name: str) -> Any:
    if name == "__version__":
        return _version()
    for home, names in _HOMES.items():
        if name in names:
            value = getattr(importlib.import_module(f"{__name__}.{home}"), name)
            globals()[name] = value
            return value
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")


def _version() -> str:
    from importlib.metadata import PackageNotFoundError, version

    try:
        return version("inspect-tinker-plugin")
    except PackageNotFoundError:  # a source folder on the path, not installed
        return "0+unknown"


def __dir__() -> list[str]:
    return sorted(__all__)


_startup.install()
