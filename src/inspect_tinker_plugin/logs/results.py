"""The header of a batch's log: rewards, scores, tokens, stop reasons and errors."""

from __future__ import annotations

import math
import statistics
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from inspect_ai.log import (
    EvalMetric,
    EvalResults,
    EvalSample,
    EvalScore,
    EvalStats,
    HeadlineMetric,
)
from inspect_ai.model import ModelUsage
from inspect_ai.scorer import SampleScore, Score

from inspect_tinker_plugin.logs.rollout import figures, free_name
from inspect_tinker_plugin.rewards import UnscoredError
from inspect_tinker_plugin.rewards.scores import score_reward

REWARD = "reward"
ROLLOUTS = "rollouts"


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
    """Summarise a batch, its reward first.

    Args:
        samples: The rollouts, after :func:`add_rewards`.
        planned: Rollouts of the batch without failures and retries.
        reward: Name of the score that is the reward.
    """
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
            number = _number(key, value)
            if number is None:
                unscored[key] += 1
            else:
                values[key].append(number)
    for key, numbers in values.items():
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


def _number(name: str, value: Any) -> float | None:
    try:
        return score_reward(name, SampleScore(score=Score(value=value))).value
    except (UnscoredError, ValueError):
        return None


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
    return {"mean": statistics.fmean(numbers), "std": statistics.pstdev(numbers)}


def _metrics(numbers: Mapping[str, float | int]) -> dict[str, EvalMetric]:
    return {name: EvalMetric(name=name, value=value) for name, value in numbers.items()}
