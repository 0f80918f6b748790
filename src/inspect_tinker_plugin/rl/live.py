"""The rollouts that run at the moment, in files that `inspect rl watch` reads.

Each process that rolls out has a file in ``RUN/live``, which is there only while a run is trained.
"""

from __future__ import annotations

import asyncio
import json
import os
import socket
import time
from collections import deque
from contextlib import suppress
from pathlib import Path
from typing import Any

from inspect_tinker_plugin.processes.loops import running_loop

LIVE = "live"
"""Folder of these files, in the folder of the run."""

_DELAY = 1.0
"""Seconds from a change until it is written, with those that came meanwhile."""

_RECENT = 10
"""Rollouts that are kept after their end."""


class LiveRollouts:
    """The rollouts of this process, written about once per second while they change.

    Args:
        folder: The folder ``live`` of the run.
    """

    def __init__(self, folder: Path) -> None:
        self._path = folder / f"{socket.gethostname()}-{os.getpid()}.json"
        self._running: dict[str, dict[str, Any]] = {}
        self._ended: deque[dict[str, Any]] = deque(maxlen=_RECENT)
        self._planned: asyncio.AbstractEventLoop | None = None

    @classmethod
    def of(cls, run: Path | None) -> LiveRollouts | None:
        """Return those of a run that is being trained; ``None`` if nobody can watch it."""
        folder = None if run is None else run / LIVE
        return None if folder is None or not folder.is_dir() else cls(folder)

    def start(self, episode: str, *, task: str, sample: int | str | None, epoch: int) -> None:
        """Note that an episode has begun."""
        self._running[episode] = {
            "task": task,
            "sample": sample,
            "epoch": epoch,
            "turns": 0,
            "started": time.time(),
        }
        self._plan()

    def count_turn(self, episode: str) -> None:
        """Note that the policy has answered a call."""
        if (rollout := self._running.get(episode)) is not None:
            rollout["turns"] += 1
            self._plan()

    def end(self, episode: str, reward: float | None = None, error: str | None = None) -> None:
        """Note that an episode has ended, with a reward or an error; or was only closed."""
        if (rollout := self._running.pop(episode, None)) is None:
            return
        if reward is not None or error is not None:
            self._ended.append({**rollout, "reward": reward, "error": error, "ended": time.time()})
        self._plan()

    def _plan(self) -> None:
        loop = running_loop()
        if not self._running or loop is None:  # a worker's loop may end now; a thread may have none
            self._write()
            return
        if self._planned is not loop:
            self._planned = loop
            loop.call_later(_DELAY, self._write)

    def _write(self) -> None:
        self._planned = None
        about = {
            "host": socket.gethostname(),
            "pid": os.getpid(),
            "running": list(self._running.values()),
            "ended": list(self._ended),
        }
        part = self._path.with_suffix(".part")
        with suppress(OSError):  # the training has ended
            part.write_text(json.dumps(about, default=str), encoding="utf-8")
            os.replace(part, self._path)
