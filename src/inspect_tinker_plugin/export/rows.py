"""Makes the rows of samples, several at once and in their order: here, or in worker processes."""

from __future__ import annotations

import asyncio
import pickle
import time
from collections import deque
from collections.abc import AsyncGenerator, Mapping, Sequence
from concurrent.futures import BrokenExecutor, Future
from dataclasses import dataclass, field, replace
from functools import cache
from logging import getLogger

from inspect_ai import Task
from inspect_ai.dataset import Sample
from inspect_ai.util import SandboxEnvironmentType

from inspect_tinker_plugin.contracts.episodes import SolverLike
from inspect_tinker_plugin.contracts.errors import ConfigError, ExportError
from inspect_tinker_plugin.export.columns import row_of
from inspect_tinker_plugin.export.first_turn import FirstTurns
from inspect_tinker_plugin.export.layouts import LAYOUTS, Layout, prompt_row
from inspect_tinker_plugin.export.parts import Failure
from inspect_tinker_plugin.export.schema import FORMATS, Format, Row
from inspect_tinker_plugin.options import EpisodeOptions, Selection
from inspect_tinker_plugin.processes.memory import freeze_memory_once
from inspect_tinker_plugin.processes.workers import dump, worker_pool
from inspect_tinker_plugin.tasks.reference import ResolvedTask, TaskRef, task_reference

logger = getLogger(__name__)


@dataclass(frozen=True)
class ExportOptions:
    """How a task is exported."""

    format: Format = "parquet"
    """File format."""

    layout: Layout = "chat"
    """Columns: those of this project, or those that a trainer reads."""

    selection: Selection = field(default_factory=Selection)
    """Which samples."""

    solver: SolverLike | None = None
    """Replaces the task's solver."""

    solver_name: str | None = None
    """Name and arguments of ``solver``, as text; an export continues only with the same."""

    sandbox: SandboxEnvironmentType | Mapping[str, str] | None = None
    """Replaces the task's sandbox."""

    episode: EpisodeOptions = field(default_factory=EpisodeOptions)
    """Limits and model roles of the episodes."""

    max_samples: int = 16
    """Samples prepared at once, by all workers."""

    workers: int = 1
    """Processes that prepare samples; with one it is this process."""

    overwrite: bool = False
    """Start a new export, whatever export the folder holds."""

    def __post_init__(self) -> None:
        if self.max_samples < 1:
            raise ConfigError(f"max_samples is {self.max_samples}; it must be at least 1.")
        if not 1 <= self.workers <= self.max_samples:
            raise ConfigError(
                f"workers is {self.workers}; it must be at least 1 and at most max_samples "
                f"({self.max_samples}), which they share."
            )
        if self.format not in FORMATS:
            raise ConfigError(f"unknown format {self.format!r}; there is {', '.join(FORMATS)}.")
        if self.layout not in LAYOUTS:
            raise ConfigError(f"unknown layout {self.layout!r}; there is {', '.join(LAYOUTS)}.")


WINDOW = 4
"""Samples that are begun for each that may be prepared at the same time, so that a slow one holds
up no others."""


class Rows:
    """Makes the rows of a task's samples in this process.

    Args:
        task: The task.
        options: How it is exported.
    """

    def __init__(self, task: Task, options: ExportOptions) -> None:
        self._task = task
        self._options = options
        self._turns = FirstTurns(
            task, options=options.episode, solver=options.solver, sandbox=options.sandbox
        )

    async def of(
        self, samples: Sequence[Sample], start: int = 0, *, offset: int = 0
    ) -> AsyncGenerator[Row | Failure, None]:
        """Yield what becomes of each sample, in their order; several are in preparation at once.

        Args:
            samples: The samples.
            start: Position of the first one wanted.
            offset: Position of ``samples`` in the export.
        """
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


class WorkerError(Exception):
    """A worker process has ended, or cannot do what it was started for."""


CHUNK = 256
"""Most samples that a worker is sent at once."""

CHUNK_SECONDS = 0.5
"""Seconds that a chunk may take at most if the next one is to be larger."""

AHEAD = 3
"""Chunks sent or waiting per worker."""


@dataclass(frozen=True)
class _Job:
    """What a worker needs to know once."""

    ref: TaskRef
    options: ExportOptions


@dataclass(frozen=True)
class _Chunk:
    """What has become of some samples."""

    rows: list[Row | Failure]
    seconds: float


class WorkerRows:
    """Makes the rows of a task's samples in worker processes, which load the task themselves.

    They are sent the samples, so a task whose samples are others each time it is loaded is no
    exception.

    Args:
        resolved: The task.
        options: How it is exported, and by how many workers.

    Raises:
        ConfigError: Another process cannot load the task, or cannot be sent the options.
    """

    def __init__(self, resolved: ResolvedTask, options: ExportOptions) -> None:
        self._workers = options.workers
        self._places = options.max_samples // options.workers
        ref = resolved.ref if resolved.named else task_reference(resolved.task, verify=True)
        if ref is None:
            raise ConfigError(
                f"task {resolved.task.name!r} cannot be exported with workers: they load it "
                "themselves, and this one was made or changed in Python. Name it as package/task "
                "or file.py@task, or leave workers out"
            )
        try:
            self._job = dump(_Job(ref, replace(options, max_samples=self._places, workers=1)))
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

        Args:
            samples: The samples.
            start: Position of the first one wanted.

        Raises:
            WorkerError: A worker was killed, or cannot load the task.
        """
        left = len(samples) - start
        size = max(1, min(WINDOW * self._places, -(-left // self._workers)))
        pending: deque[Future[_Chunk]] = deque()
        with worker_pool(self._workers, loading=__name__) as pool:
            while pending or start < len(samples):
                try:
                    while len(pending) < AHEAD * self._workers and start < len(samples):
                        chunk = [samples[i] for i in range(start, min(start + size, len(samples)))]
                        pending.append(pool.submit(_make_rows, self._job, start, chunk))
                        start += len(chunk)
                    made = await _result(pending[0])
                except BrokenExecutor as error:
                    raise WorkerError(
                        "a worker process was killed, perhaps for want of memory: each of them "
                        "loads the task"
                    ) from error
                except _InterruptedError as error:
                    raise WorkerError("a worker process was stopped by a signal") from error
                except Exception as error:
                    text = " ".join(f"{type(error).__name__}: {error}".split())
                    raise WorkerError(f"a worker process failed: {text}") from error
                pending.popleft()
                if made.seconds < CHUNK_SECONDS:
                    size = min(2 * size, CHUNK)
                for row in made.rows:
                    yield row


class _InterruptedError(Exception):
    """A worker was interrupted, as by Ctrl-C."""


async def _result(call: Future[_Chunk]) -> _Chunk:
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
        raise _InterruptedError
    return result.result()


@cache
def _rows_of(job: bytes) -> Rows:
    received: _Job = pickle.loads(job)
    rows = Rows(received.ref.resolve(), received.options)
    freeze_memory_once()
    return rows


def _make_rows(job: bytes, offset: int, samples: Sequence[Sample]) -> _Chunk:
    """Make the rows of some samples, in a worker."""
    started = time.monotonic()
    made = asyncio.run(_collected(_rows_of(job), offset, samples))
    return _Chunk(made, time.monotonic() - started)


async def _collected(rows: Rows, offset: int, samples: Sequence[Sample]) -> list[Row | Failure]:
    return [row async for row in rows.of(samples, offset=offset)]
