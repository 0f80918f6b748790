"""The parts of an unfinished export: the open one, and the journal of those on disk.

The journal has one line per part, added after the part is on disk.
"""

from __future__ import annotations

import json
import os
import time
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from inspect_tinker_plugin.errors import ExportError
from inspect_tinker_plugin.export.schema import Row, Schema


@dataclass(frozen=True)
class Failure:
    """A sample that could not be exported."""

    id: str
    reason: str


@dataclass(frozen=True)
class Part:
    """A run of consecutive samples that is written, with a file per split that has rows."""

    index: int
    """Number of the part, from 0; names its file."""
    samples: int
    """Samples taken from the selection, those that failed included."""
    rows: dict[str, int]
    """By split, the rows in its file."""
    rich: bool
    """Whether its files have the rich schema."""
    digest: str
    """Hash of the samples' ids, inputs and targets, in their order."""
    failures: list[Failure] = field(default_factory=list)
    left_out: dict[str, int] = field(default_factory=dict)
    """Number of samples left out after they were read, by reason."""


class Journal:
    """The lines of one unfinished export.

    Attributes:
        identity: What is exported; an export continues only with the same identity.
        seed: The seed of this export's order, chosen at random when none was given.
        parts: What is written, in order.
    """

    def __init__(self, path: Path, identity: Mapping[str, Any], seed: int | None) -> None:
        self._path = path
        self.identity = dict(identity)
        self.seed = seed
        self.parts: list[Part] = []

    def start(self) -> None:
        """Write the first line, replacing whatever the file held."""
        line = json.dumps({"identity": self.identity, "seed": self.seed})
        partial = self._path.with_name(self._path.name + ".partial")
        partial.write_text(line + "\n", encoding="utf-8")
        partial.replace(self._path)

    def add(self, part: Part) -> None:
        """Record a part whose file is on disk."""
        self.parts.append(part)
        with self._path.open("a", encoding="utf-8") as file:
            file.write(json.dumps(asdict(part)) + "\n")
            file.flush()
            os.fsync(file.fileno())

    @classmethod
    def read(cls, path: Path) -> Journal | None:
        """Read a journal; a last line that was cut off is dropped, together with its part.

        Returns:
            The journal, or None when the export ended before its first line.
        """
        try:
            lines = path.read_text(encoding="utf-8").split("\n")
        except FileNotFoundError:
            return None
        try:
            head = json.loads(lines[0])
            journal = cls(path, head["identity"], head["seed"])
        except (ValueError, KeyError, TypeError) as error:
            raise ExportError(
                f"{path} is damaged, so the export cannot be continued: start again with "
                "--overwrite."
            ) from error
        for line in lines[1:-1]:
            try:
                fields = json.loads(line)
            except ValueError:
                break
            fields["failures"] = [Failure(**failure) for failure in fields["failures"]]
            journal.parts.append(Part(**fields))
        if lines[-1]:  # cut off in the middle of a line
            journal._rewrite()
        return journal

    def _rewrite(self) -> None:
        parts, self.parts = self.parts, []
        self.start()
        for part in parts:
            self.add(part)


PART_ROWS = 5_000
PART_BYTES = 64 * 1024 * 1024
PART_SECONDS = 30.0
"""A part is written when it reaches any of these, so that an interruption loses little."""

FIRST_ROWS = 256
FIRST_SECONDS = 1.0
"""The first part is written when it reaches both, so that results can be seen early."""


class OpenPart:
    """Rows that are not written yet, and the samples that they come from.

    Args:
        start: Position of the first unit: a sample, or the runs of one.
        schema: Columns of the rows.
    """

    def __init__(self, start: int, schema: Schema) -> None:
        self.start = start
        self.stop = start
        self.schema = schema
        self.rows: dict[str, list[Row]] = {}
        self.failures: list[Failure] = []
        self.left_out: Counter[str] = Counter()
        """Number of samples left out after they were read, by reason."""
        self._bytes = 0
        self._count = 0
        self._since = time.monotonic()

    def add_unit(self, rows: Sequence[tuple[str, Row]], failures: Sequence[Failure]) -> None:
        """Add the results of one unit: rows with their splits, and failures."""
        self.stop += 1
        self._count += max(1, len(rows))
        self.failures += failures
        for split, row in rows:
            self.rows.setdefault(split, []).append(row)
            self._bytes += self.schema.size(row)

    @property
    def full(self) -> bool:
        """Whether it is time to write it."""
        seconds = time.monotonic() - self._since
        if self.start == 0 and self._count >= FIRST_ROWS and seconds >= FIRST_SECONDS:
            return True
        return self._count >= PART_ROWS or self._bytes >= PART_BYTES or seconds >= PART_SECONDS
