"""What the judges of a run have cost, and the bounds that a run sets them.

With a folder, the totals are in a file of the run: they hold in all of its processes, and when it
is continued.
"""

from __future__ import annotations

import json
import os
from collections.abc import Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from pathlib import Path

from filelock import FileLock

JUDGES = "judges.json"
"""File in a run's folder with the calls, tokens and dollars of its judges."""

_TOTALS = ("calls", "tokens", "cost")

_folder: ContextVar[Path | None] = ContextVar("inspect_rl_judges_folder", default=None)


@contextmanager
def spend_in(folder: Path | None) -> Iterator[None]:
    """Keep what judges cost in the folder of their run."""
    token = _folder.set(folder)
    try:
        yield
    finally:
        _folder.reset(token)


class Spending:
    """Totals of calls, tokens and dollars: of the running run, or else of this object."""

    def __init__(self) -> None:
        self._own = dict.fromkeys(_TOTALS, 0.0)

    @contextmanager
    def totals(self) -> Iterator[dict[str, float]]:
        """Give the totals to read and to add to; no other process changes them meanwhile."""
        folder = _folder.get()
        if folder is None:
            yield self._own
            return
        path = folder / JUDGES
        with FileLock(path.with_suffix(".lock")):
            found = json.loads(path.read_text(encoding="utf-8")) if path.is_file() else {}
            totals = {**dict.fromkeys(_TOTALS, 0.0), **found}
            yield totals
            part = path.with_suffix(".part")
            part.write_text(json.dumps(totals), encoding="utf-8")
            os.replace(part, path)
