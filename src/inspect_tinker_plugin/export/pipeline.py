"""One export from beginning to end: rows are made of samples and written in their order."""

from __future__ import annotations

import asyncio
import hashlib
import json
import random
from collections.abc import Callable, Mapping, Sequence
from contextlib import aclosing
from dataclasses import dataclass, replace
from logging import getLogger
from pathlib import Path
from typing import Any

from pydantic_core import to_json

from inspect_tinker_plugin.contracts.errors import ExportError
from inspect_tinker_plugin.contracts.wording import counted
from inspect_tinker_plugin.export.folder import TRAIN, ExportFolder, check_target
from inspect_tinker_plugin.export.layouts import prompt_schema
from inspect_tinker_plugin.export.parts import Failure
from inspect_tinker_plugin.export.rows import ExportOptions, Rows, WorkerError, WorkerRows
from inspect_tinker_plugin.options import Selection
from inspect_tinker_plugin.tasks.reference import ResolvedTask
from inspect_tinker_plugin.tasks.samples import select_samples

logger = getLogger(__name__)

LAYOUT = 2
"""Version of the folder's layout; raised when older folders can no longer be continued."""

_ABOUT = """Prompts and answers of an Inspect task, written by `inspect rl export`. A prompt is what
the task's solver sends to the model first; `info` and `tools` hold JSON."""


@dataclass(frozen=True)
class ExportProgress:
    """The progress of an export."""

    done: int
    total: int
    failed: int


@dataclass(frozen=True)
class ExportReport:
    """What an export wrote."""

    path: Path
    files: Sequence[str]
    written: int
    failures: Sequence[Failure]
    continued: int
    """Samples that an earlier, interrupted run had written."""


async def export_task(
    resolved: ResolvedTask,
    output: Path,
    options: ExportOptions | None = None,
    *,
    on_progress: Callable[[ExportProgress], None] | None = None,
) -> ExportReport:
    """Write the first prompt of every chosen sample into a folder.

    Args:
        resolved: The task; it needs no scorer.
        output: The folder.
        options: What to write, and how.
        on_progress: Called after every sample.

    Returns:
        What was written. Samples that failed are in it, and in ``export.json``.

    Raises:
        ConfigError: Nothing was chosen, an id does not exist, or the task has no samples.
        ExportError: The folder cannot be written or continued, or every sample failed.
    """
    options = options or ExportOptions()
    check_target(output, overwrite=options.overwrite)
    schema = prompt_schema(options.layout)
    seed = _seed(options.selection)
    folder = ExportFolder.claim(
        output,
        identity=_identity(resolved, options),
        seed=seed,
        format=options.format,
        schema=schema,
        overwrite=options.overwrite,
    )
    try:
        export = _Export(resolved, folder, options)
    except BaseException:
        if not folder.journal.parts:
            folder.abandon()
        folder.close()
        raise
    try:
        return await export.run(on_progress or (lambda progress: None))
    finally:
        folder.close()


def _seed(selection: Selection) -> int | None:
    shuffle = selection.sample_shuffle
    if shuffle is True:
        return random.SystemRandom().randrange(1, 2**31)
    return shuffle or None


class _Export:
    def __init__(
        self,
        resolved: ResolvedTask,
        folder: ExportFolder,
        options: ExportOptions,
    ) -> None:
        self._resolved = resolved
        self._folder = folder
        self._options = options
        chosen = replace(options.selection, sample_shuffle=folder.journal.seed)
        self._samples = select_samples(resolved.task, chosen)
        self._rows: Rows | WorkerRows
        if options.workers > 1:
            self._rows = WorkerRows(resolved, options)
        else:
            self._rows = Rows(resolved.task, options)
        folder.check_continuity(
            len(self._samples),
            self._digest,
            changed="the task's samples have changed since "
            "(other data, or an order without a seed)",
        )

    async def run(self, on_progress: Callable[[ExportProgress], None]) -> ExportReport:
        journal = self._folder.journal
        continued = sum(part.samples for part in journal.parts)
        failed = sum(len(part.failures) for part in journal.parts)
        part = self._folder.open_part(continued)
        total = len(self._samples)
        on_progress(ExportProgress(continued, total, failed))
        try:
            async with aclosing(self._rows.of(self._samples, continued)) as results:
                async for result in results:
                    if isinstance(result, Failure):
                        failed += 1
                        part.end_unit([result])
                    else:
                        part.add(TRAIN, result)
                        part.end_unit()
                    on_progress(ExportProgress(part.stop, total, failed))
                    if part.full:
                        self._folder.add(part, self._digest)
                        part = self._folder.open_part(part.stop)
        except asyncio.CancelledError:
            self._folder.add(part, self._digest)  # so that the next run continues from here
            raise
        except WorkerError as error:
            self._folder.add(part, self._digest)
            raise ExportError(
                f"{error}. {part.stop:,} of {counted(total, 'sample')} are done and kept; run the "
                "same command again to continue, with any number of workers."
            ) from error
        self._folder.add(part, self._digest)
        return self._finish(continued)

    def _finish(self, continued: int) -> ExportReport:
        parts = self._folder.journal.parts
        failures = [failure for part in parts for failure in part.failures]
        written = sum(self._folder.rows.values())
        if not written:
            self._folder.abandon()
            first = failures[0]
            raise ExportError(
                f"task {self._resolved.task.name!r}: none of "
                f"{counted(len(failures), 'sample')} could be exported; nothing was written. "
                f"Sample {first.id!r}: {first.reason}"
            )
        files = self._folder.finish(
            self._resolved.task.name,
            _ABOUT,
            source={
                **_identity(self._resolved, self._options),
                "seed": self._folder.journal.seed,
            },
            counts={
                "samples": len(self._samples),
                "written": written,
                "failed": len(failures),
            },
            failures=failures,
        )
        return ExportReport(self._folder.path, files, written, failures, continued)

    def _digest(self, start: int, stop: int) -> str:
        digest = hashlib.sha256()
        for index in range(start, stop):
            sample = self._samples[index]
            # messages have ids, which are new whenever a task is loaded
            asked = sample.input
            texts = asked if isinstance(asked, str) else [message.text for message in asked]
            asks = [sample.id, texts, sample.target, sample.choices]
            digest.update(json.dumps(asks, default=str).encode())
        return digest.hexdigest()


def _identity(resolved: ResolvedTask, options: ExportOptions) -> dict[str, Any]:
    """Return what two runs must have in common for the second to continue the first."""
    ref, task, selection = resolved.ref, resolved.task, options.selection
    return {
        "version": LAYOUT,
        "task": ref.spec if ref is not None else task.name,
        "task_args": _plain(ref.args if ref is not None else {}),
        "task_version": task.version,
        "solver": options.solver_name,
        "sandbox": None if options.sandbox is None else str(options.sandbox),
        "limit": _plain(selection.limit),
        "sample_ids": _plain(selection.sample_ids or selection.patterns or None),
        "shuffle": selection.sample_shuffle or False,
        "format": options.format,
        "layout": options.layout,
    }


def _plain(value: Mapping[str, Any] | Sequence[Any] | int | None) -> Any:
    return json.loads(to_json(value, fallback=str))
