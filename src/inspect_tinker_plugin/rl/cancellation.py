"""Closes episodes whose rollout was cancelled or failed, without anybody waiting for it."""

from __future__ import annotations

import asyncio
import weakref
from dataclasses import dataclass
from typing import Any

from inspect_tinker_plugin.episode.runner import Episode


def close_with_rollout(episode: Episode) -> None:
    """Close an episode when the current task, its rollout, is cancelled or fails.

    A strategy that retries keeps the dead env until its group is done; without this function the
    env would also keep its sandbox, and a retry could wait for it for ever. A task that runs
    one rollout after another keeps nothing of those that have ended.
    """
    rollout = asyncio.current_task()
    if rollout is None:
        return
    tie = _CloseAfter(weakref.ref(episode))
    rollout.add_done_callback(tie)
    episode.at_end(_Untie(weakref.ref(rollout), tie))


@dataclass(frozen=True)
class _CloseAfter:
    episode: weakref.ref[Episode]

    def __call__(self, rollout: asyncio.Task[Any]) -> None:
        episode = self.episode()
        if episode is not None and (rollout.cancelled() or rollout.exception() is not None):
            episode.shut()


@dataclass(frozen=True)
class _Untie:
    rollout: weakref.ref[asyncio.Task[Any]]
    tie: _CloseAfter

    def __call__(self) -> None:
        rollout = self.rollout()
        if rollout is not None:
            rollout.remove_done_callback(self.tie)
