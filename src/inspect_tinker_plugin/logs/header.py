"""The header of a batch's log: task, limits and versions; rewards, scores, tokens and errors."""

from __future__ import annotations

import hashlib
import math
import statistics
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from contextlib import suppress
from datetime import UTC, datetime
from importlib.metadata import PackageNotFoundError, version
from typing import Any

from inspect_ai.log import (
    EvalConfig,
    EvalDataset,
    EvalLog,
    EvalMetric,
    EvalResults,
    EvalSample,
    EvalScore,
    EvalSpec,
    EvalStats,
    HeadlineMetric,
)
from inspect_ai.model import ModelUsage
from inspect_ai.scorer import Score
from inspect_ai.util import SandboxEnvironmentSpec

from inspect_tinker_plugin import inspect_internals as internals
from inspect_tinker_plugin.contracts.policy import POLICY_NAME, POLICY_PROVIDER
from inspect_tinker_plugin.episode.runner import EpisodeRunner
from inspect_tinker_plugin.logs.rollout import figures, free_name, note
from inspect_tinker_plugin.logs.staging import Attempt
from inspect_tinker_plugin.rewards.scores import read_number

REWARD = "reward"
ROLLOUTS = "rollouts"

EXPECTED_SCORES = "expected_scores"
"""Entry of the header's metadata with the names of the task's scorers, each with its keys."""

_PACKAGES = ("inspect_ai", "inspect-tinker-plugin", "tinker", "tinker-cookbook")


def make_header(
    prepared: EpisodeRunner,
    *,
    run_id: str,
    group_size: int,
    metadata: Mapping[str, Any],
    model: str | None = None,
) -> EvalLog:
    """Describe the rollouts of a dataset: what all its logs share.

    Args:
        prepared: The task with its limits after overrides.
        run_id: Unique id of the dataset.
        group_size: Rollouts per sample, which a log shows as epochs.
        metadata: Further entries of the log's header (reward expression, renderer …).
        model: The model under training, if it is known.
    """
    task, limits = prepared.task, prepared.limits
    size = len(task.dataset)
    revision, package = prepared.source
    kind = "train" if metadata.get("asked_every") is None else "test"
    spec = EvalSpec(
        eval_id=run_id,
        run_id=run_id,
        task_id=run_id,
        created=datetime.now(UTC).isoformat(),
        task=prepared.name,
        task_version=task.version,
        task_file=internals.task_file(task),
        task_registry_name=task.registry_name,
        task_display_name=task.display_name,
        task_description=getattr(task, "description", None),  # only later releases
        task_attribs=task.attribs,
        **internals.arguments_in_logs(task, prepared.solver),
        dataset=EvalDataset(
            name=task.dataset.name,
            location=task.dataset.location,
            samples=size or None,
            shuffled=task.dataset.shuffled,
        ),
        sandbox=_sandbox(prepared.sandbox),
        model=f"{POLICY_PROVIDER}/{model or POLICY_NAME}",
        model_generate_config=prepared.config,
        config=EvalConfig(
            epochs=group_size,
            fail_on_error=False,
            message_limit=limits.message,
            token_limit=limits.token,
            token_limit_type=None if limits.token_type == "all" else limits.token_type,
            turn_limit=_least(prepared.options.max_turns, limits.turn),
            time_limit=limits.time,
            working_limit=limits.working,
            cost_limit=limits.cost,
            max_sandboxes=prepared.options.max_sandboxes,
            max_subprocesses=prepared.options.max_subprocesses,
            score_on_error=prepared.score_on_error,
            **internals.policies_in_logs(task),
            **({"sentinel": prepared.monitors.config} if prepared.monitors else {}),
        ),
        revision=revision,
        packages={**package, **_versions()},
        tags=list(dict.fromkeys([*(task.tags or []), "rollouts", kind])),
        viewer=task.viewer,
        metadata={
            **(task.metadata or {}),
            **metadata,
            EXPECTED_SCORES: {named.name: list(named.keys) for named in prepared.scorers},
        },
        **internals.scoring_in_logs(task, prepared.model_roles),
    )
    return EvalLog(eval=spec, plan=internals.plan_to_eval_plan(prepared.plan, prepared.config))


def _sandbox(spec: SandboxEnvironmentSpec | None) -> SandboxEnvironmentSpec | None:
    """Return the provider with its file; a configuration object is not for a log's header."""
    if spec is None or isinstance(spec.config, str | None):
        return spec
    return SandboxEnvironmentSpec(type=spec.type)


def _least(*limits: int | None) -> int | None:
    return min((limit for limit in limits if limit is not None), default=None)


def _versions() -> dict[str, str]:
    versions = {}
    for package in _PACKAGES:
        with suppress(PackageNotFoundError):
            versions[package] = version(package)
    return versions


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


def evaluated_at(first_step: int, number: int, every: int) -> int | None:
    """Return the step before which a trainer evaluates; ``None`` if that is not known.

    It does when its step is a multiple of ``every``, from its first one on.

    Args:
        first_step: The trainer's first step; not 0 in a resumed run.
        number: How many evaluations there were since then.
        every: Steps between evaluations; 0 if they are not known.
    """
    return (-(-first_step // every) + number) * every if every else None


def batch_log(
    header: EvalLog, attempt: Attempt, samples: Sequence[EvalSample], *, groups_read: int
) -> EvalLog:
    spec = header.eval
    reward = add_rewards(samples)
    stats = eval_stats(samples)
    group_size = spec.config.epochs or 1
    unique = hashlib.sha256(f"{spec.run_id}/{attempt.name}".encode()).hexdigest()[:22]
    shared: dict[str, Any] = spec.metadata or {}
    epoch = _trainers_epoch(attempt, shared)
    step = None
    if (every := shared.get("asked_every")) is not None:
        step = evaluated_at(shared.get("first_step", 0), attempt.number, every)
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
        "errors": count_errors(samples),
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
        plan=header.plan,
        results=results,
        stats=stats,
    )


def add_rewards(samples: Sequence[EvalSample]) -> str:
    """Add every rewarded sample's reward as a score.

    Returns:
        The score's name: ``reward``, unless the task already has a score with that name.
    """
    name = free_name(REWARD, {name for sample in samples for name in sample.scores or ()})
    for sample in samples:
        seen = figures(sample)
        if seen.get("reward") is not None:
            score = Score(
                value=seen["reward"], answer=_answer(sample), explanation=_in_a_line(seen)
            )
            sample.scores = {name: score, **(sample.scores or {})}
    return name


def eval_results(samples: Sequence[EvalSample], *, planned: int, reward: str) -> EvalResults:
    """Summarise a batch, its reward first."""
    names = dict.fromkeys([reward, *(name for s in samples for name in s.scores or ())])
    scores = [score for name in names for score in _of_scorer(name, samples)]
    scores.append(_of_rollouts(free_name(ROLLOUTS, names), samples))
    return EvalResults(
        total_samples=max(planned, len(samples)),
        completed_samples=sum(1 for sample in samples if sample.error is None),
        logged_samples=len(samples),
        scores=scores,
        headline=HeadlineMetric(scorer=reward, score=reward, metric="mean"),
    )


def count_errors(samples: Sequence[EvalSample]) -> dict[str, int]:
    """Count the failed rollouts of a batch by cause."""
    causes = [cause for sample in samples if (cause := figures(sample).get("error_cause"))]
    return dict(sorted(Counter(causes).items()))


def eval_stats(samples: Sequence[EvalSample]) -> EvalStats:
    """Sum up time and usage of a batch."""
    usage: dict[str, ModelUsage] = {}
    roles: dict[str, ModelUsage] = {}
    for sample in samples:
        for total, own in ((usage, sample.model_usage), (roles, sample.role_usage)):
            for name, tokens in own.items():
                total[name] = total[name] + tokens if name in total else tokens
    started = [sample.started_at for sample in samples if sample.started_at]
    completed = [sample.completed_at for sample in samples if sample.completed_at]
    return EvalStats(
        started_at=min(started, default=""),
        completed_at=max(completed, default=""),
        model_usage=usage,
        role_usage=roles,
    )


def _answer(sample: EvalSample) -> str | None:
    """Return the answer that the viewer shows for a sample: a scorer's, or the last reply."""
    answers = [score.answer for score in (sample.scores or {}).values() if score.answer]
    return answers[0] if answers else sample.output.completion or None


def _in_a_line(seen: Mapping[str, Any]) -> str:
    tokens = seen.get("tokens") or {}
    parts = [
        f"stop: {seen['stop_reason']}" if seen.get("stop_reason") else "",
        f"error: {seen['error_cause']}" if seen.get("error_cause") else "",
        f"turns: {seen['turns']}" if seen.get("turns") is not None else "",
        f"sampled tokens: {tokens['sampled']}" if "sampled" in tokens else "",
        f"datums: {seen['datums']}" if seen.get("datums") is not None else "",
        "" if seen.get("status") == "graded" else f"{seen.get('status')}: not trained on",
    ]
    return " · ".join(part for part in parts if part)


def _of_scorer(scorer: str, samples: Sequence[EvalSample]) -> Iterator[EvalScore]:
    """Average one score; each entry of a dict or list score separately, as Inspect does."""
    values: dict[str, list[float]] = {}
    unscored: Counter[str] = Counter()
    for sample in samples:
        score = (sample.scores or {}).get(scorer)
        if score is None:
            continue
        for key, value in _entries(scorer, score):
            values.setdefault(key, [])
            number = read_number(value)
            if number is None:
                unscored[key] += 1
            else:
                values[key].append(number)
    for key, numbers in (values or {scorer: []}).items():  # of no number the mean is NaN
        yield EvalScore(
            name=key,
            scorer=scorer,
            scored_samples=len(numbers),
            unscored_samples=unscored[key],
            metrics=_metrics(_spread(numbers)),
        )


def _entries(scorer: str, score: Score) -> Iterator[tuple[str, Any]]:
    if isinstance(score.value, Mapping):
        yield from score.value.items()
    elif isinstance(score.value, Sequence) and not isinstance(score.value, str):
        yield from ((f"{scorer}[{i}]", value) for i, value in enumerate(score.value))
    else:
        yield scorer, score.value


def _of_rollouts(name: str, samples: Sequence[EvalSample]) -> EvalScore:
    seen = [figures(sample) for sample in samples]
    numbers: dict[str, float | int] = {}
    for label, values in {
        "turns": [one.get("turns") for one in seen],
        "datums": [one.get("datums") for one in seen],
        "sampled tokens": [(one.get("tokens") or {}).get("sampled") for one in seen],
        "trained tokens": [(one.get("tokens") or {}).get("trained") for one in seen],
    }.items():
        known = [float(value) for value in values if value is not None]
        if known:
            numbers[label] = statistics.fmean(known)
    for label, field in {"": "status", "stop: ": "stop_reason", "error: ": "error_cause"}.items():
        counts = Counter(str(one[field]) for one in seen if one.get(field))
        numbers.update({f"{label}{value}": count for value, count in sorted(counts.items())})
    return EvalScore(name=name, scorer=name, metrics=_metrics(numbers))


def _spread(numbers: Sequence[float]) -> dict[str, float | int]:
    if not numbers:
        return {"mean": math.nan}
    spread = statistics.stdev(numbers) if len(numbers) > 1 else 0.0  # as Inspect's metric `std`
    return {"mean": statistics.fmean(numbers), "std": spread}


def _metrics(numbers: Mapping[str, float | int]) -> dict[str, EvalMetric]:
    return {name: EvalMetric(name=name, value=value) for name, value in numbers.items()}
