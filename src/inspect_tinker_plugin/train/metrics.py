"""Reads the cookbook's ``metrics.jsonl``, also while it is being written or after a crash."""

from __future__ import annotations

import json
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any

METRICS = "metrics.jsonl"
REWARD = "env/all/reward/total"
"""Mean reward of a step's rollouts."""

TEST = "test"
"""Prefix of the test set's metrics."""

Row = Mapping[str, Any]


def number(row: Row, name: str) -> float | None:
    """Return a metric of a row; ``None`` when it is absent or not a number."""
    value = row.get(name)
    if isinstance(value, bool) or not isinstance(value, int | float):
        return None
    return float(value)


def parse(lines: Iterable[str]) -> Iterator[dict[str, Any]]:
    """Read rows; a line that a killed process left unfinished is skipped."""
    for line in lines:
        try:
            row = json.loads(line)
        except ValueError:
            continue
        if isinstance(row, dict):
            yield row


def read_steps(log_dir: Path) -> dict[int, dict[str, Any]]:
    """Return the metrics of each step, in order.

    A step has several rows when it was repeated after an interruption, or was evaluated
    beside the training: later values replace earlier ones.
    """
    path = log_dir / METRICS
    if not path.is_file():
        return {}
    steps: dict[int, dict[str, Any]] = {}
    for row in parse(path.read_text(encoding="utf-8", errors="replace").splitlines()):
        if isinstance(row.get("step"), int):
            steps.setdefault(row["step"], {}).update(row)
    return dict(sorted(steps.items()))


class FileTail:
    """Yields the lines that are added to a file; existing lines are skipped."""

    def __init__(self, path: Path) -> None:
        self._path = path
        self._position = path.stat().st_size if path.is_file() else 0
        self._rest = b""

    def lines(self) -> list[str]:
        """Return the complete lines since the last call."""
        if not self._path.is_file():
            return []
        with self._path.open("rb") as file:
            file.seek(self._position)
            data = self._rest + file.read()
            self._position = file.tell()
        *whole, self._rest = data.split(b"\n")
        return [line.decode(errors="replace") for line in whole]
