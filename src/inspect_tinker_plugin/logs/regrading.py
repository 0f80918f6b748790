"""Gives the rollouts of one log new rewards: alone, or group by group.

A logged rollout becomes the episode that it was: what a reward, or a scorer, is given of it.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, NamedTuple

from inspect_ai.dataset import Sample
from inspect_ai.event import ScoreEvent
from inspect_ai.log import EvalError, EvalLog, EvalSample, resolve_sample_attachments
from inspect_ai.model import Model, ModelName, ModelUsage, get_model
from inspect_ai.scorer import SampleScore, Score, Scorer, Target
from inspect_ai.solver import TaskState
from inspect_ai.util import span

from inspect_tinker_plugin import inspect_internals as internals
from inspect_tinker_plugin.contracts.episodes import EpisodeResult
from inspect_tinker_plugin.contracts.errors import Cause, ConfigError, RewardError
from inspect_tinker_plugin.contracts.policy import POLICY_MODEL
from inspect_tinker_plugin.logs.header import EXPECTED_SCORES
from inspect_tinker_plugin.logs.rollout import (
    SAMPLED_KEY,
    RolloutStatus,
    figures,
    note,
    own_metadata,
    repay,
)
from inspect_tinker_plugin.processes.cancellation import contained
from inspect_tinker_plugin.rewards import (
    AggregatorError,
    GroupMember,
    ResolvedGroupReward,
    ResolvedReward,
    Reward,
    UnscoredError,
)
from inspect_tinker_plugin.rewards.scores import ScoreReward

_GROUPS_AT_ONCE = 8
_OF_SCORING = frozenset({Cause.SCORER, Cause.UNSCORED, Cause.REWARD})
"""Causes of failures after which the episode itself is complete."""

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


@dataclass(eq=False)
class _Member:
    """A rollout of a group on its way to a new reward."""

    record: EvalSample
    result: EpisodeResult | None = None
    own: Reward | None = None
    problem: Exception | None = None


async def _rescore_group(work: Regrading, records: Sequence[EvalSample]) -> None:
    members = [_Member(record) for record in records]
    chosen = [each for each in members if _is_complete(each.record)]
    if work.failed_only:
        broken = [each for each in chosen if _failed_in_scoring(each.record)]
        if not broken:
            return
        if work.group_reward is None:
            unpaid = [each for each in chosen if figures(each.record).get("reward") is None]
            chosen = [each for each in chosen if each in broken or each in unpaid]

    async def compute(member: _Member) -> None:
        try:
            member.result, member.own = await _own_reward(work, member.record)
        except Exception as error:  # its own failure, reported with its rollout
            member.problem = error

    async with asyncio.TaskGroup() as tasks:
        for member in chosen:
            tasks.create_task(compute(member))
    finals: Sequence[Reward | None] = [None] * len(members)
    if work.group_reward is not None and any(member.own for member in members):
        try:
            finals = await work.group_reward(
                [GroupMember(member.result, member.own) for member in members]
            )
        except (AggregatorError, UnscoredError) as error:
            for member in chosen:
                member.problem = member.problem or error
    for member, final in zip(members, finals, strict=True):
        if member.problem is not None:
            _note_failure(work, member.record, member.problem)
        elif member.own is not None:
            _note_reward(work, member.record, member.own, final)


def _is_complete(record: EvalSample) -> bool:
    """Whether the episode came to its end, so that it can be scored."""
    if not figures(record) or figures(record).get("status") == RolloutStatus.CUT:
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
    metrics = seen.get("metrics") or {}
    in_metrics = next((str(each) for each in Cause if f"error/{each}" in metrics), None)
    return seen.get("error_cause") or in_metrics


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
    of_reward = seen.get("reward_metrics") or ()
    metrics = seen.get("metrics") or {}
    return {name: value for name, value in metrics.items() if name not in of_reward}


def _note_reward(work: Regrading, record: EvalSample, own: Reward, final: Reward | None) -> None:
    """Put a new reward into a record, as the trainer would have been given it."""
    metrics = {**own.metrics, **({} if final is None else final.metrics)}
    value = own.value if final is None else final.value
    total: float | None = None
    if figures(record).get("status") == RolloutStatus.GRADED:
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


def expected_scores(log: EvalLog) -> dict[str, tuple[str, ...]]:
    """Return the names of the task's scorers with their keys; empty for logs that lack them."""
    found = (log.eval.metadata or {}).get(EXPECTED_SCORES) or {}
    return {name: tuple(keys) for name, keys in found.items()}


def episode_result(
    record: EvalSample, log: EvalLog, scores: Mapping[str, Score], *, metrics: Mapping[str, Any]
) -> EpisodeResult:
    """Make the result of a logged rollout again, without the error that ended its scoring.

    Its scores and metrics are given without those of the reward.
    """
    seen = figures(record)
    record = resolve_sample_attachments(record)
    expected = expected_scores(log)
    ordered = [*(n for n in expected if n in scores), *(n for n in scores if n not in expected)]
    metadata = own_metadata(record)
    sample = Sample(
        id=record.id,
        input=record.input,
        choices=record.choices,
        target=record.target,
        metadata=metadata,
        sandbox=record.sandbox,
        setup=record.setup,
    )
    return EpisodeResult(
        task=log.eval.task,
        sample=sample,
        epoch=record.epoch,
        state=_state(record, scores),
        scores={
            name: SampleScore(
                score=scores[name], sample_id=record.id, sample_metadata=metadata, scorer=name
            )
            for name in ordered
        },
        limit=record.limit,
        error=None,
        turns=int(seen.get("turns") or 0),
        usage=record.model_usage.get(POLICY_MODEL) or ModelUsage(),
        truncated=record.output.stop_reason == "max_tokens",
        expected_scores=expected,
        metrics=dict(metrics),
        build_log=lambda: record,
    )


def unread_scores(result: EpisodeResult) -> list[str]:
    """Return the task's scorers whose score is missing, or is no number."""
    missing = []
    for name in result.expected_scores:
        try:
            ScoreReward(name).read(result)
        except UnscoredError:
            missing.append(name)
    return missing


@dataclass(frozen=True)
class Scorers:
    """The scorers of a log, made again as ``inspect score`` makes them."""

    by_name: Mapping[str, Scorer]
    roles: Mapping[str, Model | list[Model]]
    model: Model

    @classmethod
    def of(cls, log: EvalLog, roles: Mapping[str, Any]) -> Scorers:
        """Make the scorers and judges that a log's header names.

        Args:
            log: The log.
            roles: Judges by role, which take precedence over the log's.

        Raises:
            ConfigError: One cannot be made.
        """
        try:
            made = internals.resolve_scorers(log) if log.eval.scorers else []
            judges = internals.model_roles_config_to_model_roles(log.eval.model_roles) or {}
            given = {role: get_model(model, role=role) for role, model in roles.items()}
            model = get_model(log.eval.model)
        except Exception as error:  # each package, key or provider raises its own kind
            reason = internals.in_one_line(error)
            raise ConfigError(f"the scorers of {log.location} cannot be made: {reason}") from error
        named: dict[str, Scorer] = {}
        for scorer in made:
            named[internals.unique_scorer_name(scorer, list(named))] = scorer
        return cls(named, {**judges, **given}, model)

    async def run(
        self, record: EvalSample, scores: Mapping[str, Score], names: Sequence[str]
    ) -> dict[str, Score]:
        """Run scorers on a logged rollout; the record gets the events of those that end.

        It changes the context, so call it in a separate task. There is no sandbox.

        Args:
            record: The rollout.
            scores: Its scores, without the reward.
            names: The scorers to run.

        Returns:
            All scores; a scorer that returned ``None`` has none.

        Raises:
            KeyError: The log's header does not name the scorer.
            Exception: Whatever a scorer raises.
        """
        whole = resolve_sample_attachments(record)
        kept = {name: score for name, score in scores.items() if name not in names}
        state = _state(whole, kept)
        transcript = internals.enter_scoring_context(
            self.model, dict(self.roles), state, whole.events
        )
        before = len(whole.events)
        async with span("scorers"):
            for name in names:
                scorer = self.by_name[name]
                async with span(name, type="scorer"):
                    score = await contained("the scorer", scorer(state, Target(whole.target)))
                    if score is None:
                        continue
                    kept[name] = score
                    internals.record_event(
                        ScoreEvent(
                            score=score,
                            target=whole.target,
                            scorer=name,
                            scorer_args=internals.scorer_args(scorer),
                            model_usage=whole.model_usage or None,
                            role_usage=whole.role_usage or None,
                        )
                    )
        record.events = [*record.events, *internals.recorded_events(transcript)[before:]]
        return kept


def _state(record: EvalSample, scores: Mapping[str, Score]) -> TaskState:
    """Return the final state of a rollout whose attachments are resolved."""
    return TaskState(
        model=ModelName(POLICY_MODEL),
        sample_id=record.id,
        epoch=record.epoch,
        input=record.input,
        target=Target(record.target),
        choices=record.choices,
        messages=record.messages,
        output=record.output,
        completed=True,
        metadata=own_metadata(record),
        store={name: value for name, value in record.store.items() if name != SAMPLED_KEY},
        scores=dict(scores),
    )
