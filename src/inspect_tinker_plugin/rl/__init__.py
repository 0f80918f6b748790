"""The cookbook's interfaces: datasets, groups and environments made of episodes."""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from inspect_tinker_plugin.rl.dataset import InspectRLDataset, build_dataset
    from inspect_tinker_plugin.rl.hooks import with_plugin_scorers
    from inspect_tinker_plugin.rl.models import make_renderer, no_key, tinker_policy

_HOMES = {
    "rl.dataset": ("InspectRLDataset", "build_dataset"),
    "rl.hooks": ("with_plugin_scorers",),
    "rl.models": ("make_renderer", "no_key", "tinker_policy"),
}

__all__ = [
    "InspectRLDataset",
    "build_dataset",
    "make_renderer",
    "no_key",
    "tinker_policy",
    "with_plugin_scorers",
]


def __getattr__(name: str) -> Any:
    for home, names in _HOMES.items():
        if name in names:
            return getattr(importlib.import_module(f"inspect_tinker_plugin.{home}"), name)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
