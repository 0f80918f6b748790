"""One export from beginning to end: samples are prepared concurrently and written in order."""

from __future__ import annotations

import asyncio
import hashlib
import json
import random
from collections import deque
from collections.abc import AsyncGenerator, Callable, Mapping, Sequence
from contextlib import aclosing
from dataclasses import dataclass, field, replace
from logging import getLogger
from pathlib import Path
from typing import Any

from inspect_ai.dataset import Sample
from inspect_ai.util import SandboxEnvironmentType
from pydantic_core import to_json

from inspect_tinker_plugin.episode.types import SolverLike
from inspect_tinker_plugin.errors import ConfigError, ExportError
from inspect_tinker_plugin.export.columns import row_of
from inspect_tinker_plugin.export.first_turn import FirstTurns
from inspect_tinker_plugin.export.folder import TRAIN, ExportFolder, check_target
from inspect_tinker_plugin.export.layouts import LAYOUTS, Layout, prompt_row, prompt_schema
from inspect_tinker_plugin.export.parts import Failure
from inspect_tinker_plugin.export.schema import FORMATS, Format, Row
from inspect_tinker_plugin.options import EpisodeOptions
from inspect_tinker_plugin.tasks.reference import ResolvedTask
from inspect_tinker_plugin.tasks.samples import select_samples
from inspect_tinker_plugin.tasks.selection import Selection
from inspect_tinker_plugin.wording import counted

logger = getLogger(__name__)

LAYOUT = 2
"""Version of the folder's layout; raised when older folders can no longer be continued."""

_ABOUT = """Prompts and answers of an Inspect task, written by `inspect rl export`. A prompt is what
the task's solver sends to the model first; `info` and `tools` hold JSON."""


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
    """Samples prepared at once."""

    overwrite: bool = False
    """Start a new export, whatever export the folder holds."""

    def __post_init__(self) -> None:
        if self.max_samples < 1:
            raise ConfigError(f"max_samples is {self.max_samples}; it must be at least 1.")
        if self.format not in FORMATS:
            raise ConfigError(f"unknown format {self.format!r}; there is {', '.join(FORMATS)}.")
        if self.layout not in LAYOUTS:
            raise ConfigError(f"unknown layout {self.layout!r}; there is {', '.join(LAYOUTS)}.")


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
        self._turns = FirstTurns(
            resolved.task,
            options=options.episode,
            solver=options.solver,
            sandbox=options.sandbox,
        )
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
            async with aclosing(self._results(continued)) as results:
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
        self._folder.add(part, self._digest)
        return self._finish(continued)

    async def _results(self, start: int) -> AsyncGenerator[Row | Failure, None]:
        """Yield the results of all samples in their order; several are in preparation at once."""
        places = asyncio.Semaphore(self._options.max_samples)
        window = 4 * self._options.max_samples
        pending: deque[asyncio.Task[Row | Failure]] = deque()
        following = start
        try:
            while pending or following < len(self._samples):
                while len(pending) < window and following < len(self._samples):
                    sample = self._samples[following]
                    pending.append(asyncio.create_task(self._result(following, sample, places)))
                    following += 1
                yield await pending[0]
                pending.popleft()
        finally:
            for task in pending:
                task.cancel()
            await asyncio.gather(*pending, return_exceptions=True)

    async def _result(self, index: int, sample: Sample, places: asyncio.Semaphore) -> Row | Failure:
        async with places:
            try:
                turn = await self._turns.of(sample)
                row = row_of(self._resolved.task.name, sample, turn.request, turn.state)
                return prompt_row(self._options.layout, row, index)
            except ExportError as error:
                return Failure(str(sample.id), str(error))
            except Exception as error:  # whatever the reason, the other samples can be written
                logger.debug("sample %r could not be exported", sample.id, exc_info=error)
                return Failure(str(sample.id), " ".join(f"{type(error).__name__}: {error}".split()))

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
