"""The options of exports: formats, layouts, and which logged samples and runs become rows."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from itertools import islice
from typing import TYPE_CHECKING, Literal, get_args

from inspect_tinker_plugin.contracts.errors import ConfigError
from inspect_tinker_plugin.options import DatasetOptions, option

if TYPE_CHECKING:
    from inspect_tinker_plugin.logs.index import Entry

Format = Literal["parquet", "jsonl", "arrow"]
FORMATS: tuple[Format, ...] = get_args(Format)

Layout = Literal["chat", "trl", "verl", "verifiers", "tinker"]
LAYOUTS: tuple[Layout, ...] = get_args(Layout)

Form = Literal["sft", "preference", "rejection", "rewards"]
FORMS: tuple[Form, ...] = get_args(Form)

Keep = Literal["keep", "drop", "only"]
KEEPS: tuple[Keep, ...] = get_args(Keep)

TRAIN = "train"
"""The split of rows that are not held out."""


@dataclass(frozen=True, kw_only=True)
class FolderOptions:
    """How the folder of an export is written."""

    format: Format = "parquet"
    """File format."""

    layout: Layout = "chat"
    """Columns: those of this project, or those that a trainer reads."""

    overwrite: bool = False
    """Start a new export, whatever export the folder holds."""

    def __post_init__(self) -> None:
        if self.format not in FORMATS:
            raise ConfigError(f"unknown format {self.format!r}; there is {', '.join(FORMATS)}.")
        if self.layout not in LAYOUTS:
            raise ConfigError(f"unknown layout {self.layout!r}; there is {', '.join(LAYOUTS)}.")


@dataclass(frozen=True, kw_only=True)
class ExportOptions(FolderOptions):
    """How a task is exported."""

    dataset: DatasetOptions = field(default_factory=DatasetOptions)
    """Which samples, and how their episodes begin: solver, sandbox, limits and model roles."""

    solver_name: str | None = None
    """Name and arguments of the solver, as text; an export continues only with the same."""

    max_samples: int = option(
        16, "Maximum number of samples to prepare in parallel, by all workers."
    )
    workers: int = option(1, "Prepare samples in N processes, each of which loads the task.")

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.max_samples < 1:
            raise ConfigError(f"max_samples is {self.max_samples}; it must be at least 1.")
        if not 1 <= self.workers <= self.max_samples:
            raise ConfigError(
                f"workers is {self.workers}; it must be at least 1 and at most max_samples "
                f"({self.max_samples}), which they share."
            )


_OF_FORMS: dict[str, tuple[Form, ...]] = {
    "best": ("sft", "rejection", "rewards"),
    "threshold": ("rejection", "rewards"),
    "margin": ("preference",),
    "pairs": ("preference",),
}
"""Choices that do nothing for other forms of rows than these."""


@dataclass(frozen=True, kw_only=True)
class Choice:
    """The choice of logged samples and runs."""

    form: Form = option(
        "sft",
        "What the rows of logs are for: to imitate, to compare, to imitate good ones, or with "
        "their rewards.",
    )
    score: str | None = option(
        None,
        "Score that is the reward (default: the logged reward, or the log's headline score, or the "
        "mean of all).",
    )
    min_score: float | None = option(None, "Only samples with at least that reward.")
    max_score: float | None = option(None, "Only samples with at most that reward.")
    errors: Keep = option("drop", "Samples that failed.")
    limits: Keep = option("keep", "Samples that a limit ended.")
    max_length: int | None = option(
        None,
        "Only branches of at most this many tokens, as the model's provider counted them.",
    )
    best: int | None = option(None, "Maximum runs per sample, those with the highest rewards.")
    threshold: float = option(
        1.0, "Minimum reward of a good run (--as rejection, and labels of --as rewards)."
    )
    margin: float = option(0.0, "Minimum difference of the rewards of a pair, which always differ.")
    pairs: int = option(1, "Maximum pairs per sample.")

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
        for name in ("min_score", "max_score", "threshold", "margin"):
            if (value := getattr(self, name)) != value:
                raise ConfigError(f"{name} is {value}, which is not a number")
        for name, forms in _OF_FORMS.items():
            if getattr(self, name) != getattr(Choice, name) and self.form not in forms:
                rows = " or ".join(forms)
                raise ConfigError(f"{name} does nothing for {self.form}, only for {rows}")

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

    def order_runs(self, entries: Sequence[Entry]) -> list[Entry]:
        """Return the runs of a sample in the order to try them: the best first, if limited."""
        if self.best is None:
            return list(entries)
        return sorted(entries, key=_falling)

    def order(self, entries: Sequence[Entry]) -> list[Entry]:
        """Return the runs of a sample that will be read, unless one fails, in that order."""
        if self.form != "preference":
            return self.order_runs(entries)[: self.best]
        pairs = islice(self.pair_runs(entries), self.pairs)
        return list(dict.fromkeys(entry for pair in pairs for entry in pair))

    def pair_runs(self, entries: Sequence[Entry]) -> Iterator[tuple[Entry, Entry]]:
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


def _falling(entry: Entry) -> float:
    return -(entry.reward or 0.0)


@dataclass(frozen=True, kw_only=True)
class LogExportOptions(FolderOptions):
    """How logs are exported."""

    choice: Choice = field(default_factory=Choice)
    """Which samples and runs become rows."""

    split: tuple[str, str] | None = option(
        None, "Hold out a share of the samples as a separate split, e.g. test=10%."
    )
    split_seed: int = option(0, "Seed of the held-out samples.")

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.split is not None and (self.split[0] == TRAIN or not self.split[0].isalnum()):
            raise ConfigError(
                f"a split is held out under a name of letters and digits other than {TRAIN!r}, "
                f"not {self.split[0]!r}"
            )
