"""The former home of observers: they are in ``inspect_tinker_plugin.plugins``."""

from __future__ import annotations

from inspect_tinker_plugin.plugins.contracts import (
    EpisodeEnded,
    EpisodeObserver,
    EpisodeStarted,
    TurnTaken,
)

__all__ = ["EpisodeEnded", "EpisodeObserver", "EpisodeStarted", "TurnTaken"]
