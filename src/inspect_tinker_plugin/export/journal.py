"""The journal of an unfinished export: one line per part, added after the part is on disk."""

from __future__ import annotations

import json
import os
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from inspect_tinker_plugin.errors import ExportError


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
