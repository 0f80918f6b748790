"""The export of a task: rows are made of its samples, here or in workers, and written in order."""

from __future__ import annotations

import asyncio
import hashlib
import json
import pickle
import random
import re
from collections import deque
from collections.abc import AsyncGenerator, Callable, Mapping, Sequence
from concurrent.futures import BrokenExecutor, Future
from contextlib import aclosing, suppress
from dataclasses import dataclass, replace
from functools import cache
from logging import getLogger
from pathlib import Path
from typing import Any

from inspect_ai import Task
from inspect_ai.dataset import Sample
from pydantic_core import to_json

from inspect_tinker_plugin.contracts.errors import ConfigError, ExportError
from inspect_tinker_plugin.contracts.wording import counted
from inspect_tinker_plugin.export.folder import ExportFolder, Failure
from inspect_tinker_plugin.export.layouts import Row, prompt_row, prompt_schema
from inspect_tinker_plugin.export.options import TRAIN, ExportOptions
from inspect_tinker_plugin.export.rows import FirstTurns, info_of, row_of
from inspect_tinker_plugin.processes.workers import (
    dump,
    freeze_memory_once,
    run_in_loop,
    worker_pool,
)
from inspect_tinker_plugin.tasks.reference import ResolvedTask, TaskRef
from inspect_tinker_plugin.tasks.samples import select_samples

logger = getLogger(__name__)

LAYOUT = 5
"""Version of the folder's layout; raised when older folders can no longer be continued."""

_ABOUT = """Prompts and answers of an Inspect task, written by `inspect rl export`. A prompt is what
the task's solver sends to the model first; `info` and `tools` hold JSON."""

WINDOW = 4
"""Samples that are begun for each that may be prepared at the same time, so that a slow one holds
up no others."""

AHEAD = 3
"""Chunks of samples sent or waiting per worker."""


OnProgress = Callable[[int, int, int], object]
"""Is called with how many samples are done, how many there are, and how many failed."""


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
    on_progress: OnProgress = lambda done, total, failed: None,
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
        options,
        identity=identity,
        seed=_seed(options.dataset.sample_shuffle),
        schema=prompt_schema(options.layout),
    )
    try:
        try:
            chosen = replace(options.dataset.selection, sample_shuffle=folder.seed)
            samples = select_samples(resolved.task, chosen)
            rows: Rows | WorkerRows
            if options.workers > 1:
                rows = WorkerRows(resolved, options)
            else:
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
    rows: Rows | WorkerRows,
    on_progress: OnProgress,
) -> None:
    """Add the rows of the samples that the folder does not have yet."""
    on_progress(folder.units, len(samples), len(folder.failures))
    try:
        # The last sample of an earlier run is made again, to see whether it still has that prompt.
        again = folder.last_row is not None
        async with aclosing(rows.of(samples, folder.units - again)) as results:
            async for result in results:
                if again:
                    again = False
                    _check_row(folder, samples[folder.units - 1], result)
                    continue
                failures = [result] if isinstance(result, Failure) else []
                if not isinstance(result, Failure):
                    folder.add_row(TRAIN, result)
                folder.end_unit(failures)
                on_progress(folder.units, len(samples), len(folder.failures))
    except WorkerError as error:
        raise ExportError(
            f"{error}. {folder.units:,} of {counted(len(samples), 'sample')} are done and kept; "
            "run the same command again to continue, with any number of workers."
        ) from error


def _check_row(folder: ExportFolder, sample: Sample, made: Row | Failure) -> None:
    """Warn if a sample that an earlier run has written would be written differently now."""
    if json.dumps(made, default=str) != json.dumps(folder.last_row):
        logger.warning(
            "%s: the prompt of sample %r is no longer that of the unfinished export: the task has "
            "changed, or its prompts are random. The %s of before are kept; start again with "
            "--overwrite.",
            folder.path,
            sample.id,
            counted(folder.units, "sample"),
        )


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
        info = ""
        # messages have ids, which are new whenever a task is loaded
        asked = sample.input
        texts = asked if isinstance(asked, str) else [message.text for message in asked]
        with suppress(ExportError):  # one that cannot be written is named when it is its turn
            info = re.sub(r" at 0x[0-9a-f]+", "", info_of(sample))
        asks = [sample.id, texts, sample.target, sample.choices, info]
        digest.update(json.dumps(asks, default=str).encode())
    return digest.hexdigest()


def _seed(shuffle: bool | int | None) -> int | None:
    if shuffle is True:
        return random.SystemRandom().randrange(1, 2**31)
    return shuffle or None


def _identity(resolved: ResolvedTask, options: ExportOptions) -> dict[str, Any]:
    """Return what two runs must have in common for the second to continue the first."""
    ref, task, dataset = resolved.ref, resolved.task, options.dataset
    return {
        "version": LAYOUT,
        "task": ref.spec if ref is not None else task.name,
        "task_args": _plain(ref.args if ref is not None else {}),
        "task_version": task.version,
        "solver": options.solver_name,
        "sandbox": None if dataset.sandbox is None else str(dataset.sandbox),
        "model_roles": _plain(dataset.model_roles or None),
        "limit": _plain(dataset.limit),
        "sample_ids": _plain(dataset.sample_ids or dataset.patterns or None),
        "shuffle": dataset.sample_shuffle or False,
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
        self._turns = FirstTurns(task, options.dataset)

    async def of(
        self, samples: Sequence[Sample], start: int = 0, *, offset: int = 0
    ) -> AsyncGenerator[Row | Failure, None]:
        """Yield what becomes of each sample, in their order; several are in preparation at once."""
        places = asyncio.Semaphore(self._options.max_samples)
        window = WINDOW * self._options.max_samples
        pending: deque[asyncio.Task[Row | Failure]] = deque()
        following = start
        try:
            while pending or following < len(samples):
                while len(pending) < window and following < len(samples):
                    made = self._row(offset + following, samples[following], places)
                    pending.append(asyncio.create_task(made))
                    following += 1
                # Awaited itself, it alone would be cancelled at first, and its release of a sandbox
                # could wait for places that commands of the others have.
                await asyncio.wait([pending[0]])
                yield pending.popleft().result()
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


class WorkerError(Exception):
    """A worker process has ended, or cannot do what it was started for."""


class WorkerRows:
    """Makes the rows of a task's samples in worker processes, which load the task themselves.

    They are sent the samples, so a task whose samples are others each time it is loaded is no
    exception.
    """

    def __init__(self, resolved: ResolvedTask, options: ExportOptions) -> None:
        self._workers = options.workers
        self._places = options.max_samples // options.workers
        if resolved.ref is None or not resolved.named:
            raise ConfigError(
                f"task {resolved.task.name!r} cannot be exported with workers: they load it "
                "themselves, and this one was made or changed in Python. Name it as package/task "
                "or file.py@task, or leave workers out"
            )
        try:
            self._job = dump((resolved.ref, replace(options, max_samples=self._places, workers=1)))
        except Exception as error:  # each kind of object raises its own kind of error
            raise ConfigError(
                f"task {resolved.task.name!r} cannot be exported with workers: its options cannot "
                f"be sent to another process ({error}). Give solver and models by name, or leave "
                "workers out"
            ) from error

    async def of(
        self, samples: Sequence[Sample], start: int = 0
    ) -> AsyncGenerator[Row | Failure, None]:
        """Yield what becomes of each sample, in their order.

        Raises:
            WorkerError: A worker was killed, or cannot load the task.
        """
        left = len(samples) - start
        size = max(1, min(WINDOW * self._places, -(-left // self._workers)))
        pending: deque[Future[list[Row | Failure]]] = deque()
        with worker_pool(self._workers, loading=__name__) as pool:
            while pending or start < len(samples):
                try:
                    while len(pending) < AHEAD * self._workers and start < len(samples):
                        chunk = [samples[i] for i in range(start, min(start + size, len(samples)))]
                        pending.append(pool.submit(_make_rows, self._job, start, chunk))
                        start += len(chunk)
                    made = await _wait_for_rows(pending[0])
                except BrokenExecutor as error:
                    raise WorkerError(
                        "a worker process was killed, perhaps for want of memory: each of them "
                        "loads the task"
                    ) from error
                except WorkerError:
                    raise
                except Exception as error:
                    text = " ".join(f"{type(error).__name__}: {error}".split())
                    raise WorkerError(f"a worker process failed: {text}") from error
                pending.popleft()
                for row in made:
                    yield row


async def _wait_for_rows(call: Future[list[Row | Failure]]) -> list[Row | Failure]:
    result = asyncio.wrap_future(call)
    try:
        await asyncio.wait([result])
        error = result.exception()
        if isinstance(error, KeyboardInterrupt | BrokenExecutor):
            # Most signals are meant for all processes: this one has been cancelled then.
            await asyncio.sleep(0.5)
    except asyncio.CancelledError:
        result.cancel()
        raise
    if isinstance(error, KeyboardInterrupt):
        raise WorkerError("a worker process was stopped by a signal") from error
    return result.result()


@cache
def _load_rows(job: bytes) -> Rows:
    ref: TaskRef
    ref, options = pickle.loads(job)
    rows = Rows(ref.resolve(options.dataset.model_roles), options)
    freeze_memory_once()
    return rows


def _make_rows(job: bytes, offset: int, samples: Sequence[Sample]) -> list[Row | Failure]:
    """Make the rows of some samples, in a worker."""
    rows = _load_rows(job)

    async def collect() -> list[Row | Failure]:
        return [row async for row in rows.of(samples, offset=offset)]

    return run_in_loop(collect())
