"""Logged samples: which become rows or pairs, and their reading, a few at a time.

Reading blocks, and belongs in a thread that has no event loop: there, Inspect's log functions need
no patched asyncio.
"""

from __future__ import annotations

import gc
import zipfile
from collections.abc import Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from functools import lru_cache
from itertools import islice
from typing import Literal, get_args

from inspect_ai.log import EvalSample, read_eval_log_samples_by_id

from inspect_tinker_plugin.contracts.errors import ConfigError
from inspect_tinker_plugin.export.layouts import FORMS, Form
from inspect_tinker_plugin.logs.index import Entry, Index

Keep = Literal["keep", "drop", "only"]
KEEPS: tuple[Keep, ...] = get_args(Keep)


@dataclass(frozen=True, kw_only=True)
class Choice:
    """The choice of logged samples and runs."""

    form: Form = "sft"
    """The purpose of the rows."""

    score: str | None = None
    """The score that is the reward, as ``name`` or ``name.key``; by default the log's headline
    score (of rollout logs, the reward), or else the mean of all."""

    min_score: float | None = None
    """Only samples with at least this reward."""

    max_score: float | None = None
    """Only samples with at most this reward."""

    errors: Keep = "drop"
    """Samples that failed."""

    limits: Keep = "keep"
    """Samples that a limit ended."""

    max_length: int | None = None
    """Only branches of at most this many tokens, as the model's provider counted them."""

    best: int | None = None
    """Maximum runs per sample, those with the highest rewards."""

    threshold: float = 1.0
    """Minimum reward of a good run: ``rejection`` takes no others."""

    margin: float = 0.0
    """Minimum difference of the rewards of a pair; they always differ."""

    pairs: int = 1
    """Maximum pairs per sample."""

    def __post_init__(self) -> None:
        for name, value, known in (
            ("form", self.form, FORMS),
            ("errors", self.errors, KEEPS),
            ("limits", self.limits, KEEPS),
        ):
            if value not in known:
                raise ConfigError(f"unknown {name} {value!r}; there is {', '.join(known)}")
        for name, least in (("best", 1), ("pairs", 1), ("margin", 0), ("max_length", 1)):
            value = getattr(self, name)
            if value is not None and value < least:
                raise ConfigError(f"{name} is {value}; it must be at least {least}")

    def why_not(self, entry: Entry) -> str | None:
        """Say why a sample is left out; ``None`` when it is not."""
        if (self.errors == "only" and not entry.error) or (self.errors == "drop" and entry.error):
            return "failed" if entry.error else "did not fail"
        if self.limits == "only" and entry.limit is None:
            return "no limit ended it"
        if self.limits == "drop" and entry.limit is not None:
            return "a limit ended it"
        return self._why_not_by_reward(entry.reward)

    def _why_not_by_reward(self, reward: float | None) -> str | None:
        bounded = self.min_score is not None or self.max_score is not None
        if reward is None:
            needed = bounded or self.best is not None or self.form != "sft"
            return "unscored" if needed else None
        if self.form == "rejection" and reward < self.threshold:
            return "not good"
        if self.min_score is not None and reward < self.min_score:
            return "score too low"
        if self.max_score is not None and reward > self.max_score:
            return "score too high"
        return None

    def ordered(self, entries: Sequence[Entry]) -> list[Entry]:
        """Return the runs of a sample in the order to try them: the best first, if limited."""
        if self.best is None:
            return list(entries)
        return sorted(entries, key=_falling)

    def order(self, entries: Sequence[Entry]) -> list[Entry]:
        """Return the runs of a sample that will be read, unless one fails, in that order."""
        if self.form != "preference":
            return self.ordered(entries)[: self.best]
        pairs = islice(self.paired(entries), self.pairs)
        return list(dict.fromkeys(entry for pair in pairs for entry in pair))

    def paired(self, entries: Sequence[Entry]) -> Iterator[tuple[Entry, Entry]]:
        """Yield all pairs of the runs of a sample: one that is better and one that is worse.

        First come pairs that have no run in common, those that differ most before others.
        """
        ranked = sorted(entries, key=_falling)
        size = len(ranked)
        for shift in range(size):
            for place in range(size):
                better, worse = ranked[place], ranked[size - 1 - (place + shift) % size]
                assert better.reward is not None
                assert worse.reward is not None
                gap = better.reward - worse.reward
                if gap > 0 and gap >= self.margin:
                    yield better, worse


def _falling(entry: Entry) -> tuple[float, int]:
    return (-(entry.reward or 0.0), entry.place)


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
