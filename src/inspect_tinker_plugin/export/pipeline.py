"""The export of a task: rows are made of its samples, and written in order."""

from __future__ import annotations

import asyncio
import hashlib
import json
import random
from collections import deque
from collections.abc import AsyncGenerator, Callable, Mapping, Sequence
from contextlib import aclosing
from dataclasses import dataclass, replace
from logging import getLogger
from pathlib import Path
from typing import Any

from inspect_ai import Task
from inspect_ai.dataset import Sample
from pydantic_core import to_json

from inspect_tinker_plugin.contracts.errors import ExportError
from inspect_tinker_plugin.contracts.wording import counted
from inspect_tinker_plugin.export.folder import ExportFolder, Failure
from inspect_tinker_plugin.export.layouts import Row, prompt_row, prompt_schema
from inspect_tinker_plugin.export.options import TRAIN, ExportOptions
from inspect_tinker_plugin.export.prompts import FirstTurns, row_of
from inspect_tinker_plugin.options import Selection
from inspect_tinker_plugin.tasks.reference import ResolvedTask
from inspect_tinker_plugin.tasks.samples import select_samples

logger = getLogger(__name__)

LAYOUT = 4
"""Version of the folder's layout; raised when older folders can no longer be continued."""

_ABOUT = """Prompts and answers of an Inspect task, written by `inspect rl export`. A prompt is what
the task's solver sends to the model first; `info` and `tools` hold JSON."""

WINDOW = 4
"""Samples that are begun for each that may be prepared at the same time, so that a slow one holds
up no others."""


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
    on_progress: Callable[[ExportProgress], None] = lambda progress: None,
) -> ExportReport:
    """Write the first prompt of every chosen sample into a folder.

    Args:
        resolved: The task; it needs no scorer.
        output: The folder.
        options: What to write, and how.
        on_progress: Called after every sample.

    Returns:
        What was written. Samples that failed are in it, and in ``export.json``.
    """
    options = options or ExportOptions()
    identity = _identity(resolved, options)
    folder = ExportFolder.claim(
        output,
        identity=identity,
        seed=_seed(options.selection),
        format=options.format,
        schema=prompt_schema(options.layout),
        overwrite=options.overwrite,
    )
    try:
        try:
            chosen = replace(options.selection, sample_shuffle=folder.seed)
            samples = select_samples(resolved.task, chosen)
            rows = Rows(resolved.task, options)
            folder.check_data(
                _digest(samples),
                changed="the task's samples have changed since "
                "(other data, or an order without a seed)",
            )
        except BaseException:
            if not folder.units:
                folder.abandon()
            raise
        continued = folder.units
        await _add_rows(folder, samples, rows, on_progress)
        source = {**identity, "seed": folder.seed}
        files = _finish(folder, resolved.task.name, source)
    finally:
        folder.close()
    return ExportReport(folder.path, files, folder.rows.total(), folder.failures, continued)


async def _add_rows(
    folder: ExportFolder,
    samples: Sequence[Sample],
    rows: Rows,
    on_progress: Callable[[ExportProgress], None],
) -> None:
    """Add the rows of the samples that the folder does not have yet."""
    on_progress(ExportProgress(folder.units, len(samples), len(folder.failures)))
    async with aclosing(rows.of(samples, folder.units)) as results:
        async for result in results:
            failures = [result] if isinstance(result, Failure) else []
            if not isinstance(result, Failure):
                folder.add_row(TRAIN, result)
            folder.end_unit(failures)
            on_progress(ExportProgress(folder.units, len(samples), len(folder.failures)))


def _finish(folder: ExportFolder, task: str, source: Mapping[str, Any]) -> list[str]:
    failures, written = folder.failures, folder.rows.total()
    if not written:
        folder.abandon()
        first = failures[0]
        raise ExportError(
            f"task {task!r}: none of {counted(len(failures), 'sample')} could be exported; "
            f"nothing was written. Sample {first.id!r}: {first.reason}"
        )
    counts = {"samples": folder.units, "written": written, "failed": len(failures)}
    return folder.finish(task, _ABOUT, source=source, counts=counts, failures=failures)


def _digest(samples: Sequence[Sample]) -> str:
    digest = hashlib.sha256()
    for sample in samples:
        # messages have ids, which are new whenever a task is loaded
        asked = sample.input
        texts = asked if isinstance(asked, str) else [message.text for message in asked]
        asks = [sample.id, texts, sample.target, sample.choices]
        digest.update(json.dumps(asks, default=str).encode())
    return digest.hexdigest()


def _seed(selection: Selection) -> int | None:
    shuffle = selection.sample_shuffle
    if shuffle is True:
        return random.SystemRandom().randrange(1, 2**31)
    return shuffle or None


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


class Rows:
    """Makes the rows of a task's samples in this process."""

    def __init__(self, task: Task, options: ExportOptions) -> None:
        self._task = task
        self._options = options
        self._turns = FirstTurns(
            task, options=options.episode, solver=options.solver, sandbox=options.sandbox
        )

    async def of(
        self, samples: Sequence[Sample], start: int = 0
    ) -> AsyncGenerator[Row | Failure, None]:
        """Yield what becomes of each sample, in their order; several are in preparation at once."""
        places = asyncio.Semaphore(self._options.max_samples)
        window = WINDOW * self._options.max_samples
        pending: deque[asyncio.Task[Row | Failure]] = deque()
        following = start
        try:
            while pending or following < len(samples):
                while len(pending) < window and following < len(samples):
                    made = self._row(following, samples[following], places)
                    pending.append(asyncio.create_task(made))
                    following += 1
                yield await pending[0]
                pending.popleft()
        finally:
            for task in pending:
                task.cancel()
            await asyncio.gather(*pending, return_exceptions=True)

    async def _row(self, index: int, sample: Sample, places: asyncio.Semaphore) -> Row | Failure:
        async with places:
            try:
                turn = await self._turns.of(sample)
                row = row_of(self._task.name, sample, turn.request, turn.state)
                return prompt_row(self._options.layout, row, index)
            except ExportError as error:
                return Failure(str(sample.id), str(error))
            except Exception as error:  # whatever the reason, the other samples can be written
                logger.debug("sample %r could not be exported", sample.id, exc_info=error)
                return Failure(str(sample.id), " ".join(f"{type(error).__name__}: {error}".split()))
