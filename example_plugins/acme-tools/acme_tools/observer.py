"""An observer that writes one line per event to the file in ``ACME_EPISODES``."""

from __future__ import annotations

import json
import os
from pathlib import Path

from inspect_ai import Task

from inspect_tinker_plugin.plugins import EpisodeEnded, EpisodeObserver, EpisodeStarted, TurnTaken


class EpisodeFile(EpisodeObserver):
    """Writes start, turns and end of every episode."""

    def __init__(self, path: Path) -> None:
        self._path = path

    def on_episode_start(self, event: EpisodeStarted) -> None:
        self._write(event="start", episode=event.episode, sample=event.sample.id)

    def on_turn(self, event: TurnTaken) -> None:
        text = event.output.completion if event.output is not None else None
        self._write(event="turn", episode=event.episode, index=event.index, text=text)

    def on_episode_end(self, event: EpisodeEnded) -> None:
        self._write(event="end", episode=event.episode, reward=event.reward, error=event.error)

    def _write(self, **line: object) -> None:
        with self._path.open("a") as out:
            out.write(json.dumps(line) + "\n")


def observers(task: Task) -> list[EpisodeFile]:
    """Observe every task while ``ACME_EPISODES`` is set."""
    path = os.environ.get("ACME_EPISODES")
    return [EpisodeFile(Path(path))] if path else []
