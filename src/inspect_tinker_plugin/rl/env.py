"""One episode as a cookbook ``Env``: tokens in, tokens out, Inspect in between."""

from __future__ import annotations

import asyncio
import time
import weakref
from collections.abc import Awaitable, Callable
from dataclasses import dataclass, replace
from typing import Any, TypeVar

import tinker
from inspect_ai.model import ModelOutput
from tinker_cookbook.completers import StopCondition
from tinker_cookbook.rl.rollout_limits import ParseErrorPolicy, RolloutLimits
from tinker_cookbook.rl.types import (
    PARSE_ERROR_MASKED_METRIC_KEY,
    STOP_METRIC_PREFIX,
    ActionExtra,
    Env,
    InitialObservationOverflow,
    Logs,
    Metrics,
    StepResult,
    StopReason,
)

from inspect_tinker_plugin.config import ErrorPolicy
from inspect_tinker_plugin.episode.runner import Episode
from inspect_tinker_plugin.episode.types import EpisodeResult, Outcome, TurnRequest
from inspect_tinker_plugin.errors import Cause, EpisodeError
from inspect_tinker_plugin.hooks import EpisodeHooks
from inspect_tinker_plugin.rewards import AggregatorError, Reward, UnscoredError
from inspect_tinker_plugin.rl.tokens import EpisodeTokens

T = TypeVar("T")

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
class Outcomes:
    """How results become rewards, the same for every env of a dataset."""

    aggregator: Aggregator
    errors: ErrorPolicy


@dataclass
class Ending:
    """A finished episode with its reward; one of ``reward`` and ``error`` may be absent."""

    result: EpisodeResult
    reward: Reward | None
    error: EpisodeError | None


@dataclass(frozen=True)
class Observation:
    """What the policy is shown: a prompt, and what ends its reply."""

    prompt: tinker.ModelInput
    stop: StopCondition


class InspectEnv(Env):
    """One episode of a sample. Single-use, like every cookbook env.

    ``initial_observation()`` starts Inspect's solver and waits for its first model call;
    ``step()`` answers the call with the sampled tokens. A failed episode raises
    :class:`EpisodeError`, or ends with the penalty that ``on_error`` states for its cause.

    Attributes:
        rollout_limits: Budgets for the cookbook's rollout runner, which reads them here.
        ending: How the episode ended, once it has.
    """

    def __init__(
        self,
        episode: Episode,
        tokens: EpisodeTokens,
        outcomes: Outcomes,
        *,
        hooks: EpisodeHooks | None = None,
        rollout_limits: RolloutLimits | None = None,
    ) -> None:
        self.rollout_limits = rollout_limits
        self.ending: Ending | None = None
        self._episode = episode
        self._tokens = tokens
        self._outcomes = outcomes
        self._hooks = hooks or EpisodeHooks()
        self._request: TurnRequest | None = None
        self._tool_calls_left: int | None = None
        self._forced_stop: StopReason | None = None
        self._parse_errors: ParseErrorPolicy | None = None
        self._consecutive_parse_errors = 0
        self._environment_s = 0.0

    # the cookbook's contract

    async def initial_observation(
        self,
    ) -> tuple[tinker.ModelInput, StopCondition] | InitialObservationOverflow:
        """Run the task's solver to its first model call.

        Returns:
            The first prompt and its stop condition. A solver that never calls the model, and
            a prompt over ``rollout_limits.max_trajectory_tokens``, end the episode at once
            with its score.

        Raises:
            EpisodeError: The episode failed and ``on_error`` says to raise.
        """
        self._watch_rollout()
        observed = await self._observe(await self._timed(self._hooks.start(self._episode)))
        if isinstance(observed, Observation):
            limits = self.rollout_limits
            budget = None if limits is None else limits.max_trajectory_tokens
            if budget is None or observed.prompt.length <= budget:
                return observed.prompt, observed.stop
            self._forced_stop = StopReason.MAX_TOKENS
            observed = await self._end(
                f"the first prompt has {observed.prompt.length} tokens, over {budget}"
            )
        final = await self._finish(observed)
        return InitialObservationOverflow(
            reward=final.reward, metrics=final.metrics, logs=final.logs
        )

    async def step(self, action: list[int], *, extra: ActionExtra | None = None) -> StepResult:
        """Answer the parked model call and run on to the next one, or to the scored end.

        Args:
            action: The sampled tokens, shape ``[T]``, as sampled: end-of-turn token included.
            extra: ``stop_reason`` ``"length"`` marks a reply cut at the token limit.

        Raises:
            EpisodeError: The episode failed and ``on_error`` says to raise.
        """
        request = self._request
        if request is None:
            raise RuntimeError("step() needs a running episode: call initial_observation() first")
        self._request = None
        stop_reason = (extra or {}).get("stop_reason")
        reply = await self._parse(action, stop_reason=stop_reason, request=request)
        await self._hooks.turn(request, reply)
        metrics = self._turn_metrics(reply)
        stopped = self._stop_before(reply)
        if stopped is not None:
            observed: Observation | EpisodeResult = await self._end(stopped)
        else:
            observed = await self._observe(await self._timed(self._episode.reply(reply)))
        if isinstance(observed, Observation):
            return StepResult(
                reward=self._parse_penalty(metrics),
                episode_done=False,
                next_observation=observed.prompt,
                next_stop_condition=observed.stop,
                metrics=metrics,
            )
        final = await self._finish(observed)
        final.metrics = {**metrics, **final.metrics}
        return final

    def set_max_tool_calls(self, max_tool_calls: int) -> None:
        """Stop the episode once it has made so many tool calls.

        A turn that asks for more calls than are left is carried out up to the budget and
        ends the episode with ``stop/max_tool_calls``; its state is scored.
        """
        self._tool_calls_left = max_tool_calls

    def set_parse_error_policy(self, policy: ParseErrorPolicy) -> None:
        """Count malformed tool calls under the cookbook's policy.

        The corrective message is the solver's own (Inspect answers a malformed call with a
        tool error), so ``retry_message_template`` is not used. ``max_consecutive``,
        ``penalty_per_error``, ``terminal_reward`` and ``mask_error_turns`` apply.
        """
        self._parse_errors = policy

    # for the group

    async def settle(self) -> Ending:
        """End an episode that the trainer stopped stepping, and score what is there.

        Raises:
            EpisodeError: It failed and ``on_error`` says to raise.
        """
        if self.ending is None:
            result = await self._guard(self._episode.stop("the rollout ended before the episode"))
            await self._conclude(result)
        assert self.ending is not None
        return self.ending

    async def close(self) -> None:
        """Release everything; idempotent, and safe at any point."""
        await self._episode.close()

    # parts of a step

    async def _observe(self, outcome: Outcome) -> Observation | EpisodeResult:
        """Render a model call; the end of an episode passes through."""
        if isinstance(outcome, EpisodeResult):
            return outcome
        if self._forced_stop is not None:
            return await self._end(f"stopped: {self._forced_stop}")
        try:
            prompt = self._tokens.prompt(outcome)
        except EpisodeError as error:
            # the solver asked for what a sampler cannot give; the policy of errors decides
            return replace(await self._end(str(error)), error=error)
        except Exception:
            await self._episode.close()
            raise
        self._request = outcome
        return Observation(prompt, self._tokens.stop_condition(outcome))

    async def _end(self, reason: str) -> EpisodeResult:
        result = await self._timed(self._episode.stop(reason))
        assert isinstance(result, EpisodeResult)
        return result

    async def _parse(
        self, action: list[int], *, stop_reason: str | None, request: TurnRequest
    ) -> ModelOutput:
        try:
            return self._tokens.parse(action, stop_reason=stop_reason, request=request)
        except Exception:
            await self._episode.close()
            raise

    def _turn_metrics(self, reply: ModelOutput) -> Metrics:
        message = reply.message
        calls = message.tool_calls or []
        malformed = sum(1 for call in calls if call.parse_error)
        metrics: Metrics = {"tools/calls": len(calls)} if calls else {}
        if malformed:
            metrics["parse_error"] = 1.0
            self._consecutive_parse_errors += 1
            if self._parse_errors is not None and self._parse_errors.mask_error_turns:
                metrics[PARSE_ERROR_MASKED_METRIC_KEY] = 1.0
        else:
            self._consecutive_parse_errors = 0
        return metrics

    def _stop_before(self, reply: ModelOutput) -> str | None:
        """Decide whether a reply ends the episode instead of reaching the solver."""
        policy = self._parse_errors
        if policy is not None and self._consecutive_parse_errors > policy.max_consecutive:
            self._forced_stop = StopReason.PARSE_ERROR
            return "too many malformed tool calls in a row"
        calls = reply.message.tool_calls
        if self._tool_calls_left is None or not calls:
            return None
        if self._tool_calls_left == 0:
            self._forced_stop = StopReason.MAX_TOOL_CALLS
            return "the budget of tool calls is used up"
        if len(calls) > self._tool_calls_left:
            reply.message.tool_calls = calls[: self._tool_calls_left]
            self._forced_stop = StopReason.MAX_TOOL_CALLS
        self._tool_calls_left -= min(len(calls), self._tool_calls_left)
        return None

    def _parse_penalty(self, metrics: Metrics) -> float:
        if self._parse_errors is None or "parse_error" not in metrics:
            return 0.0
        return -self._parse_errors.penalty_per_error

    # the end of an episode

    async def _finish(self, result: EpisodeResult) -> StepResult:
        ending = await self._conclude(result)
        metrics = self._final_metrics(ending)
        reward = ending.reward.value if ending.reward is not None else 0.0
        if self._forced_stop is StopReason.PARSE_ERROR and self._parse_errors is not None:
            reward = self._parse_errors.terminal_reward
        return StepResult(
            reward=reward,
            episode_done=True,
            next_observation=tinker.ModelInput.empty(),
            next_stop_condition=[],
            metrics=metrics,
            logs=_logs(ending),
        )

    async def _conclude(self, result: EpisodeResult) -> Ending:
        """Turn a result into a reward, a penalty, or an exception."""
        self.ending = ending = await self._rewarded(result)
        reward = None if ending.reward is None else ending.reward.value
        await self._hooks.ended(replace(result, error=ending.error), reward)
        if ending.reward is None and ending.error is not None:
            raise ending.error
        return ending

    async def _rewarded(self, result: EpisodeResult) -> Ending:
        error = result.error
        if error is None:
            try:
                return Ending(result, await self._outcomes.aggregator(result), None)
            except (UnscoredError, AggregatorError) as fault:
                cause = Cause.UNSCORED if isinstance(fault, UnscoredError) else Cause.REWARD
                error = self._error(str(fault), cause)
                error.__cause__ = fault
        penalty = self._outcomes.errors.penalty(error.cause)
        reward = None if penalty is None else Reward(penalty, {f"error/{error.cause}": 1.0})
        return Ending(result, reward, error)

    def _final_metrics(self, ending: Ending) -> Metrics:
        result = ending.result
        metrics: Metrics = {
            f"{STOP_METRIC_PREFIX}{self._stop_reason(result)}": 1.0,
            "turns": result.turns,
            "time/environment_s": self._environment_s,
            **result.metrics,
            **self._tokens.metrics,
        }
        if result.limit is not None:
            metrics[f"limit/{result.limit.type}"] = 1.0
        if ending.reward is not None:
            metrics.update(ending.reward.metrics)
        return metrics

    def _stop_reason(self, result: EpisodeResult) -> str:
        if self._forced_stop is not None:
            return self._forced_stop
        if result.limit is not None:
            return _STOP_BY_LIMIT.get(result.limit.type, f"{result.limit.type}_limit")
        return StopReason.MAX_TOKENS if result.truncated else StopReason.COMPLETED

    def _error(self, message: str, cause: Cause) -> EpisodeError:
        return EpisodeError(
            message,
            cause=cause,
            task=self._episode.prepared.name,
            sample_id=self._episode.sample.id,
            epoch=self._episode.epoch,
        )

    # failure and cancellation

    async def _timed(self, work: Awaitable[Outcome]) -> Outcome:
        started = time.perf_counter()
        try:
            return await self._guard(work)
        finally:
            self._environment_s += time.perf_counter() - started

    async def _guard(self, work: Awaitable[T]) -> T:
        """Close the episode when the work fails.

        A cancelled step is different: the cookbook keeps a rollout that ran into its
        time-out and grades it, so the episode is ended as by a limit and scored in the
        background; ``settle()`` picks the score up, ``close()`` ends it for good.
        """
        try:
            return await work
        except asyncio.CancelledError:
            self._forced_stop = StopReason.ROLLOUT_TIMEOUT
            _stop_in_background(self._episode)
            raise
        except Exception:
            await self._episode.close()
            raise

    def _watch_rollout(self) -> None:
        """Close the episode when the rollout that steps it is cancelled or fails.

        A strategy that retries keeps the dead env until its group is done; without this
        it would keep its sandbox, too, and a retry could wait for it for ever.
        """
        rollout = asyncio.current_task()
        if rollout is not None:
            rollout.add_done_callback(_CloseWhenAbandoned(weakref.ref(self._episode)))


@dataclass(frozen=True)
class _CloseWhenAbandoned:
    episode: weakref.ref[Episode]

    def __call__(self, rollout: asyncio.Task[Any]) -> None:
        episode = self.episode()
        if episode is None or not (rollout.cancelled() or rollout.exception() is not None):
            return
        _in_background(episode.close())


_background: set[asyncio.Future[Any]] = set()


def _in_background(work: Awaitable[Any]) -> None:
    """Run clean-up that nobody waits for; kept alive until it is done."""
    task = asyncio.ensure_future(work)
    _background.add(task)
    task.add_done_callback(_forget)


def _forget(task: asyncio.Future[Any]) -> None:
    _background.discard(task)
    if not task.cancelled():
        task.exception()


def _stop_in_background(episode: Episode) -> None:
    _in_background(episode.stop("the rollout was cancelled"))


def _logs(ending: Ending) -> Logs:
    result = ending.result
    logs: Logs = {"task": result.task, "sample": str(result.sample.id), "epoch": result.epoch}
    for name, score in result.scores.items():
        logs[f"score/{name}"] = str(score.score.value)
        if score.score.answer is not None:
            logs[f"answer/{name}"] = score.score.answer
    if result.limit is not None:
        logs["limit"] = f"{result.limit.type}: {result.limit.reason or ''}"
    if ending.error is not None:
        logs["error"] = str(ending.error)
    return logs
