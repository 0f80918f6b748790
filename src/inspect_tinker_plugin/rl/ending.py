"""How an episode ends for the trainer: by the rules of its turns, with its rollout, and in what.

The rules are the cookbook's budgets and policies for single turns. An episode whose rollout was
cancelled or failed is closed without anybody waiting for it. A finished episode becomes what the
trainer receives: a reward, a penalty or an error.
"""

from __future__ import annotations

import asyncio
import weakref
from collections.abc import Callable
from dataclasses import dataclass, field
from functools import partial
from logging import getLogger
from typing import Any, NamedTuple

from inspect_ai.model import ModelOutput
from tinker_cookbook.rl.rollout_limits import ParseErrorPolicy
from tinker_cookbook.rl.types import (
    PARSE_ERROR_MASKED_METRIC_KEY,
    STOP_METRIC_PREFIX,
    Logs,
    Metrics,
    StopReason,
    Trajectory,
)

from inspect_tinker_plugin.contracts.episodes import SOLVER_TIMEOUT, EpisodeResult
from inspect_tinker_plugin.contracts.errors import Cause, EpisodeError, ErrorPolicy
from inspect_tinker_plugin.contracts.wording import counted
from inspect_tinker_plugin.episode.runner import Episode
from inspect_tinker_plugin.rewards import (
    AggregatorError,
    ResolvedReward,
    Reward,
    UnscoredError,
)
from inspect_tinker_plugin.rewards.builtin import least_reward


class TurnRules:
    """Counts tool calls and malformed calls of one episode, and decides when it must end.

    Attributes:
        stop: Why the episode must end, once a rule says so.
    """

    def __init__(self) -> None:
        self.stop: StopReason | None = None
        self._calls_left: int | None = None
        self._policy: ParseErrorPolicy | None = None
        self._malformed_in_a_row = 0

    def allow_tool_calls(self, budget: int) -> None:
        """Set the budget of tool calls."""
        self._calls_left = budget

    def apply(self, policy: ParseErrorPolicy) -> None:
        """Set the policy for malformed tool calls."""
        self._policy = policy

    def count(self, reply: ModelOutput) -> Metrics:
        """Count a reply's tool calls; return the metrics of its turn."""
        calls = reply.message.tool_calls or []
        metrics: Metrics = {"tools/calls": len(calls)} if calls else {}
        if not any(call.parse_error for call in calls):
            self._malformed_in_a_row = 0
            return metrics
        metrics["parse_error"] = 1.0
        self._malformed_in_a_row += 1
        if self._policy is not None and self._policy.mask_error_turns:
            metrics[PARSE_ERROR_MASKED_METRIC_KEY] = 1.0
        return metrics

    def refuse(self, reply: ModelOutput) -> str | None:
        """Return why a counted reply must not reach the solver, ``None`` when it may.

        A reply with more calls than are left is cut to the budget: those calls are carried
        out, and the episode ends before the next turn.
        """
        if self._policy is not None and self._malformed_in_a_row > self._policy.max_consecutive:
            self.stop = StopReason.PARSE_ERROR
            return "too many malformed tool calls in a row"
        calls = reply.message.tool_calls
        if self._calls_left is None or not calls:
            return None
        if self._calls_left == 0:
            self.stop = StopReason.MAX_TOOL_CALLS
            return "the budget of tool calls is used up"
        if len(calls) > self._calls_left:
            reply.message.tool_calls = calls[: self._calls_left]
            self.stop = StopReason.MAX_TOOL_CALLS
        self._calls_left -= min(len(calls), self._calls_left)
        return None

    def turn_reward(self, metrics: Metrics) -> float:
        """Return the reward of a turn that did not end the episode."""
        if self._policy is None or "parse_error" not in metrics:
            return 0.0
        return -self._policy.penalty_per_error

    def flat_reward(self) -> float | None:
        """Return the reward that replaces the episode's own: after too many malformed calls."""
        if self._policy is not None and self.stop is StopReason.PARSE_ERROR:
            return self._policy.terminal_reward
        return None


ROLLOUT_ENDED = "the rollout ended before the episode"
"""Why an episode was ended that the trainer stopped stepping."""


def end_with_rollout(episode: Episode) -> None:
    """End an episode with the current task, its rollout, however that ends.

    An episode whose rollout is cancelled or fails is closed; one that the cookbook's runner stopped
    (its budgets, its time-out) is ended as by a limit, and scored. The group keeps both envs until
    all of its rollouts are done. They would keep their sandboxes as well, and those rollouts could
    wait for a place for ever. A task that runs one rollout after another keeps nothing of those
    that have ended.
    """
    rollout = asyncio.current_task()
    if rollout is not None:
        tie = partial(_end_episode, weakref.ref(episode))
        rollout.add_done_callback(tie)
        episode.at_end(partial(_untie, weakref.ref(rollout), tie))


def _end_episode(tied: weakref.ref[Episode], rollout: asyncio.Task[Any]) -> None:
    episode = tied()
    if episode is None:
        return
    if rollout.cancelled() or rollout.exception() is not None:
        episode.shut()
    # A task that made one call of the env, as in `asyncio.wait_for()`, is no rollout.
    elif isinstance(rollout.result(), Trajectory):
        episode.halt(ROLLOUT_ENDED)


def _untie(tied: weakref.ref[asyncio.Task[Any]], tie: Callable[[Any], None]) -> None:
    rollout = tied()
    if rollout is not None:
        rollout.remove_done_callback(tie)


logger = getLogger(__name__)

_STOP_BY_LIMIT: dict[str, str] = {
    "turn": StopReason.MAX_TURNS,
    "message": StopReason.MAX_TURNS,
    "token": StopReason.MAX_TOKENS,
    "context": StopReason.CONTEXT_OVERFLOW,
    "time": StopReason.ROLLOUT_TIMEOUT,
    "working": StopReason.ROLLOUT_TIMEOUT,
    "operator": StopReason.TOOL_STOPPED,
}
"""Inspect's limits in the cookbook's words; the exact one is the metric ``limit/<type>``."""


class Received(NamedTuple):
    """What the trainer received for a rollout."""

    trajectory: Trajectory
    of_group: float
    """The group's part of the reward, beside that of the steps."""
    metrics: Metrics
    """Those that came with the group's part."""


@dataclass(frozen=True)
class Ending:
    """A finished episode with its reward.

    A failed one has an error; it also has a reward when ``on_error`` states a penalty.
    """

    result: EpisodeResult
    reward: Reward | None
    error: EpisodeError | None
    has_built_in_price: bool = False
    """Whether its reward is the built-in price of its cause, which the group may lower."""

    def metrics(self, stop: str | None = None) -> Metrics:
        """Return the metrics of the final transition.

        Args:
            stop: The stop reason, when the env knows it better than the result does.
        """
        result = self.result
        metrics: Metrics = {
            f"{STOP_METRIC_PREFIX}{stop or stop_reason(result)}": 1.0,
            "turns": result.turns,
            **result.metrics,
        }
        if result.limit is not None:
            metrics[f"limit/{result.limit.type}"] = 1.0
        return metrics | (self.reward.metrics if self.reward is not None else {})

    def logs(self) -> Logs:
        """Return what the cookbook's rollout log shows for the final transition."""
        result = self.result
        logs: Logs = {"task": result.task, "sample": str(result.sample.id), "epoch": result.epoch}
        for name, score in result.scores.items():
            logs[f"score/{name}"] = str(score.score.value)
            if score.score.answer is not None:
                logs[f"answer/{name}"] = score.score.answer
        if result.limit is not None:
            logs["limit"] = f"{result.limit.type}: {result.limit.reason or ''}"
        if self.error is not None:
            logs["error"] = str(self.error)
        return logs


MOST_FAILURES = 8
"""Failures of a sample in a row after which its group runs no further episode of it."""

ALWAYS = 16
"""First episodes of a dataset that may all fail in the same operation before that is an error."""


class FailureCounts:
    """Notices failures that come again and again, among the episodes of a dataset in a process."""

    def __init__(self) -> None:
        self._in_a_row: dict[int | str | None, _Repeated] = {}
        self._first_calls: list[str] | None = []
        """Operations that the first episodes have failed in, as long as all of them have."""
        self._has_warned = False
        self.shortfall = 0.0
        """By how much, at most, an episode that did not fail had less than its least reward, as
        with scores below 0, or by its group; at most 0."""

    def note_reward(self, result: EpisodeResult, *, failed: bool = False) -> None:
        """Note an episode that has a reward; or a price, if it has failed."""
        self._in_a_row.pop(result.sample.id, None)
        if not failed:
            self._first_calls = None

    def note_raised(self, error: EpisodeError) -> EpisodeError:
        """Note an episode whose failure is raised; it may be run again."""
        before = self._in_a_row.get(error.sample_id)
        times = 1 if before is None else before.times + 1
        self._in_a_row[error.sample_id] = _Repeated(times, error.cause, error.task, str(error))
        return error

    def note_priced(self, error: EpisodeError) -> EpisodeError | None:
        """Note a failure inside a sandbox; return an error if all episodes so far failed there."""
        calls = self._first_calls
        if calls is None:
            return None
        calls.append(error.call)
        if len(set(calls)) > 1:
            self._first_calls = None
        elif len(calls) > ALWAYS:
            always = EpisodeError(
                f"all of {counted(len(calls), 'episode')} so far have failed in "
                f"{error.call or 'a sandbox'}, so the task may be at fault (a mistyped path, a "
                "program that is not there). If it "
                f'is not, state a price: on_error={{"{error.cause}": 0.0}}. The last one: {error}',
                cause=error.cause,
                task=error.task,
                sample_id=error.sample_id,
                epoch=error.epoch,
                call=error.call,
            )
            always.__cause__ = error.__cause__
            return always
        return None

    def refusal(self, sample_id: int | str | None) -> EpisodeError | None:
        """Return the error of a sample that failed too often in a row, which is not run again."""
        failed = self._in_a_row.get(sample_id)
        if failed is None or failed.times < MOST_FAILURES:
            return None
        return EpisodeError(
            f"{counted(failed.times, 'episode')} of this sample in a row have failed, so its "
            "group runs no further one. If the policy can bring that about, state a price: "
            f'on_error={{"{failed.cause}": 0.0}}. The last one: {failed.text}',
            cause=failed.cause,
            task=failed.task,
            sample_id=sample_id,
        )

    def warn_once(self, error: EpisodeError, price: float) -> None:
        """Tell, once per dataset, that a failure that the policy brought about has a price."""
        if not self._has_warned:
            self._has_warned = True
            logger.warning(
                "%s. The episode gets a reward of %g instead of an error: a policy that can bring "
                "that about could have its bad episodes run again. If the task is at fault, "
                'on_error={"%s": "raise"} raises. Reported once; the metric error/%s counts all '
                "of them",
                error,
                price,
                *[error.cause] * 2,
            )


@dataclass(frozen=True)
class _Repeated:
    """Failures in a row of a sample; without the exceptions, which hold what they have used."""

    times: int
    cause: Cause
    task: str
    text: str


@dataclass(frozen=True)
class RewardRules:
    """Turns results into rewards, the same way for every env of a dataset."""

    aggregator: ResolvedReward
    errors: ErrorPolicy
    failures: FailureCounts = field(default_factory=FailureCounts, repr=False, compare=False)
    """Failures of the dataset's episodes in this process."""

    @property
    def at_once(self) -> bool:
        """Whether :meth:`ending` waits for nothing."""
        return self.aggregator.at_once

    async def ending(self, result: EpisodeResult) -> Ending:
        """Apply the aggregator, or the error policy if the episode failed."""
        error = result.error
        if error is None:
            try:
                reward = await self.aggregator(result)
                self.failures.note_reward(result)
                self.note_paid(result, reward.value)
                return Ending(result, reward, None)
            except (UnscoredError, AggregatorError) as fault:
                error = _reward_error(result, fault)
        return self._end_failed(result, error)

    def note_paid(self, result: EpisodeResult, value: float) -> None:
        """Note the own or the group's reward of an episode that did not fail."""
        if value < 0:
            short = value - least_reward(self.aggregator.aggregator, result)
            self.failures.shortfall = min(self.failures.shortfall, round(short, 9))

    def _end_failed(self, result: EpisodeResult, error: EpisodeError) -> Ending:
        """Apply ``on_error``, or the built-in price."""
        penalty = self.errors.penalty(error.cause)
        built_in = error.cause in self.errors.built_in
        if built_in and (always := self.failures.note_priced(error)):
            built_in, error = False, always
        elif built_in:
            penalty = least_reward(self.aggregator.aggregator, result) + self.failures.shortfall
            self.failures.warn_once(error, penalty)
        if penalty is None:
            return Ending(result, None, self.failures.note_raised(error))
        self.failures.note_reward(result, failed=True)
        return Ending(result, Reward(penalty, {f"error/{error.cause}": 1.0}), error, built_in)


def stop_reason(result: EpisodeResult) -> str:
    """Return why an episode ended, in the cookbook's words."""
    if result.limit is not None:
        return _STOP_BY_LIMIT.get(result.limit.type, f"{result.limit.type}_limit")
    if SOLVER_TIMEOUT in result.metrics:
        return "solver_timeout"
    return StopReason.MAX_TOKENS if result.truncated else StopReason.COMPLETED


def _reward_error(result: EpisodeResult, fault: Exception) -> EpisodeError:
    error = EpisodeError(
        str(fault),
        cause=Cause.UNSCORED if isinstance(fault, UnscoredError) else Cause.REWARD,
        task=result.task,
        sample_id=result.sample.id,
        epoch=result.epoch,
    )
    error.__cause__ = fault
    return error
