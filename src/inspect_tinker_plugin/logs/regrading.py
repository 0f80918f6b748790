"""Gives the rollouts of one log new rewards: alone, or group by group."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, NamedTuple

from inspect_ai.log import EvalError, EvalLog, EvalSample
from inspect_ai.scorer import Score

from inspect_tinker_plugin.contracts.episodes import EpisodeResult
from inspect_tinker_plugin.contracts.errors import Cause, RewardError
from inspect_tinker_plugin.logs.restored import (
    Scorers,
    episode_result,
    expected_scores,
    unread_scores,
)
from inspect_tinker_plugin.logs.rollout import RolloutStatus, figures, note
from inspect_tinker_plugin.logs.sampled import repay
from inspect_tinker_plugin.rewards import (
    AggregatorError,
    GroupMember,
    ResolvedGroupReward,
    ResolvedReward,
    Reward,
    UnscoredError,
)

_GROUPS_AT_ONCE = 8
_OF_SCORING = frozenset({Cause.SCORER, Cause.UNSCORED, Cause.REWARD})
"""Causes of failures after which the episode itself is complete."""

_OF_REWARD = ("score/", "reward/", "group/", "error/")
"""Beginnings of the reward's metrics, for logs that do not name them."""

_FLAT = "parse_error"
"""Stop reason of rollouts whose reward the cookbook's policy for malformed calls has set."""


class Failed(NamedTuple):
    """A rollout whose reward could not be computed."""

    log: str
    id: int | str
    epoch: int
    reason: str


@dataclass
class Regrading:
    """New rewards for the rollouts of one log, which are changed in place.

    Attributes:
        log: The log, with its samples.
        reward: What rewards single rollouts.
        group_reward: What compares them with their group, if anything.
        failed_only: Compute only rewards that could not be computed before.
        scorers: Makes the scorers, when one is needed.
        done: Called with the number of rollouts that are done.
        computed: Rewards that were computed.
        scored: Rollouts whose scorers were run again.
        failures: Rollouts whose reward could not be computed.
    """

    log: EvalLog
    reward: ResolvedReward
    group_reward: ResolvedGroupReward | None
    failed_only: bool
    scorers: Callable[[], Scorers]
    done: Callable[[int], None]
    computed: int = 0
    scored: int = 0
    failures: list[Failed] = field(default_factory=list)


async def regrade(work: Regrading) -> None:
    """Compute the rewards of a log; what fails is noted in its rollouts, and in the work."""
    places = asyncio.Semaphore(_GROUPS_AT_ONCE)

    async def one(members: Sequence[EvalSample]) -> None:
        async with places:
            await _rescore_group(work, members)
        work.done(len(members))

    async with asyncio.TaskGroup() as tasks:
        for members in _groups(work.log):
            tasks.create_task(one(members))


def _groups(log: EvalLog) -> Iterator[list[EvalSample]]:
    """Yield the rollouts that were compared with each other.

    Those of a group that went back to the trainer are one; of the others, each attempt is one.
    """
    size = max(1, log.eval.config.epochs or 1)
    groups: dict[tuple[Any, ...], list[EvalSample]] = {}
    for record in log.samples or []:
        seen = figures(record)
        graded = seen.get("status") == RolloutStatus.GRADED
        attempt = "graded" if graded else (record.epoch - 1) // size
        groups.setdefault((seen.get("group"), attempt), []).append(record)
    for members in groups.values():
        yield sorted(members, key=lambda record: record.epoch)


async def _rescore_group(work: Regrading, members: Sequence[EvalSample]) -> None:
    complete = [record for record in members if _is_complete(record)]
    broken = [record for record in complete if _failed_in_scoring(record)]
    chosen = complete
    if work.failed_only:
        if not broken:
            return
        if work.group_reward is None:
            chosen = [each for each in complete if each in broken or _is_unpaid(each)]
    results: dict[int, EpisodeResult | None] = dict.fromkeys(map(id, members))
    own: dict[int, Reward | None] = dict.fromkeys(map(id, members))
    problems: dict[int, Exception] = {}

    async def compute(record: EvalSample) -> None:
        try:
            results[id(record)], own[id(record)] = await _own_reward(work, record)
        except Exception as error:  # its own failure, reported with its rollout
            problems[id(record)] = error

    async with asyncio.TaskGroup() as tasks:
        for record in chosen:
            tasks.create_task(compute(record))
    finals: Sequence[Reward | None] = [None] * len(members)
    if work.group_reward is not None and any(own.values()):
        try:
            finals = await work.group_reward(
                [GroupMember(results[id(each)], own[id(each)]) for each in members]
            )
        except (AggregatorError, UnscoredError) as error:
            problems |= {id(each): error for each in chosen if id(each) not in problems}
    for record, final in zip(members, finals, strict=True):
        reward = own[id(record)]
        if id(record) in problems:
            _note_failure(work, record, problems[id(record)])
        elif reward is not None:
            _note_reward(work, record, reward, final)


def _is_complete(record: EvalSample) -> bool:
    """Whether the episode came to its end, so that it can be scored."""
    if not figures(record) or _status(record) is RolloutStatus.CUT:
        return False
    if figures(record).get("stop_reason") == _FLAT:
        return False
    return (record.error is None and _cause(record) is None) or _failed_in_scoring(record)


def _failed_in_scoring(record: EvalSample) -> bool:
    cause = _cause(record)
    if cause == Cause.JUDGE:  # in the solver, a model of another role is a part of the episode
        return any(
            event.event == "span_begin" and event.name == "scorers" for event in record.events
        )
    return cause in _OF_SCORING


def _cause(record: EvalSample) -> str | None:
    """Return the cause of a failure; that of a group's reward is only in the metrics."""
    seen = figures(record)
    if (cause := seen.get("error_cause")) is not None:
        return str(cause)
    metrics = seen.get("metrics") or {}
    return next((each for each in Cause if f"error/{each}" in metrics), None)


def _is_unpaid(record: EvalSample) -> bool:
    return figures(record).get("reward") is None


def _status(record: EvalSample) -> RolloutStatus | None:
    try:
        return RolloutStatus(str(figures(record).get("status")))
    except ValueError:
        return None


async def _own_reward(work: Regrading, record: EvalSample) -> tuple[EpisodeResult, Reward]:
    metrics = _other_metrics(record)
    scores = own_scores(work.log, record)
    result = episode_result(record, work.log, scores, metrics=metrics)
    try:
        return result, await work.reward(result)
    except UnscoredError:
        missing = unread_scores(result)
        if not missing:
            raise
    # What a score is missing for is not logged: the scorers concerned are asked again.
    work.scored += 1
    try:
        scores = await work.scorers().run(record, scores, missing)
    except KeyError as error:
        raise RewardError(f"the log does not say how to make the scorer {error}") from error
    except Exception as error:
        raise RewardError(
            f"the scorers {', '.join(missing)} were run again and failed: {error!r:.300}"
        ) from error
    expected = [name for name in expected_scores(work.log) if name in scores]
    record.scores = {
        **{name: scores[name] for name in expected},
        **{name: score for name, score in scores.items() if name not in expected},
    }
    result = episode_result(record, work.log, record.scores, metrics=metrics)
    return result, await work.reward(result)


def own_scores(log: EvalLog, record: EvalSample) -> dict[str, Score]:
    """Return a rollout's scores without the reward, which is the headline of its log."""
    headline = log.eval.headline_metric
    reward = None if headline is None else headline.scorer
    return {name: score for name, score in (record.scores or {}).items() if name != reward}


def _other_metrics(record: EvalSample) -> dict[str, Any]:
    seen = figures(record)
    named = seen.get("reward_metrics")
    return {
        name: value
        for name, value in (seen.get("metrics") or {}).items()
        if (not name.startswith(_OF_REWARD) if named is None else name not in named)
    }


def _note_reward(work: Regrading, record: EvalSample, own: Reward, final: Reward | None) -> None:
    """Put a new reward into a record, as the trainer would have been given it."""
    metrics = {**own.metrics, **({} if final is None else final.metrics)}
    value = own.value if final is None else final.value
    total: float | None = None
    if _status(record) is RolloutStatus.GRADED:
        total = repay(
            record,
            last=value if work.group_reward is None else 0.0,
            group=0.0 if work.group_reward is None else value,
        )
    else:
        note(record, "status", str(RolloutStatus.DROPPED))
    if _failed_in_scoring(record):
        record.error = None
        note(record, "error_cause", None)
    note(record, "metrics", {**_other_metrics(record), **metrics})
    note(record, "reward_metrics", sorted(metrics))
    note(record, "reward", value if total is None else total)
    work.computed += 1


def _note_failure(work: Regrading, record: EvalSample, problem: Exception) -> None:
    """Put a failure into a record; it has no reward, which is not zero."""
    cause = Cause.UNSCORED if isinstance(problem, UnscoredError) else Cause.REWARD
    reason = " ".join(str(problem).split())
    note(record, "metrics", _other_metrics(record))
    note(record, "reward_metrics", [])
    note(record, "reward", None)
    note(record, "error_cause", str(cause))
    note(record, "status", str(RolloutStatus.FAILED))
    text = f"[{cause}] its reward could not be computed again: {reason}"
    record.error = EvalError(message=text, traceback=text, traceback_ansi=text)
    work.failures.append(Failed(Path(work.log.location).name, record.id, record.epoch, reason))
