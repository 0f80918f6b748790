"""The part of an export that is not written yet."""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Sequence

from inspect_tinker_plugin.export.journal import Failure
from inspect_tinker_plugin.export.schema import Row, Schema

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
