"""Gives the rollouts of one log new rewards: alone, or group by group.

A logged rollout becomes the episode that it was, and its reward is computed of the logged scores.
Only where these are not enough (a judge had failed, or had given no number) does Inspect run the
scorers concerned again, without a sandbox.
"""

from __future__ import annotations

import asyncio
import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property, wraps
from pathlib import Path
from typing import Any, NamedTuple

from inspect_ai import score_async
from inspect_ai.dataset import Sample
from inspect_ai.log import EvalError, EvalLog, EvalSample, resolve_sample_attachments
from inspect_ai.model import Model, ModelName, ModelUsage, get_model
from inspect_ai.scorer import SampleScore, Score, Scorer, Target
from inspect_ai.solver import Choices, TaskState

from inspect_tinker_plugin import inspect_internals as internals
from inspect_tinker_plugin.contracts.episodes import FAILED, EpisodeResult
from inspect_tinker_plugin.contracts.errors import Cause, ConfigError, ErrorPolicy, RewardError
from inspect_tinker_plugin.contracts.policy import POLICY_MODEL
from inspect_tinker_plugin.logs.header import EXPECTED_SCORES
from inspect_tinker_plugin.logs.rollout import (
    SAMPLED_KEY,
    RolloutStatus,
    figures,
    logged_choices,
    note,
    own_metadata,
    own_scores,
    repay,
)
from inspect_tinker_plugin.processes.loops import contain
from inspect_tinker_plugin.rewards import (
    AggregatorError,
    GroupMember,
    ResolvedGroupReward,
    ResolvedReward,
    Reward,
    UnscoredError,
)
from inspect_tinker_plugin.rewards.builtin import least_reward
from inspect_tinker_plugin.rewards.scores import ScoreReward

_GROUPS_AT_ONCE = 8
_OF_SCORERS = frozenset({Cause.SCORER, Cause.JUDGE})
"""Causes that fail an episode in its scoring, whether or not the reward reads the score."""

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


@dataclass(eq=False)
class _Member:
    """A rollout of a group on its way to a new reward."""

    record: EvalSample
    result: EpisodeResult | None = None
    own: Reward | None = None
    problem: Exception | None = None


@dataclass
class LogRewards:
    """New rewards for the rollouts of one log, which are changed in place.

    Attributes:
        log: The log, with its samples.
        reward: What rewards single rollouts.
        group_reward: What compares them with their group, if anything.
        failed_only: Compute only rewards that could not be computed before.
        roles: Judges by role, for scorers that are run again; they take precedence over the log's.
        computed: Rewards that were computed.
        scored: Rollouts whose scorers were run again.
        failures: Rollouts whose reward could not be computed.
    """

    log: EvalLog
    reward: ResolvedReward
    group_reward: ResolvedGroupReward | None
    failed_only: bool
    roles: Mapping[str, Model | list[Model]]
    computed: int = 0
    scored: int = 0
    failures: list[Failed] = field(default_factory=list)

    async def compute(self, advance: Callable[[int], None]) -> None:
        """Compute the rewards; what fails is noted in its rollout."""
        places = asyncio.Semaphore(_GROUPS_AT_ONCE)

        async def one(members: Sequence[EvalSample]) -> None:
            async with places:
                await self._reward_group(members)
            advance(len(members))

        async with asyncio.TaskGroup() as tasks:
            for members in _groups(self.log):
                tasks.create_task(one(members))

    async def _reward_group(self, records: Sequence[EvalSample]) -> None:
        members = [_Member(record) for record in records]
        chosen = [each for each in members if _is_complete(each.record)]
        if self.failed_only:
            broken = [each for each in chosen if _failed_in_scoring(each.record)]
            if not broken:
                return
            if self.group_reward is None:
                unpaid = [each for each in chosen if figures(each.record).get("reward") is None]
                chosen = [each for each in chosen if each in broken or each in unpaid]

        async def compute(member: _Member) -> None:
            try:
                member.result, member.own = await self._reward_alone(member.record)
            except Exception as error:  # its own failure, reported with its rollout
                member.problem = error

        async with asyncio.TaskGroup() as tasks:
            for member in chosen:
                tasks.create_task(compute(member))
        finals: Sequence[Reward | None] = [None] * len(members)
        if self.group_reward is not None and any(member.own for member in members):
            try:
                finals = await self.group_reward(
                    [GroupMember(member.result, member.own) for member in members]
                )
            except (AggregatorError, UnscoredError) as error:
                failed = AggregatorError(str(error), aggregator=self.group_reward.name)
                for member in chosen:
                    member.problem = member.problem or failed
        for member, final in zip(members, finals, strict=True):
            if member.problem is not None:
                self._note_failure(member.record, member.problem)
            elif member.own is not None:
                self._note_reward(member.record, member.own, final)
                self.computed += 1
        self._lower_prices(records)

    def _lower_prices(self, records: Sequence[EvalSample]) -> None:
        """Let no rollout whose policy made its sandbox fail keep more than one that is wrong has.

        As in a training; but a price never rises, since the log does not say how it was lowered.
        """
        rewards = [figures(each).get("reward") for each in records if _is_complete(each)]
        least = min((value for value in rewards if value is not None), default=math.inf)
        if self.group_reward is not None:
            least = min(least, self.group_reward.least)
        for record in records:
            price = figures(record).get("reward")
            if price is None or _cause(record) not in self._prices.built_in:
                continue
            scores, metrics = own_scores(self.log, record), _other_metrics(record)
            result = _episode_result(record, self.log, scores, metrics)
            lower = min(price, least, least_reward(self.reward.aggregator, result))
            if lower < price:
                paid = repay(record, last=None, group=0.0)
                repay(record, last=None, group=lower - (paid or 0.0))
                note(record, "reward", lower)

    async def _reward_alone(self, record: EvalSample) -> tuple[EpisodeResult, Reward]:
        metrics = _other_metrics(record)
        scores = own_scores(self.log, record)
        result = _episode_result(record, self.log, scores, metrics)
        missing = _unread_scores(result)
        if _cause(record) not in _OF_SCORERS:
            try:
                return result, await self.reward(result)
            except UnscoredError:
                if not missing:
                    raise
        elif not missing:
            raise RewardError("its scorers failed beside their scores")
        # What a score is missing for is not logged: the scorers concerned are asked again.
        self.scored += 1
        scores = await self._score_again(record, scores, missing)
        expected = [name for name in expected_scores(self.log) if name in scores]
        record.scores = {name: scores[name] for name in dict.fromkeys([*expected, *scores])}
        result = _episode_result(record, self.log, record.scores, metrics)
        return result, await self.reward(result)

    async def _score_again(
        self, record: EvalSample, scores: Mapping[str, Score], missing: Sequence[str]
    ) -> dict[str, Score]:
        """Run scorers as `inspect score` does, and return all scores with theirs.

        The record gets the events of those that end. A scorer that returned ``None`` has no score.
        """
        scorers = self._scorers
        if unknown := [name for name in missing if name not in scorers]:
            raise RewardError(f"the log does not say how to make the scorer {unknown[0]!r}")
        kept = {name: score for name, score in scores.items() if name not in missing}
        sample = record.model_copy(
            update={
                "scores": kept,
                "metadata": own_metadata(record),
                "store": _own_store(record),
            }
        )
        log = self.log.model_copy(update={"samples": [sample], "results": None, "reductions": None})
        log.eval = log.eval.model_copy(update={"headline_metric": None})  # the reward is not scored
        given: dict[str, Score] = {}
        asked = score_async(
            log,
            [_with_choices(record, name, scorers[name], given) for name in missing],
            model=self._model,
            model_roles=dict(self.roles),
            action="append",
            display="none",
            copy=False,
        )
        try:
            await contain("the scorer", asked)
        except Exception as error:
            error = internals.inner_exception(error)
            raise RewardError(
                f"the scorers {', '.join(missing)} were run again and failed: {error!r:.300}"
            ) from error
        record.events = sample.events
        return {**kept, **given}

    @cached_property
    def _scorers(self) -> dict[str, Scorer]:
        """The scorers that the log's header names."""
        named: dict[str, Scorer] = {}
        try:
            log = internals.with_registered_scorers(self.log)
            names = [each.name for each in log.eval.scorers or []]
            if not all("/" in name for name in names):
                self._run_task_file()
            for scorer in internals.resolve_scorers(log) if names else []:
                named[internals.unique_scorer_name(scorer, list(named))] = scorer
        except Exception as error:  # each package raises its own kind
            raise self._not_made_error(error) from error
        return named

    def _run_task_file(self) -> None:
        """Run the log's task file as an eval does, so that scorers of this file are registered.

        Another log's file may have scorers of the same names, and Inspect, which runs a file only
        for names that are not there, runs it without its folder.
        """
        file = Path(self.log.eval.task_file or "")
        if file.is_file():
            internals.load_file_tasks(file)

    @cached_property
    def _model(self) -> Model:
        """The log's model, which cannot be asked."""
        try:
            with internals.bind_roles({}):  # a role that is bound comes before the name
                return get_model(self.log.eval.model)
        except Exception as error:  # each key or provider raises its own kind
            raise self._not_made_error(error) from error

    def _not_made_error(self, error: Exception) -> ConfigError:
        reason = internals.in_one_line(error)
        return ConfigError(f"the scorers of {self.log.location} cannot be made: {reason}")

    def _note_reward(self, record: EvalSample, own: Reward, final: Reward | None) -> None:
        """Put a new reward into a record, as the trainer would have been given it."""
        metrics = {**own.metrics, **({} if final is None else final.metrics)}
        value = own.value if final is None else final.value
        total: float | None = None
        if figures(record).get("status") == RolloutStatus.GRADED:
            of_group = self.group_reward is not None
            last, group = (0.0, value) if of_group else (value, 0.0)
            total = repay(record, last=last, group=group)
        else:
            note(record, "status", str(RolloutStatus.DROPPED))
        kept = _other_metrics(record)
        if _failed_in_scoring(record):
            record.error = None
            note(record, "error_cause", None)
            kept[FAILED] = 0.0
        note(record, "metrics", {**kept, **metrics})
        note(record, "reward_metrics", sorted(metrics))
        note(record, "reward", value if total is None else total)

    def _note_failure(self, record: EvalSample, problem: Exception) -> None:
        """Put a failure into a record, with its price, or with no reward, which is not zero.

        Where its scorers failed before, and do again, that is still its error.
        """
        reason = " ".join(str(problem).split())
        name = Path(self.log.location).name
        self.failures.append(Failed(name, record.id, record.epoch, reason))
        cause = Cause.REWARD if isinstance(problem, AggregatorError) else Cause.UNSCORED
        text = f"[{cause}] its reward could not be computed again: {reason}"
        error = EvalError(message=text, traceback=text, traceback_ansi=text)
        if (before := _cause(record)) in _OF_SCORERS:
            cause, error = Cause(before), record.error or error
        penalty = self._prices.penalty(cause)
        if penalty is not None:
            self._note_reward(record, Reward(penalty, {f"error/{cause}": 1.0}), None)
        else:
            note(record, "metrics", _other_metrics(record))
            note(record, "reward_metrics", [])
            note(record, "reward", None)
        if penalty is None or figures(record)["status"] != RolloutStatus.GRADED:
            note(record, "status", str(RolloutStatus.FAILED))
        note(record, "metrics", {**figures(record)["metrics"], FAILED: 1.0})
        note(record, "error_cause", str(cause))
        record.error = error

    @cached_property
    def _prices(self) -> ErrorPolicy:
        """What the training paid for failures."""
        return ErrorPolicy.of((self.log.eval.metadata or {}).get("on_error", "raise"))


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


def _is_complete(record: EvalSample) -> bool:
    """Whether the episode came to its end, so that it can be scored."""
    seen = figures(record)
    if not seen or seen.get("status") == RolloutStatus.CUT or seen.get("stop_reason") == _FLAT:
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


def _with_choices(record: EvalSample, name: str, scorer: Scorer, given: dict[str, Score]) -> Scorer:
    """Let a scorer see choices as the solver left them; Inspect's record has only their texts.

    Its score goes into ``given``, too: Inspect would give it the name of an earlier scorer of the
    same name that has returned ``None``.
    """

    @wraps(scorer)  # with what Inspect has registered of it
    async def score(state: TaskState, target: Target) -> Score | None:
        state.choices = Choices(logged_choices(record))
        found = await scorer(state, target)
        if found is not None:
            given[name] = found
        return found

    return score


def _own_store(record: EvalSample) -> dict[str, Any]:
    return {name: value for name, value in record.store.items() if name != SAMPLED_KEY}


def _other_metrics(record: EvalSample) -> dict[str, Any]:
    seen = figures(record)
    of_reward = seen.get("reward_metrics") or ()
    metrics = seen.get("metrics") or {}
    return {name: value for name, value in metrics.items() if name not in of_reward}


def expected_scores(log: EvalLog) -> dict[str, tuple[str, ...]]:
    """Return the names of the task's scorers with their keys; empty for logs that lack them."""
    found = (log.eval.metadata or {}).get(EXPECTED_SCORES) or {}
    return {name: tuple(keys) for name, keys in found.items()}


def _episode_result(
    record: EvalSample, log: EvalLog, scores: Mapping[str, Score], metrics: Mapping[str, Any]
) -> EpisodeResult:
    """Make the result of a logged rollout again, without the error that ended its scoring.

    Its scores and metrics are given without those of the reward.
    """
    turns = int(figures(record).get("turns") or 0)
    record = resolve_sample_attachments(record)
    expected = expected_scores(log)
    ordered = dict.fromkeys([*(name for name in expected if name in scores), *scores])
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
    state = TaskState(
        model=ModelName(POLICY_MODEL),
        sample_id=record.id,
        epoch=record.epoch,
        input=record.input,
        target=Target(record.target),
        messages=record.messages,
        output=record.output,
        completed=True,
        metadata=metadata,
        store=_own_store(record),
        scores=dict(scores),
    )
    state.choices = Choices(logged_choices(record))
    return EpisodeResult(
        task=log.eval.task,
        sample=sample,
        epoch=record.epoch,
        state=state,
        scores={
            name: SampleScore(
                score=scores[name], sample_id=record.id, sample_metadata=metadata, scorer=name
            )
            for name in ordered
        },
        limit=record.limit,
        error=None,
        turns=turns,
        usage=record.model_usage.get(POLICY_MODEL) or ModelUsage(),
        truncated=not record.output.empty and record.output.stop_reason == "max_tokens",
        expected_scores=expected,
        metrics=dict(metrics),
        build_log=lambda: record,
    )


def _unread_scores(result: EpisodeResult) -> list[str]:
    """Return the task's scorers whose score is missing, or is no number."""
    missing = []
    for name in result.expected_scores:
        try:
            ScoreReward(name).read(result)
        except UnscoredError:
            missing.append(name)
    return missing
