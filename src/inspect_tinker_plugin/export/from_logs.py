"""An export of logs from beginning to end: samples are read in order, and their rows written."""

from __future__ import annotations

import asyncio
import hashlib
import json
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import asdict, dataclass
from functools import lru_cache
from pathlib import Path
from typing import Any

from inspect_tinker_plugin.contracts.errors import ExportError
from inspect_tinker_plugin.export.folder import ExportFolder, Failure
from inspect_tinker_plugin.export.layouts import Row, compared_row, log_schema, spoken_rows
from inspect_tinker_plugin.export.options import TRAIN, LogExportOptions
from inspect_tinker_plugin.export.pipeline import ExportReport, OnProgress
from inspect_tinker_plugin.export.rows import (
    Conversation,
    conversations,
    require_text,
    to_text,
)
from inspect_tinker_plugin.logs.index import (
    UNREAD,
    Entry,
    Index,
    Reader,
    files_in,
    find_logs,
    index_logs,
)
from inspect_tinker_plugin.tasks.samples import held_out_hashes, sample_hash

VERSION = 5
"""Version of what is written; raised when an older beginning can no longer be continued."""

HELD_RUNS = 16
"""Runs of a sample that are held for further pairs; others are read again."""

_ABOUT = """Conversations of logged evals, written by `inspect rl export --from-logs`: what a model
saw and said, from the logs' model events; `tools` and `scores` hold JSON."""


@dataclass(frozen=True)
class LogExportReport(ExportReport):
    """The result of an export of logs."""

    rows: Mapping[str, int]
    """Rows by split."""

    left_out: Mapping[str, int]
    """Samples that were not chosen, by reason."""


async def export_logs(
    sources: Sequence[str],
    output: Path,
    options: LogExportOptions | None = None,
    *,
    on_progress: OnProgress = lambda done, total, failed: None,
) -> LogExportReport:
    """Write the conversations of logs into a folder.

    Returns:
        What was written. Samples that could not be exported are in it, and in ``export.json``.
    """
    options = options or LogExportOptions()
    schema = log_schema(options.choice.form, options.layout)
    paths = find_logs(sources)
    index = await asyncio.to_thread(index_logs, paths, score=options.choice.score)
    held = await asyncio.to_thread(_held_out, index, options)
    folder = ExportFolder.claim(
        output, options, identity=_identity(index, options), seed=None, schema=schema
    )
    try:
        return await _LogExport(index, folder, options, held).run(on_progress)
    finally:
        if not folder.units:
            folder.abandon()
        folder.close()


class _LogExport:
    def __init__(
        self,
        index: Index,
        folder: ExportFolder,
        options: LogExportOptions,
        held: frozenset[str],
    ) -> None:
        self._index = index
        self._folder = folder
        self._options = options
        self._held = held
        self._choice = options.choice
        self._unread: Counter[str] = Counter()
        """Count, by reason, the samples that are left out without being read."""
        self._left_out: Counter[str] = Counter()
        """Count, by reason, what of the current group is left out after it was read."""
        self._groups: list[list[Entry]] = []
        for group in index.groups:
            reasons = [self._choice.why_not(entry) for entry in group]
            self._unread.update(reason for reason in reasons if reason is not None)
            if kept := [e for e, reason in zip(group, reasons, strict=True) if reason is None]:
                self._groups.append(kept)
        self._reader = Reader(
            index, [entry for group in self._groups for entry in self._choice.order(group)]
        )

    async def run(self, on_progress: OnProgress) -> LogExportReport:
        folder = self._folder
        folder.check_data(self._digest(), changed="the logs have changed since")
        continued = done = sum(len(group) for group in self._groups[: folder.units])
        total = sum(map(len, self._groups))
        on_progress(done, total, len(folder.failures))
        for group in self._groups[folder.units :]:
            await self._export(group)
            done += len(group)
            on_progress(done, total, len(folder.failures))
        return self._finish(continued)

    async def _export(self, group: Sequence[Entry]) -> None:
        """Write the rows of the runs of one sample, all of them even if this is cancelled."""
        work = asyncio.ensure_future(asyncio.to_thread(self._add_group, group))
        try:
            await asyncio.shield(work)
        except asyncio.CancelledError:
            await asyncio.wait([work])
            raise

    def _add_group(self, group: Sequence[Entry]) -> None:
        failures: list[Failure] = []
        self._left_out.clear()
        make = self._pairs if self._choice.form == "preference" else self._make_conversations
        for split, row in make(group, failures):
            self._folder.add_row(split, row)
        self._folder.end_unit(failures, self._left_out)
        self._reader.forget(group)

    def _make_conversations(
        self, group: Sequence[Entry], failures: list[Failure]
    ) -> Iterator[tuple[str, Row]]:
        seen: set[bytes] = set()
        taken = 0
        for entry in self._choice.order_runs(group):
            if self._choice.best is not None and taken >= self._choice.best:
                self._left_out["not among the best"] += 1
                continue
            run = self._run_of(entry, failures)
            if run is None:
                continue
            if self._choice.form == "rejection":
                text = json.dumps([talk.messages for talk in run.talks])
                digest = hashlib.sha256(text.encode()).digest()
                if digest in seen:
                    self._left_out["the same as another"] += 1
                    continue
                seen.add(digest)
            made: list[Row] = []
            try:
                for branch, talk in enumerate(run.talks):
                    if self._fits(talk):
                        further = self._further(run, branch)
                        layout, form = self._options.layout, self._choice.form
                        made += spoken_rows(layout, form, talk, further)
                for row in made:
                    require_text(row)
            except ExportError as error:
                failures.append(self._failure(entry, error))
                continue
            taken += bool(made)
            for row in made:
                yield run.split, row

    def _pairs(self, group: Sequence[Entry], failures: list[Failure]) -> Iterator[tuple[str, Row]]:
        @lru_cache(HELD_RUNS)
        def read(entry: Entry) -> _Run | None:
            return None if entry in failed else self._run_of(entry, failures)

        failed: set[Entry] = set()
        taken = 0
        for pair in self._choice.pair_runs(group):
            if taken >= self._choice.pairs:
                break
            better, worse = (read(entry) for entry in pair)
            failed |= {e for e, run in zip(pair, (better, worse), strict=True) if run is None}
            if better is None or worse is None:
                continue
            try:
                row = self._pair(better, worse)
                if row is None:
                    self._left_out["pairs without a common prompt"] += 1
                    continue
                require_text(row)
            except ExportError as error:
                failures.append(self._failure(better.entry, error))
                continue
            taken += 1
            yield better.split, row

    def _pair(self, better: _Run, worse: _Run) -> Row | None:
        """Compare the first branches of two runs that begin alike."""
        for branch, chosen in enumerate(better.talks):
            for rejected in worse.talks:
                start = chosen.prompt
                if (
                    better.split == worse.split
                    and rejected.prompt == start
                    and rejected.tools == chosen.tools
                    and rejected.messages[:start] == chosen.messages[:start]
                    and rejected.messages != chosen.messages
                    and self._fits(chosen)
                    and self._fits(rejected)
                ):
                    further = self._origin(better, branch) | {
                        "rejected_epoch": worse.entry.epoch,
                        "reward": better.entry.reward,
                        "rejected_reward": worse.entry.reward,
                    }
                    return compared_row(self._options.layout, chosen, rejected, further)
        return None

    def _fits(self, talk: Conversation) -> bool:
        most = self._choice.max_length
        if most is None or (talk.tokens is not None and talk.tokens <= most):
            return True
        reason = "branches of unknown length" if talk.tokens is None else "branches too long"
        self._left_out[reason] += 1
        return False

    def _run_of(self, entry: Entry, failures: list[Failure]) -> _Run | None:
        try:
            sample = self._reader.sample(entry)
            if sample.invalidation is not None:
                self._left_out["invalidated"] += 1
                return None
            talks = conversations(sample, self._index.logs[entry.log].caller)
        except ExportError as error:
            failures.append(self._failure(entry, error))
            return None
        except Exception as error:  # whatever the reason, the other samples can be written
            failures.append(self._failure(entry, ExportError(f"{type(error).__name__}: {error}")))
            return None
        content = sample_hash(sample)
        held = content in self._held
        assert not held or self._options.split is not None
        split = self._options.split[0] if held and self._options.split else TRAIN
        scores = {name: score.value for name, score in (sample.scores or {}).items()}
        return _Run(entry, talks, split, to_text(scores), sample.target, sample.metadata, content)

    def _failure(self, entry: Entry, error: Exception) -> Failure:
        log = self._index.logs[entry.log]
        return Failure(entry.describe_sample(log), " ".join(str(error).split()))

    def _origin(self, run: _Run, branch: int) -> dict[str, Any]:
        log = self._index.logs[run.entry.log]
        return {
            "id": str(run.entry.id),
            "epoch": run.entry.epoch,
            "branch": branch,
            "task": log.task,
            "model": log.model,
            "log": log.name,
            "sample_hash": run.sample_hash,
        }

    def _further(self, run: _Run, branch: int) -> dict[str, Any]:
        further = self._origin(run, branch)
        further |= {"scores": run.scores, "reward": run.entry.reward}
        if self._choice.form == "rewards" and self._options.layout == "trl":
            assert run.entry.reward is not None
            further["label"] = run.entry.reward >= self._choice.threshold
        if self._choice.form == "rewards" and self._options.layout == "verifiers":
            target = run.target
            further["answer"] = target if isinstance(target, str) else to_text(target)
            further["info"] = to_text({"metadata": run.metadata})
        return further

    def _digest(self) -> str:
        digest = hashlib.sha256()
        for entry in (entry for group in self._groups for entry in group):
            name = self._index.logs[entry.log].path
            digest.update(repr((name, entry.id, entry.epoch, entry.reward)).encode())
        for log in self._index.logs:
            for name, file in files_in(log.path).items():
                if name.startswith("samples/"):
                    digest.update(repr((name, file.CRC)).encode())
        return digest.hexdigest()

    def _finish(self, continued: int) -> LogExportReport:
        unreadable = [Failure(*each) for each in self._index.unreadable.items()]
        failures = [*unreadable, *self._folder.failures]
        rows = dict(self._folder.rows)
        if not rows:
            self._folder.abandon()
            raise ExportError(f"nothing was written: {self._why_nothing(failures)}")
        left_out = dict(self._unread + self._folder.left_out)
        tasks = ", ".join(sorted({log.task for log in self._index.logs}))
        files = self._folder.finish(
            tasks,
            _ABOUT,
            source={
                **_identity(self._index, self._options),
                "task": tasks,
                "models": sorted({log.model for log in self._index.logs}),
            },
            counts={
                "samples": sum(map(len, self._index.groups)),
                "rows": rows,
                "failed": len(failures),
                "left_out": left_out,
            },
            failures=failures,
        )
        return LogExportReport(
            path=self._folder.path,
            files=files,
            written=sum(rows.values()),
            failures=failures,
            continued=continued,
            rows=rows,
            left_out=left_out,
        )

    def _why_nothing(self, failures: Sequence[Failure]) -> str:
        total = sum(map(len, self._index.groups))
        left_out = self._unread + self._folder.left_out
        reasons = [f"{count} {reason}" for reason, count in left_out.most_common()]
        if failures:
            reasons.append(f"{len(failures)} failed, first {failures[0].id}: {failures[0].reason}")
        if not reasons:
            reasons = ["no two runs of a sample have different rewards"] if total else []
        return f"of {total} logged samples, " + ("; ".join(reasons) or "none is complete")


@dataclass(frozen=True)
class _Run:
    """One run of a sample, read."""

    entry: Entry
    talks: Sequence[Conversation]
    split: str
    scores: str
    target: str | list[str]
    metadata: Mapping[str, Any]
    sample_hash: str


def _held_out(index: Index, options: LogExportOptions) -> frozenset[str]:
    """Return the hashes of the samples that are held out: by content, whatever their order."""
    if options.split is None:
        return frozenset()
    firsts = [group[0] for group in index.groups]
    reader = Reader(index, firsts, unread=UNREAD | {"events", "events_data"})
    counts: Counter[str] = Counter()
    for entry in firsts:
        with suppress(Exception):  # reported when it is the sample's turn
            counts[sample_hash(reader.sample(entry))] += 1
    return held_out_hashes(counts, options.split[1], seed=options.split_seed)


def _identity(index: Index, options: LogExportOptions) -> dict[str, Any]:
    """Return what two runs must have in common for the second to continue the first."""
    return {
        "version": VERSION,
        "logs": [log.path for log in index.logs],
        "choice": asdict(options.choice),
        "layout": options.layout,
        "format": options.format,
        "split": options.split,
        "split_seed": options.split_seed,
    }
