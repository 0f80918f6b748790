"""Writes logs during training: in its own threads, without delaying or failing it."""

from __future__ import annotations

import asyncio
import atexit
import os
import re
from collections import Counter, deque
from collections.abc import Callable, Collection, Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import suppress
from datetime import datetime
from functools import cache
from logging import getLogger
from pathlib import Path
from typing import Any

from filelock import FileLock, Timeout
from inspect_ai.log import EvalLog, EvalSample, EvalSpec, read_eval_log

from inspect_tinker_plugin.contracts.errors import ConfigError
from inspect_tinker_plugin.logs.header import batch_log
from inspect_tinker_plugin.logs.rollout import Rollout, eval_sample
from inspect_tinker_plugin.logs.staging import (
    Attempt,
    GroupSlot,
    LogRun,
    StoredSample,
    read_part,
    runs_in,
    write_log,
    write_part,
)
from inspect_tinker_plugin.processes import local_path, replacing

logger = getLogger(__name__)

_owned: dict[str, FileLock] = {}
_left: deque[LogRun] = deque()
_warned: set[Path] = set()
_lost: Counter[Path] = Counter()


def open_run(log_dir: Path, header: EvalLog) -> LogRun:
    """Prepare a folder for the logs of a dataset, and finish the logs of runs that died.

    Logs of steps that the dataset's training does again are removed.

    Args:
        log_dir: Folder of the logs; created if missing.
        header: What all logs of the dataset share; its ``run_id`` names the run.

    Raises:
        ConfigError: The folder cannot be written.
    """
    run = LogRun(log_dir.absolute(), header.eval.run_id)
    try:
        lock = run.create(header.model_dump_json(fallback=str))
    except OSError as error:
        raise ConfigError(
            f"log_dir {str(log_dir)!r} cannot be written ({error}); name a folder that can"
        ) from error
    _owned[run.run_id] = lock
    _submit(1, _try, run.log_dir, _finish_runs, run.log_dir)
    return run


def close_run(run: LogRun) -> None:
    """Mark a dataset as gone; safe to call from the garbage collector.

    Waiting parts are made into logs by the next dataset of this process, by
    :func:`assemble_pending`, or by the next process that uses the folder.
    """
    _left.append(run)


async def write_group(
    run: LogRun, slot: GroupSlot, rollouts: Sequence[Rollout | EvalSample]
) -> None:
    """Write a group's rollouts, or its records of an earlier log.

    The last group of a batch starts the assembly of the batch's log. Returns when the group is
    safely on disk. The log itself is made in the background. Cancelling the wait does not cancel
    the writing. Errors are never raised: they are logged, once per folder, and training continues.
    """
    try:
        written = _submit(0, _try_group, run, slot, rollouts)
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
    _submit(0, lambda: None).result()  # wait for what this process has begun
    # In a thread although the caller waits: inside a running event loop, Inspect's log
    # functions would patch asyncio for the whole process.
    made: list[Path] = _submit(1, _finish_runs, local_path(log_dir).absolute(), True).result()
    return made


def _finish_runs(folder: Path, own: bool = False) -> list[Path]:
    """Make the logs of runs that died, and remove those that a training makes again.

    Args:
        folder: The folder of the logs.
        own: Whether the logs of this process's own runs are made, too, however many groups they
            have.
    """
    for run in _release_left():
        if run.log_dir != folder:
            _try(run.log_dir, _finish_if_dead, run)
    made: list[Path] = []
    elsewhere = set()
    for run in runs_in(folder):
        if run.run_id in _owned:
            made += assemble(run) if own else []
        elif (finished := _finish_if_dead(run)) is None:
            elsewhere.add(run.run_id)
        else:
            made += finished
    # A worker that outlived its trainer may have added to an earlier run in the meantime.
    for run in runs_in(folder):
        if run.run_id in _owned:
            remove_undone(run, elsewhere)
    return [path for path in made if path.is_file()]


def count_lost(log_dir: str | Path) -> int:
    """Return how many groups this process could not write to a folder, which are in no log."""
    return _lost[local_path(log_dir).absolute()]


def _try_group(run: LogRun, slot: GroupSlot, rollouts: Sequence[Rollout | EvalSample]) -> None:
    if not _try(run.log_dir, _write_group, run, slot, rollouts):
        _lost[run.log_dir] += 1


def _write_group(run: LogRun, slot: GroupSlot, rollouts: Sequence[Rollout | EvalSample]) -> None:
    records = [
        each if isinstance(each, EvalSample) else eval_sample(each, slot) for each in rollouts
    ]
    if run.add_part(slot, lambda path: write_part(path, records)):
        _submit(1, _try, run.log_dir, assemble, run, True)


def _try(log_dir: Path, work: Callable[..., object], *arguments: Any) -> bool:
    """Do some work in the background; return whether it is done.

    The first time that it fails in a folder is a warning.
    """
    try:
        work(*arguments)
    except Exception as error:
        _warn_once(log_dir, error)
        return False
    return True


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
        made = assemble(run)
        run.discard_if_empty()
        return made
    finally:
        lock.release()


def _release_left() -> Iterator[LogRun]:
    """Give up this process's runs whose datasets are gone."""
    while _left:
        run = _left.popleft()
        lock = _owned.pop(run.run_id, None)
        if lock is not None:
            lock.release()
            yield run


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
    if log_dir not in _warned:
        _warned.add(log_dir)
        logger.warning(
            "rollout logs cannot be written to %s (%s: %s). Training continues, and writing is "
            "tried again for every group, without a further warning.",
            log_dir,
            type(error).__name__,
            error,
        )


def _submit(pool: int, work: Callable[..., Any], *arguments: Any) -> Future[Any]:
    return _pool(pool, os.getpid()).submit(work, *arguments)


@cache
def _pool(number: int, process: int) -> ThreadPoolExecutor:
    """Return the thread that stages groups (0) or makes logs (1); groups never wait for logs."""
    return ThreadPoolExecutor(1, thread_name_prefix=f"rollout-logs-{number}")


def assemble(run: LogRun, complete_only: bool = False) -> list[Path]:
    """Write the logs of a run's batches, and remove their parts.

    Can be interrupted at any point and called again: a log appears complete, under a name that
    its parts determine.
    """
    made: list[Path] = []
    if not run.folder.is_dir():
        return made
    with run.hold_lock("assemble"):
        for attempt in run.attempts():
            if complete_only and not attempt.complete:
                continue
            run.close(attempt)
            location = _assemble_attempt(run, attempt)
            if location is not None:
                made.append(location)
            run.remove(attempt)
    return made


def _assemble_attempt(run: LogRun, attempt: Attempt) -> Path | None:
    samples: list[StoredSample] = []
    read = 0
    for path in attempt.parts():
        try:
            samples.extend(read_part(path))
        except Exception as error:
            _put_aside(run, attempt, path, error)
            continue
        read += 1
    if not read:
        return None
    _number_rollouts(samples)
    header = _header(run)
    log = batch_log(header, attempt, samples, groups_read=read)
    location = run.log_dir / _file_name(log, attempt)
    with replacing(location, run.temporary()) as part:
        write_log(log, samples, part)
    if log.status == "success":
        done = (log.eval.metadata or {})["policy_step"]
        names = f"*_{_batch_name(log, attempt)}_*.eval"
        remove_before(run.log_dir, header.eval, names, lambda step, _: step == done)
    return location


def remove_undone(run: LogRun, elsewhere: Collection[str]) -> None:
    """Remove the logs of steps that a training does again, or that its weights know nothing of.

    A training that continues at the step of its last checkpoint has lost the steps after it. That
    step itself, and the evaluation before it, have the checkpoint's weights: they are kept until
    they are done again.

    Args:
        run: The run of the dataset that continues.
        elsewhere: Ids of runs of other, living processes; their logs are kept.
    """
    spec = _header(run).eval
    about = spec.metadata or {}
    first = about.get("first_step", 0)

    def is_undone(step: int, other: EvalLog) -> bool:
        return step > first and other.eval.run_id not in elsewhere

    remove_before(run.log_dir, spec, f"*_{_task_name(spec.task)}-batch-*_*.eval", is_undone)


def remove_before(
    log_dir: Path, spec: EvalSpec, names: str, choose: Callable[[int, EvalLog], bool]
) -> None:
    """Remove chosen logs of earlier runs of the same training, of steps that are known."""
    about = spec.metadata or {}
    if about.get("training") is None:
        return
    begun = datetime.fromisoformat(spec.created)
    for path in log_dir.glob(names):
        try:
            other = read_eval_log(str(path), header_only=True)
        except Exception as error:  # a damaged log is somebody else's to look at
            logger.warning("the log %s cannot be read: %s", path, error)
            continue
        known = other.eval.metadata or {}
        if (
            other.eval.task == spec.task
            and other.eval.run_id != spec.run_id
            and known.get("training") == about["training"]
            and (known.get("asked_every") is None) == (about.get("asked_every") is None)
            and isinstance(step := known.get("policy_step"), int)
            and datetime.fromisoformat(other.eval.created) <= begun
            and choose(step, other)
        ):
            path.unlink(missing_ok=True)


def _file_name(log: EvalLog, attempt: Attempt) -> str:
    """Name a log as Inspect does, so that a folder's list is in the order of training."""
    created = datetime.fromisoformat(log.eval.created).isoformat(timespec="seconds")
    return f"{re.sub('[:+]', '-', created)}_{_batch_name(log, attempt)}_{log.eval.task_id}.eval"


def _batch_name(log: EvalLog, attempt: Attempt) -> str:
    """Return the part of a log's name that each log of the same batch has."""
    return f"{_task_name(log.eval.task)}-{attempt.name.rpartition('.')[0]}"


def _task_name(task: str) -> str:
    return re.sub(r"[^A-Za-z0-9.-]+", "-", task.rpartition("/")[2]) or "task"


def _number_rollouts(samples: Sequence[EvalSample]) -> None:
    """Give rollouts of samples with the same id different numbers."""
    taken: set[tuple[str, int]] = set()
    for sample in samples:
        while (str(sample.id), sample.epoch) in taken:
            sample.epoch += 1
        taken.add((str(sample.id), sample.epoch))


def _put_aside(run: LogRun, attempt: Attempt, path: Path, error: Exception) -> None:
    """Move a damaged part aside for inspection; the log is made from the others."""
    kept = run.log_dir / f"{run.run_id}.{attempt.name}.{path.name}.damaged"
    os.replace(path, kept)
    logger.warning("a part of a rollout log cannot be read (%s); it is kept as %s", error, kept)


def _header(run: LogRun) -> EvalLog:
    """Read what all logs of a run share."""
    return EvalLog.model_validate_json(run.header_file.read_bytes())
