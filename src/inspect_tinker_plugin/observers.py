"""Former module of the observers, which are now in ``inspect_tinker_plugin.plugins``."""

from __future__ import annotations

from inspect_tinker_plugin.plugins.contracts import (
    EpisodeEnded,
    EpisodeObserver,
    EpisodeStarted,
    TurnTaken,
)

__all__ = ["EpisodeEnded", "EpisodeObserver", "EpisodeStarted", "TurnTaken"]
