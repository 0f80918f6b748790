"""Writes logs during training: in its own threads, without delaying or failing it."""

from __future__ import annotations

import asyncio
import atexit
import os
import threading
from collections import deque
from collections.abc import Callable, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import suppress
from functools import cache
from logging import getLogger
from pathlib import Path
from typing import Any

from filelock import FileLock, Timeout
from inspect_ai.log import EvalSpec

from inspect_tinker_plugin.contracts.errors import ConfigError
from inspect_tinker_plugin.logs.assembly import assemble, remove_undone, stage
from inspect_tinker_plugin.logs.rollout import Rollout
from inspect_tinker_plugin.logs.run import GroupSlot, LogRun, runs_in

logger = getLogger(__name__)

_owned: dict[str, FileLock] = {}
_left: deque[LogRun] = deque()
_warned: set[Path] = set()
_behind: set[LogRun] = set()
"""Runs with complete batches whose logs could not be written; it is tried again for each group."""

_guard = threading.Lock()


def open_run(log_dir: Path, spec: EvalSpec) -> LogRun:
    """Prepare a folder for the logs of a dataset, and finish the logs of runs that died.

    Logs of steps that the dataset's training does again are removed.

    Args:
        log_dir: Folder of the logs; created if missing.
        spec: What all logs of the dataset share; its ``run_id`` names the run.

    Raises:
        ConfigError: The folder cannot be written.
    """
    run = LogRun(log_dir.absolute(), spec.run_id)
    try:
        lock = run.create(spec.model_dump_json(fallback=str))
    except OSError as error:
        raise ConfigError(
            f"log_dir {str(log_dir)!r} cannot be written ({error}); name a folder that can"
        ) from error
    _owned[run.run_id] = lock
    _submit(1, _take_over, run)
    return run


def close_run(run: LogRun) -> None:
    """Mark a dataset as gone; safe to call from the garbage collector.

    Waiting parts are made into logs by the next dataset of this process, by
    :func:`assemble_pending`, or by the next process that uses the folder.
    """
    _left.append(run)


async def write_group(run: LogRun, slot: GroupSlot, rollouts: Sequence[Rollout]) -> None:
    """Write a group's rollouts; the last group of a batch starts the assembly of the batch's log.

    Returns when the group is safely on disk. The log itself is made in the background.
    Cancelling the wait does not cancel the writing. Errors are never raised: they are
    logged, once per folder, and training continues.
    """
    try:
        written = _submit(0, _write_group, run, slot, rollouts)
    except RuntimeError as error:  # the interpreter is shutting down
        _warn_once(run.log_dir, error)
    else:
        await asyncio.shield(asyncio.wrap_future(written))


def assemble_pending(log_dir: str | Path) -> list[Path]:
    """Make logs of everything that waits in a folder, including batches with missing groups.

    Call it when a training has ended. Runs of other, living processes are left alone; a
    log of an incomplete batch has the status ``cancelled``.

    Args:
        log_dir: The folder that was given as ``log_dir``.

    Returns:
        The logs that this call made.

    Raises:
        OSError: A log cannot be written; nothing is lost, so call it again.
    """
    _submit(0, _nothing).result()  # wait for what this process has begun
    # In a thread although the caller waits: inside a running event loop, Inspect's log
    # functions would patch asyncio for the whole process.
    made: list[Path] = _submit(1, _assemble_all, Path(log_dir).absolute()).result()
    return made


def _assemble_all(folder: Path) -> list[Path]:
    _release_left()
    made: list[Path] = []
    elsewhere = set()
    for run in runs_in(folder):
        if run.run_id in _owned:
            made += assemble(run, complete_only=False)
        elif (finished := _finish_if_dead(run)) is None:
            elsewhere.add(run.run_id)
        else:
            made += finished
    # A worker that outlived its trainer may have added to an earlier run in the meantime.
    for run in runs_in(folder):
        if run.run_id in _owned:
            remove_undone(run, elsewhere)
    return [path for path in made if path.is_file()]


def _write_group(run: LogRun, slot: GroupSlot, rollouts: Sequence[Rollout]) -> None:
    try:
        complete = stage(run, slot, rollouts)
        if complete or run in _behind:
            _submit(1, _assemble_complete, run)
    except Exception as error:
        _warn_once(run.log_dir, error)


def _assemble_complete(run: LogRun) -> None:
    try:
        assemble(run, complete_only=True)
        _behind.discard(run)
    except Exception as error:
        _behind.add(run)
        _warn_once(run.log_dir, error)


def _take_over(run: LogRun) -> None:
    """Finish the logs of runs that died, and remove those that the new run makes again."""
    _release_left()
    elsewhere = set()
    for other in runs_in(run.log_dir):
        try:
            if other.run_id not in _owned and _finish_if_dead(other) is None:
                elsewhere.add(other.run_id)
        except Exception as error:
            _warn_once(run.log_dir, error)
    try:
        remove_undone(run, elsewhere)
    except OSError as error:
        _warn_once(run.log_dir, error)


def _finish_if_dead(run: LogRun) -> list[Path] | None:
    """Make the logs of a run whose dataset is gone; ``None`` if it is not."""
    if not run.begun:
        return []
    lock = run.owner_lock()
    try:
        lock.acquire(timeout=0)
    except Timeout:
        return None
    try:
        made = assemble(run, complete_only=False)
        run.discard_if_empty()
        return made
    finally:
        lock.release()


def _release_left() -> None:
    while _left:
        lock = _owned.pop(_left.popleft().run_id, None)
        if lock is not None:
            lock.release()


@atexit.register
def _leave() -> None:
    """Remove empty staging folders; those that are not empty are for the next start."""
    for run_id, lock in list(_owned.items()):
        del _owned[run_id]
        lock.release()
        with suppress(OSError):
            folder = Path(lock.lock_file).parent
            LogRun(folder.parent.parent, run_id).discard_if_empty()


def _warn_once(log_dir: Path, error: Exception) -> None:
    with _guard:
        first = log_dir not in _warned
        _warned.add(log_dir)
    if first:
        logger.warning(
            "rollout logs cannot be written to %s (%s: %s). Training continues, and writing is "
            "tried again for every group, without a further warning.",
            log_dir,
            type(error).__name__,
            error,
        )


def _nothing() -> None:
    """Do nothing; submitted to a pool to wait for everything before it."""


def _submit(pool: int, work: Callable[..., Any], *arguments: Any) -> Future[Any]:
    return _pool(pool, os.getpid()).submit(work, *arguments)


@cache
def _pool(number: int, process: int) -> ThreadPoolExecutor:
    """Return the thread that stages groups (0) or makes logs (1); groups never wait for logs."""
    return ThreadPoolExecutor(1, thread_name_prefix=f"rollout-logs-{number}")
