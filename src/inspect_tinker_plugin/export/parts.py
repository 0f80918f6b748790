"""The parts of an unfinished export: the open one, and the journal of those on disk.

The journal has one line per part, added after the part is on disk.
"""

from __future__ import annotations

import hashlib
import json
import os
import time
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from inspect_tinker_plugin.contracts.errors import ExportError
from inspect_tinker_plugin.export.schema import PartWriter, Row, Schema


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
    checksums: dict[str, str] = field(default_factory=dict)
    """By split, the checksum of its file."""


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
        """Write all lines, replacing whatever the file held."""
        lines = [{"identity": self.identity, "seed": self.seed}, *map(asdict, self.parts)]
        partial = self._path.with_name(self._path.name + ".partial")
        partial.write_text("".join(json.dumps(line) + "\n" for line in lines), encoding="utf-8")
        partial.replace(self._path)

    def keep(self, parts: Sequence[Part]) -> None:
        """Have these parts instead."""
        self.parts = list(parts)
        self.start()

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
            lines = path.read_bytes().decode(errors="replace").split("\n")
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
                fields["failures"] = [Failure(**failure) for failure in fields["failures"]]
                journal.parts.append(Part(**fields))
            except (ValueError, KeyError, TypeError):
                break
        if len(journal.parts) < len(lines) - 2 or lines[-1]:  # damaged, or cut off within a line
            journal.keep(journal.parts)
        return journal


def checksum(path: Path) -> str | None:
    """Return a checksum of a file, ``None`` if there is none."""
    try:
        with path.open("rb") as file:
            return hashlib.file_digest(file, "blake2b").hexdigest()[:32]
    except FileNotFoundError:
        return None


def unwritable(path: Path, error: OSError) -> ExportError:
    """Make a one-line error that says why a folder cannot be written."""
    return ExportError(f"cannot write to {path}: {error.strerror or error}.")


PART_ROWS = 5_000
PART_BYTES = 64 * 1024 * 1024
PART_SECONDS = 30.0
"""A part is completed when it reaches any of these, so that an interruption loses little."""

FIRST_ROWS = 256
FIRST_SECONDS = 1.0
"""The first part is completed when it reaches both, so that results can be seen early."""

HELD_ROWS = 1_000
HELD_BYTES = 512 * 1024
"""Rows are written when there are as many of either in memory."""


class OpenPart:
    """The part that is being written, and the samples that its rows come from.

    Args:
        start: Position of the first unit: a sample, or the runs of one.
        folder: The folder of the export, for messages.
        schema: Columns of the rows.
        rich: Whether its files have the rich schema from the start; they get it with the first
            row that needs it.
        open_file: Opens the file of a split, in the rich schema or not.
    """

    def __init__(
        self,
        start: int,
        folder: Path,
        schema: Schema,
        rich: bool,
        open_file: Callable[[str, bool], PartWriter],
    ) -> None:
        self.start = start
        self.stop = start
        self.rich = rich
        self.rows: Counter[str] = Counter()
        """Number of rows, by split."""
        self.failures: list[Failure] = []
        self.left_out: Counter[str] = Counter()
        """Number of samples left out after they were read, by reason."""
        self._folder = folder
        self._schema = schema
        self._open_file = open_file
        self._files: dict[str, PartWriter] = {}
        self._held: list[tuple[str, Row]] = []
        self._held_bytes = 0
        self._bytes = 0
        self._since = time.monotonic()

    def add(self, split: str, row: Row) -> None:
        """Add a row of the current unit.

        Raises:
            ExportError: The disk is full or the folder is gone.
        """
        size = self._schema.size(row)
        self._held.append((split, row))
        self.rows[split] += 1
        self._bytes += size
        self._held_bytes += size
        if len(self._held) >= HELD_ROWS or self._held_bytes >= HELD_BYTES:
            try:
                self._write()
            except OSError as error:
                raise unwritable(self._folder, error) from error

    def end_unit(self, failures: Sequence[Failure] = ()) -> None:
        """Take note that the current unit has no more rows, and what of it failed."""
        self.stop += 1
        self.failures += failures

    @property
    def full(self) -> bool:
        """Whether it is time to complete it."""
        seconds = time.monotonic() - self._since
        count = max(self.stop - self.start, self.rows.total())
        if self.start == 0 and count >= FIRST_ROWS and seconds >= FIRST_SECONDS:
            return True
        return count >= PART_ROWS or self._bytes >= PART_BYTES or seconds >= PART_SECONDS

    def close(self) -> None:
        """Complete the files.

        Raises:
            OSError: The disk is full or the folder is gone.
        """
        self._write()
        for file in self._files.values():
            file.close()
        self._files.clear()

    def discard(self) -> None:
        """Remove the files if they are not complete."""
        for file in self._files.values():
            file.discard()
        self._files.clear()
        self._held.clear()

    def _write(self) -> None:
        if not self.rich and any(self._schema.is_rich(row) for _, row in self._held):
            self.rich = True
            for file in self._files.values():
                file.widen()
        by_split: dict[str, list[Row]] = {}
        for split, row in self._held:
            by_split.setdefault(split, []).append(row)
        self._held.clear()
        self._held_bytes = 0
        for split, rows in by_split.items():
            if split not in self._files:
                self._files[split] = self._open_file(split, self.rich)
            self._files[split].write(rows)
