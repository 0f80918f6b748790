"""Turns a finished episode into what the trainer receives: a reward, a penalty or an error."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from dataclasses import dataclass, field
from logging import getLogger

from tinker_cookbook.rl.types import STOP_METRIC_PREFIX, Logs, Metrics, StopReason

from inspect_tinker_plugin.episode.cancellation import being_cancelled, stray
from inspect_tinker_plugin.episode.types import EpisodeResult
from inspect_tinker_plugin.errors import Cause, EpisodeError, ErrorPolicy
from inspect_tinker_plugin.rewards import AggregatorError, Reward, UnscoredError

logger = getLogger(__name__)

Aggregator = Callable[[EpisodeResult], Awaitable[Reward]]

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


@dataclass(frozen=True)
class Ending:
    """A finished episode with its reward.

    A failed one has an error; it also has a reward when ``on_error`` states a penalty.
    """

    result: EpisodeResult
    reward: Reward | None
    error: EpisodeError | None

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


@dataclass(frozen=True)
class RewardRules:
    """Turns results into rewards, the same way for every env of a dataset."""

    aggregator: Aggregator
    errors: ErrorPolicy
    _told: list[str] = field(default_factory=list, repr=False, compare=False)
    """Whether the warning about failures inside a sandbox was given; once per dataset."""

    async def ending(self, result: EpisodeResult) -> Ending:
        """Apply the aggregator, or the error policy if the episode failed."""
        error = result.error
        if error is None:
            try:
                return Ending(result, await self.aggregator(result), None)
            except asyncio.CancelledError as cancelled:
                if being_cancelled():
                    raise
                error = _reward_error(result, stray("the reward", cancelled))
            except (UnscoredError, AggregatorError) as fault:
                error = _reward_error(result, fault)
        penalty = self.errors.penalty(error.cause)
        if error.cause is Cause.INSIDE_SANDBOX and penalty is not None and not self._told:
            self._told.append(str(error))
            logger.warning(
                "%s. The episode gets a reward of %g instead of an error: a policy that can make "
                "sandbox operations fail could have its bad episodes run again. If the task is at "
                'fault, on_error={"inside_sandbox": "raise"} raises. Reported once; the metric '
                "error/inside_sandbox counts all of them",
                error,
                penalty,
            )
        reward = None if penalty is None else Reward(penalty, {f"error/{error.cause}": 1.0})
        return Ending(result, reward, error)


def stop_reason(result: EpisodeResult) -> str:
    """Return why an episode ended, in the cookbook's words."""
    if result.limit is not None:
        return _STOP_BY_LIMIT.get(result.limit.type, f"{result.limit.type}_limit")
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
