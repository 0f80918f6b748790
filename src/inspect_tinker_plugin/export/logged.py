"""Reads logged samples, a few at a time.

Reading blocks, and belongs in a thread that has no event loop: there, Inspect's log functions need
no patched asyncio.
"""

from __future__ import annotations

import gc
import zipfile
from collections.abc import Mapping, Sequence
from contextlib import suppress
from functools import lru_cache

from inspect_ai.log import EvalSample, read_eval_log_samples_by_id

from inspect_tinker_plugin.logs.index import Entry, Index

UNREAD = frozenset({"store", "messages", "output", "timelines"})
"""Fields of a sample that an export does not use."""

_AT_ONCE = 16
_BYTES_AT_ONCE = 8 * 1024 * 1024
"""Maximum bytes of samples that are read together, by their size in the log."""

_COLLECTED_AFTER = 256
"""Samples after whose reading memory is reclaimed: the event loop of each reading leaves cycles
that hold the log's directory, and Python alone would wait until there are many."""


class Reader:
    """Reads the samples of an index, a few ahead.

    Args:
        index: The index.
        entries: Those that will be asked for, about in that order; others are read one by one.
        unread: Fields that are not read.
    """

    def __init__(
        self, index: Index, entries: Sequence[Entry], *, unread: frozenset[str] = UNREAD
    ) -> None:
        self._logs = index.logs
        self._unread = set(unread)
        self._entries = entries
        self._at = {entry.place: number for number, entry in enumerate(entries)}
        self._read: dict[int, EvalSample] = {}
        self._since_collected = 0

    def sample(self, entry: Entry) -> EvalSample:
        """Return a sample, with its events and without its messages; the caller keeps it."""
        if entry.place not in self._read:
            window = self._window(entry)
            try:
                self._fetch(window)
            except Exception:
                if len(window) == 1:
                    raise
                self._fetch([entry])  # another one cannot be read, and fails alone
        return self._read.pop(entry.place)

    def forget(self, entries: Sequence[Entry]) -> None:
        """Discard samples that were read ahead and are not needed."""
        for entry in entries:
            self._read.pop(entry.place, None)

    def _window(self, first: Entry) -> list[Entry]:
        sizes = _sizes(self._logs[first.log].path)
        start = self._at.get(first.place)
        if start is None:
            return [first]
        window: list[Entry] = []
        total = 0
        for entry in self._entries[start : start + _AT_ONCE]:
            total += sizes.get(f"samples/{entry.id}_epoch_{entry.epoch}.json", _BYTES_AT_ONCE // 4)
            if entry.log != first.log or (window and total > _BYTES_AT_ONCE):
                break
            if entry.place not in self._read:
                window.append(entry)
        return window

    def _fetch(self, window: Sequence[Entry]) -> None:
        samples = read_eval_log_samples_by_id(
            self._logs[window[0].log].path,
            [(entry.id, entry.epoch) for entry in window],
            concurrency=1,
            resolve_attachments="core",
            exclude_fields=self._unread,
        )
        self._read.update(
            {entry.place: sample for entry, sample in zip(window, samples, strict=True)}
        )
        self._since_collected += len(window)
        if self._since_collected >= _COLLECTED_AFTER:
            self._since_collected = 0
            gc.collect()


@lru_cache(maxsize=4)
def _sizes(path: str) -> Mapping[str, int]:
    """Return the bytes of each file in a log; nothing for a log that is not of this machine."""
    with suppress(OSError, zipfile.BadZipFile), zipfile.ZipFile(path) as log:
        return {info.filename: info.file_size for info in log.infolist()}
    return {}
