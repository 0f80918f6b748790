"""Chooses which logged samples become rows, and which two become a pair."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import islice
from typing import Literal, get_args

from inspect_tinker_plugin.contracts.errors import ConfigError
from inspect_tinker_plugin.export.layouts import FORMS, Form
from inspect_tinker_plugin.rewards.logged import Entry

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
