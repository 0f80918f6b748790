"""Ends episodes whose rollout was cancelled or failed, without anybody waiting for it."""

from __future__ import annotations

import asyncio
import weakref
from collections.abc import Awaitable
from dataclasses import dataclass
from typing import Any

from inspect_tinker_plugin.episode.runner import Episode

_pending: set[asyncio.Future[Any]] = set()


def close_with_rollout(episode: Episode) -> None:
    """Close an episode when the task that runs now, its rollout, is cancelled or fails.

    A strategy that retries keeps the dead env until its group is done; without this the
    env would keep its sandbox, too, and a retry could wait for it for ever.
    """
    rollout = asyncio.current_task()
    if rollout is not None:
        rollout.add_done_callback(_CloseAfter(weakref.ref(episode)))


def stop_in_background(episode: Episode) -> None:
    """End an episode as by a limit, and score it, while the caller is being cancelled."""
    _run(episode.stop("the rollout was cancelled"))


@dataclass(frozen=True)
class _CloseAfter:
    episode: weakref.ref[Episode]

    def __call__(self, rollout: asyncio.Task[Any]) -> None:
        episode = self.episode()
        if episode is not None and (rollout.cancelled() or rollout.exception() is not None):
            _run(episode.close())


def _run(work: Awaitable[Any]) -> None:
    task = asyncio.ensure_future(work)
    _pending.add(task)  # asyncio itself would let it be collected
    task.add_done_callback(_forget)


def _forget(task: asyncio.Future[Any]) -> None:
    _pending.discard(task)
    if not task.cancelled():
        task.exception()  # an episode that was closed meanwhile; not worth a warning
