"""Logged samples: an index of ``.eval`` logs with rewards, what it tells a sampler, and a reader.

The index has a few hundred bytes per sample, from the logs' summaries. Reading blocks, and
belongs in a thread that has no event loop: there, Inspect's log functions need no patched asyncio.
"""

from __future__ import annotations

import gc
import zipfile
from collections.abc import Container, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from dataclasses import dataclass, field
from functools import lru_cache
from pathlib import Path

from inspect_ai.dataset import Sample
from inspect_ai.log import (
    EvalLog,
    EvalSample,
    EvalSampleSummary,
    HeadlineMetric,
    list_eval_logs,
    read_eval_log,
    read_eval_log_sample_summaries,
    read_eval_log_samples_by_id,
)
from inspect_ai.scorer import SampleScore, Score

from inspect_tinker_plugin import inspect_internals as internals
from inspect_tinker_plugin.contracts.errors import ConfigError
from inspect_tinker_plugin.contracts.hooks import GroupOutcome
from inspect_tinker_plugin.contracts.policy import POLICY_MODEL, POLICY_PROVIDER
from inspect_tinker_plugin.contracts.rewards import UnscoredError
from inspect_tinker_plugin.processes import is_remote, local_path
from inspect_tinker_plugin.rewards.scores import locate_score, read_score


@dataclass(frozen=True)
class Log:
    """One log, from its header."""

    path: str
    name: str
    """Name of the file."""
    task: str
    model: str
    """The model that was evaluated, or is under training."""
    caller: str
    """The name of that model in the log's model events."""
    headline: str | None
    """The main score of this log, with its key if it is one of a dict score; in rollout logs the
    reward."""


@dataclass(frozen=True, slots=True)
class Entry:
    """One sample of a log, as far as it is known without reading it."""

    log: int
    """Position of its log."""
    id: int | str
    epoch: int
    reward: float | None
    """Its score as a number; absent if it has none, which is not zero."""
    error: bool
    limit: str | None

    def describe_sample(self, log: Log) -> str:
        """Say which sample it is, for a person."""
        return f"{self.id} (epoch {self.epoch} of {log.name})"


@dataclass
class Index:
    """The contents of logs."""

    logs: list[Log] = field(default_factory=list)
    groups: list[list[Entry]] = field(default_factory=list)
    """The runs of each sample, in the order of the samples' first appearance."""
    unreadable: dict[str, str] = field(default_factory=dict)
    """Reasons, by the paths of logs that cannot be read."""

    @property
    def entries(self) -> Iterator[Entry]:
        """All samples, in the order of the groups."""
        return (entry for group in self.groups for entry in group)


def find_logs(sources: Sequence[str]) -> list[str]:
    """Return the logs that files and folders stand for, each once, by name."""
    found: dict[str, None] = {}
    for source in sources:
        remote = is_remote(source)
        path = Path(source) if remote else local_path(source).absolute()
        if path.is_dir() or (remote and not source.endswith(".eval")):
            infos = list_eval_logs(source, formats=["eval"]) if remote else []
            names = sorted([info.name for info in infos] or map(str, path.rglob("*.eval")))
            if not names:
                raise ConfigError(f"the folder {source} holds no .eval log")
        elif source.endswith(".eval") and (path.is_file() or remote):
            names = [source if remote else str(path)]
        elif path.is_file():
            raise ConfigError(
                f"{source} is no .eval log; `inspect log convert` makes one of a .json log"
            )
        else:
            raise ConfigError(f"there is no log and no folder {source}")
        found.update(dict.fromkeys(names))
    return list(found)


def index_logs(paths: Sequence[str], *, score: str | None) -> Index:
    """Read headers and summaries.

    Args:
        paths: The logs.
        score: The score that is the reward: its name, or ``name.key`` for one key of a dict
            score; by default the log's headline score (in our own logs the reward), or else
            the mean of all.
    """
    index = Index()
    groups: dict[tuple[str, str], list[Entry]] = {}
    seen: set[str] = set()
    names: set[str] = set()
    for path in paths:
        try:
            # Of a sample that was run again, the last summary is true.
            summaries = {(str(s.id), s.epoch): s for s in read_eval_log_sample_summaries(path)}
            scored = {name for summary in summaries.values() for name in summary.scores or ()}
            log = _describe(path, read_eval_log(path, header_only=True), scored)
        except Exception as error:  # whatever the reason, the other logs can be read
            index.unreadable[path] = " ".join(f"it cannot be read: {error}".split())
            continue
        names |= scored
        for summary in summaries.values():
            if summary.uuid is not None and summary.uuid in seen:
                continue  # a log of a retry holds the samples of the log before it
            if summary.uuid is not None:
                seen.add(summary.uuid)
            entry = _entry(summary, len(index.logs), log, score)
            groups.setdefault((log.task, repr(entry.id)), []).append(entry)
        index.logs.append(log)
    index.groups = list(groups.values())
    if score is not None and not locate_score(score, names)[0]:
        raise ConfigError(f"no log has a score {score!r}; there is {', '.join(sorted(names))}")
    return index


def _describe(path: str, header: EvalLog, scored: Container[str]) -> Log:
    spec, headline = header.eval, header.eval.headline_metric
    ours = spec.model.startswith(f"{POLICY_PROVIDER}/")
    if headline is not None and header.results is not None:
        # Inspect finds no reward when it computes metrics again, after an edit of a score, say.
        rewarded = ours and headline.scorer in scored
        # Scorers may have been replaced.
        headline = headline if rewarded else header.results.headline or headline
    return Log(
        path=path,
        name=path.rpartition("/")[2],
        task=spec.task,
        model=spec.model,
        caller=POLICY_MODEL if ours else spec.model,
        headline=None if headline is None else _score_path(headline),
    )


def _score_path(headline: HeadlineMetric) -> str | None:
    scorer, key = headline.scorer, headline.score
    return scorer if scorer is None or key in (None, scorer) else f"{scorer}.{key}"


def _entry(summary: EvalSampleSummary, log: int, header: Log, score: str | None) -> Entry:
    scores = summary.scores or {}
    return Entry(
        log=log,
        id=summary.id,
        epoch=summary.epoch,
        reward=reward_of(scores, score or header.headline),
        error=summary.error is not None,
        limit=summary.limit,
    )


def reward_of(scores: Mapping[str, Score], path: str | None = None) -> float | None:
    """Return a score as a number; ``None`` when it is absent or not a number.

    Args:
        scores: Scores of a sample.
        path: The score's name, or ``name.key``; ``None`` for the mean of all.
    """
    named = {name: SampleScore(score=score) for name, score in scores.items()}
    try:
        values = [read_score(each, named).value for each in (scores if path is None else [path])]
    except UnscoredError:
        return None
    return sum(values) / len(values) if values else None


def logged_outcomes(
    paths: Sequence[str], task: str, samples: Sequence[Sample]
) -> list[GroupOutcome]:
    """Return what logs tell about the samples of a task, one outcome for all attempts at each.

    Args:
        paths: Logs and folders of logs: ours, or any eval's. Those of other tasks are left out.
        task: Name of the task.
        samples: Its samples, which are recognised by their ids.
    """
    # Not in an event loop, for which Inspect would patch asyncio.
    with ThreadPoolExecutor(1) as thread:
        index = thread.submit(_read, [str(path) for path in paths]).result()
    bare = task.rpartition("/")[2]
    rewards: dict[str, list[float]] = {}
    for entry in index.entries:
        if index.logs[entry.log].task.rpartition("/")[2] != bare or entry.error:
            continue
        if entry.reward is not None:
            rewards.setdefault(str(entry.id), []).append(entry.reward)
    found = [
        GroupOutcome(position=position, rewards=tuple(rewards[str(sample.id)]))
        for position, sample in enumerate(samples)
        if str(sample.id) in rewards
    ]
    if not found:
        others = ", ".join(sorted({log.task for log in index.logs})) or "no task"
        raise ConfigError(
            f"sampler_logs: no log has a rewarded sample of task {task!r} (they are of {others})"
        )
    return found


def _read(paths: Sequence[str]) -> Index:
    index = index_logs(find_logs(paths), score=None)
    for path, reason in index.unreadable.items():
        raise ConfigError(f"sampler_logs: {path}: {reason}")
    return index


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
        self._at = {entry: number for number, entry in enumerate(entries)}
        self._read: dict[Entry, EvalSample] = {}
        self._since_collected = 0

    def sample(self, entry: Entry) -> EvalSample:
        """Return a sample, with its events and without its messages; the caller keeps it."""
        if entry not in self._read:
            window = self._window(entry)
            try:
                self._fetch(window)
            except Exception:
                if len(window) == 1:
                    raise
                self._fetch([entry])  # another one cannot be read, and fails alone
        return self._read.pop(entry)

    def forget(self, entries: Sequence[Entry]) -> None:
        """Discard samples that were read ahead and are not needed."""
        for entry in entries:
            self._read.pop(entry, None)

    def _window(self, first: Entry) -> list[Entry]:
        files = _known_files(self._logs[first.log].path)
        start = self._at.get(first)
        if start is None:
            return [first]
        window: list[Entry] = []
        total = 0
        for entry in self._entries[start : start + _AT_ONCE]:
            file = files.get(f"samples/{entry.id}_epoch_{entry.epoch}.json")
            total += _BYTES_AT_ONCE // 4 if file is None else file.file_size
            if entry.log != first.log or (window and total > _BYTES_AT_ONCE):
                break
            if entry not in self._read:
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
        self._read.update(zip(window, samples, strict=True))
        self._since_collected += len(window)
        if self._since_collected >= _COLLECTED_AFTER:
            self._since_collected = 0
            gc.collect()


def files_in(path: str) -> Mapping[str, zipfile.ZipInfo]:
    """Return the files in a log by name, wherever it is; nothing if it cannot be opened."""
    with suppress(OSError, zipfile.BadZipFile), internals.open_file(path) as stored:
        return {info.filename: info for info in zipfile.ZipFile(stored).infolist()}
    return {}


_known_files = lru_cache(maxsize=4)(files_in)
