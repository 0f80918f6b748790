"""Assembles logs: writes each group's part, and merges the parts of a batch into its log."""

from __future__ import annotations

import hashlib
import os
import re
from collections.abc import Collection, Iterator, Sequence
from datetime import datetime
from logging import getLogger
from pathlib import Path
from typing import Any

from inspect_ai.log import (
    EvalConfig,
    EvalDataset,
    EvalLog,
    EvalSample,
    EvalSpec,
)

from inspect_tinker_plugin.inspect_internals.log_files import Header, read_header
from inspect_tinker_plugin.logs.parts import StoredSample, read_part, write_log, write_part
from inspect_tinker_plugin.logs.results import add_rewards, eval_results, eval_stats
from inspect_tinker_plugin.logs.rollout import Rollout, eval_sample, figures, note
from inspect_tinker_plugin.logs.run import Attempt, GroupSlot, LogRun

logger = getLogger(__name__)


def stage(run: LogRun, slot: GroupSlot, rollouts: Sequence[Rollout]) -> bool:
    """Write a finished group into the staging folder of its batch.

    Returns:
        Whether the batch has every group now.

    Raises:
        OSError: It cannot be written.
    """
    records = [eval_sample(rollout, slot) for rollout in rollouts]
    return run.add_part(slot, lambda path: write_part(path, records))


def assemble(run: LogRun, *, complete_only: bool) -> list[Path]:
    """Write the logs of a run's batches.

    Can be interrupted at any point and called again: a log appears complete, under
    a name that its parts determine, and its parts are removed afterwards.

    Args:
        run: The run.
        complete_only: Skip batches whose groups are not all there yet.

    Returns:
        The logs that were written.

    Raises:
        OSError: One cannot be written; its parts stay.
    """
    made: list[Path] = []
    if not run.folder.is_dir():
        return made
    with run.assembling():
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
    _number_apart(samples)
    log = _batch_log(_spec(run), attempt, samples, groups_read=read)
    location = run.log_dir / _file_name(log, attempt)
    temporary = run.temporary()
    try:
        write_log(log, samples, temporary)
        os.replace(temporary, location)
    finally:
        temporary.unlink(missing_ok=True)
    _remove_repeated(run, attempt, log, location)
    return location


def remove_undone(run: LogRun, elsewhere: Collection[str]) -> None:
    """Remove the logs of steps that a training does again, or that its weights know nothing of.

    A training that continues at the step of its last checkpoint has lost the steps after it. The
    evaluation before that step has the checkpoint's weights: it is kept if it is complete, until it
    is done again.

    Args:
        run: The run of the dataset that continues.
        elsewhere: Ids of runs of other, living processes; their logs are kept.
    """
    spec = _spec(run)
    about = spec.metadata or {}
    if about.get("training") is None:
        return
    first, evaluates = about["first_step"], about["asked_every"] is not None
    for path, other in _logs_before(run, spec, f"*_{_task_name(spec.task)}-batch-*_*.eval"):
        step = (other.eval.metadata or {})["policy_step"]
        whole = evaluates and step == first and other.status == "success"
        if step >= first and not whole and other.eval.run_id not in elsewhere:
            path.unlink(missing_ok=True)


def _remove_repeated(run: LogRun, attempt: Attempt, log: EvalLog, location: Path) -> None:
    """Remove the log of the same step that an earlier run of the training left."""
    about = log.eval.metadata or {}
    if about.get("training") is None or about["policy_step"] is None or log.status != "success":
        return
    for path, other in _logs_before(run, log.eval, f"*_{_batch_name(log, attempt)}_*.eval"):
        if path != location and (other.eval.metadata or {})["policy_step"] == about["policy_step"]:
            path.unlink(missing_ok=True)


def _logs_before(run: LogRun, spec: EvalSpec, names: str) -> Iterator[tuple[Path, Header]]:
    """Yield the headers of logs that the same training began before, of steps that are known."""
    about = spec.metadata or {}
    begun = datetime.fromisoformat(spec.created)
    for path in run.log_dir.glob(names):
        try:
            other = read_header(str(path))
        except Exception as error:  # a damaged log is somebody else's to look at
            logger.warning("the log %s cannot be read: %s", path, error)
            continue
        known = other.eval.metadata or {}
        if (
            other.eval.task == spec.task
            and other.eval.run_id != spec.run_id
            and known.get("training") == about["training"]
            and (known.get("asked_every") is None) == (about["asked_every"] is None)
            and isinstance(known.get("policy_step"), int)
            and datetime.fromisoformat(other.eval.created) < begun
        ):
            yield path, other


def _trainers_epoch(attempt: Attempt, shared: dict[str, Any]) -> int | None:
    """Return the trainer's own epoch (`num_epochs`) in which a batch was asked for, from 0.

    Each epoch asks for each batch once; a resumed run may begin in the middle of one. Of a group
    that was taken out of its batch it is not known.
    """
    if attempt.batch is None:
        return None
    batches = shared.get("batches", 0)
    before, begun_at = divmod(shared.get("first_step", 0), batches) if batches else (0, 0)
    return before + attempt.number + (attempt.batch < begun_at)


def _evaluated_at(attempt: Attempt, shared: dict[str, Any], every: int) -> int | None:
    """Return the step before which a test set was rolled out; ``None`` if that is not known.

    A trainer evaluates when its step is a multiple of ``every``, from its first one on.
    """
    first: int = shared.get("first_step", 0)
    return (-(-first // every) + attempt.number) * every if every else None


def _batch_log(
    spec: EvalSpec, attempt: Attempt, samples: Sequence[EvalSample], *, groups_read: int
) -> EvalLog:
    reward = add_rewards(samples)
    stats = eval_stats(samples)
    group_size = spec.config.epochs or 1
    unique = hashlib.sha256(f"{spec.run_id}/{attempt.name}".encode()).hexdigest()[:22]
    causes = [cause for s in samples if (cause := figures(s).get("error_cause"))]
    shared: dict[str, Any] = spec.metadata or {}
    epoch = _trainers_epoch(attempt, shared)
    step = None
    if (every := shared.get("asked_every")) is not None:
        step = _evaluated_at(attempt, shared, every)
    elif epoch is not None and attempt.batch is not None:
        step = epoch * shared.get("batches", 0) + attempt.batch
    for sample in samples:
        note(sample, "policy_step", step)
    metadata: dict[str, Any] = {
        **shared,
        "batch": attempt.batch,
        "policy_step": step,
        "visit": None if epoch is None else epoch + 1,
        "groups": attempt.groups,
        "groups_logged": groups_read,
        "group_size": group_size,
        "errors": {cause: causes.count(cause) for cause in sorted(set(causes))},
    }
    spec = spec.model_copy(
        update={
            "eval_id": unique,
            "task_id": unique,
            "created": stats.started_at or spec.created,
            "metadata": metadata,
            "model_args": {**spec.model_args, "policy_step": step},
        }
    )
    spec.dataset.sample_ids = list(dict.fromkeys(sample.id for sample in samples))
    # The viewer compares a log's number of samples with its limit times its epochs.
    spec.config = spec.config.model_copy(update={"limit": len(spec.dataset.sample_ids)})
    results = eval_results(samples, planned=attempt.groups * group_size, reward=reward)
    spec.headline_metric = results.headline
    return EvalLog(
        status="success" if groups_read == attempt.groups else "cancelled",
        eval=spec,
        results=results,
        stats=stats,
    )


def _file_name(log: EvalLog, attempt: Attempt) -> str:
    """Name a log as Inspect does, so that a folder's list is in the order of training."""
    created = datetime.fromisoformat(log.eval.created).isoformat(timespec="seconds")
    return f"{created.replace(':', '-')}_{_batch_name(log, attempt)}_{log.eval.task_id}.eval"


def _batch_name(log: EvalLog, attempt: Attempt) -> str:
    """Return the part of a log's name that each log of the same batch has."""
    return f"{_task_name(log.eval.task)}-{attempt.name.rpartition('.')[0]}"


def _task_name(task: str) -> str:
    return re.sub(r"[^A-Za-z0-9.-]+", "-", task.rpartition("/")[2]) or "task"


def _number_apart(samples: Sequence[EvalSample]) -> None:
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


def _spec(run: LogRun) -> EvalSpec:
    """Read what all logs of a run share; if that is lost, a log still has its rollouts."""
    try:
        return EvalSpec.model_validate_json(run.spec_file.read_bytes())
    except (OSError, ValueError):
        return EvalSpec(
            eval_id=run.run_id,
            run_id=run.run_id,
            task_id=run.run_id,
            created=datetime.now().astimezone().isoformat(timespec="seconds"),
            task="task",
            dataset=EvalDataset(),
            model="rl/policy",
            config=EvalConfig(),
        )
