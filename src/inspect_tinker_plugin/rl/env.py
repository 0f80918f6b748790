"""One episode as a cookbook ``Env``: tokens in, tokens out, Inspect in between."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Awaitable, Sequence
from dataclasses import dataclass, replace
from typing import TypeVar

import tinker
from inspect_ai.model import ModelOutput
from tinker_cookbook.completers import StopCondition
from tinker_cookbook.rl.rollout_limits import ParseErrorPolicy, RolloutLimits
from tinker_cookbook.rl.types import (
    ActionExtra,
    Env,
    InitialObservationOverflow,
    StepResult,
    StopReason,
)

from inspect_tinker_plugin.episode.runner import Episode
from inspect_tinker_plugin.episode.types import EpisodeResult, Outcome, TurnRequest
from inspect_tinker_plugin.errors import EpisodeError
from inspect_tinker_plugin.hooks import EpisodeHooks
from inspect_tinker_plugin.rl.abandonment import close_with_rollout, stop_in_background
from inspect_tinker_plugin.rl.ending import Ending, Outcomes
from inspect_tinker_plugin.rl.tokens import EpisodeTokens
from inspect_tinker_plugin.rl.turn_rules import TurnRules
from inspect_tinker_plugin.rl.turns import Turn

T = TypeVar("T")


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
        self._rules = TurnRules()
        self._request: TurnRequest | None = None
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
        close_with_rollout(self._episode)
        observed = await self._observe(await self._timed(self._hooks.start(self._episode)))
        if isinstance(observed, Observation):
            limits = self.rollout_limits
            budget = None if limits is None else limits.max_trajectory_tokens
            if budget is None or observed.prompt.length <= budget:
                return observed.prompt, observed.stop
            self._rules.stop = StopReason.MAX_TOKENS
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
            EpisodeClosedError: The episode was closed before.
        """
        request, self._request = self._request, None
        if request is None:
            raise RuntimeError("step() needs a running episode: call initial_observation() first")
        reply = await self._parse(action, extra, request)
        await self._hooks.turn(request, reply)
        metrics = self._rules.count(reply)
        refused = self._rules.refuse(reply)
        if refused is not None:
            observed: Observation | EpisodeResult = await self._end(refused)
        else:
            observed = await self._observe(await self._timed(self._episode.reply(reply)))
        if isinstance(observed, Observation):
            return StepResult(
                reward=self._rules.turn_reward(metrics),
                episode_done=False,
                next_observation=observed.prompt,
                next_stop_condition=observed.stop,
                metrics=metrics,
            )
        final = await self._finish(observed)
        final.metrics = metrics | final.metrics
        return final

    def set_max_tool_calls(self, max_tool_calls: int) -> None:
        """Stop the episode once it has made so many tool calls.

        A turn that asks for more calls than are left is carried out up to the budget and
        ends the episode with ``stop/max_tool_calls``; its state is scored.
        """
        self._rules.allow_tool_calls(max_tool_calls)

    def set_parse_error_policy(self, policy: ParseErrorPolicy) -> None:
        """Count malformed tool calls under the cookbook's policy.

        The corrective message is the solver's own (Inspect answers a malformed call with a
        tool error), so ``retry_message_template`` is not used. ``max_consecutive``,
        ``penalty_per_error``, ``terminal_reward`` and ``mask_error_turns`` apply.
        """
        self._rules.apply(policy)

    @property
    def request(self) -> TurnRequest | None:
        """The model call that waits for ``step()``, if one does."""
        return self._request

    # for the group

    @property
    def turns(self) -> Sequence[Turn]:
        """The answered turns of the episode, in time."""
        return self._tokens.turns

    async def settle(self) -> Ending:
        """End an episode that the trainer stopped stepping, and score what is there.

        Raises:
            EpisodeError: It failed and ``on_error`` says to raise.
        """
        if self.ending is None:
            stopped = self._episode.stop("the rollout ended before the episode")
            self.ending = await self._conclude(await self._guard(stopped))
        return self.ending

    async def close(self) -> None:
        """Release everything; idempotent, and safe at any point."""
        await self._episode.close()

    # parts of a step

    async def _observe(self, outcome: Outcome) -> Observation | EpisodeResult:
        """Render a model call; the end of an episode passes through."""
        if isinstance(outcome, EpisodeResult):
            return outcome
        if self._rules.stop is not None:
            return await self._end(f"stopped: {self._rules.stop}")
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

    async def _parse(
        self, action: list[int], extra: ActionExtra | None, request: TurnRequest
    ) -> ModelOutput:
        stop_reason = (extra or {}).get("stop_reason")
        try:
            return self._tokens.parse(action, stop_reason=stop_reason, request=request)
        except Exception:
            await self._episode.close()
            raise

    async def _end(self, reason: str) -> EpisodeResult:
        result = await self._timed(self._episode.stop(reason))
        assert isinstance(result, EpisodeResult)
        return result

    async def _finish(self, result: EpisodeResult) -> StepResult:
        ending = await self._conclude(result)
        assert ending.reward is not None
        return StepResult(
            reward=self._rules.final_reward(ending.reward.value),
            episode_done=True,
            next_observation=tinker.ModelInput.empty(),
            next_stop_condition=[],
            metrics={
                "time/environment_s": self._environment_s,
                **self._tokens.metrics,
                **ending.metrics(self._rules.stop),
            },
            logs=ending.logs(),
        )

    async def _conclude(self, result: EpisodeResult) -> Ending:
        """Turn a result into a reward or a penalty.

        Raises:
            EpisodeError: The episode failed and ``on_error`` says to raise.
        """
        self.ending = ending = await self._outcomes.ending(result)
        reward = None if ending.reward is None else ending.reward.value
        await self._hooks.ended(replace(result, error=ending.error), reward)
        if ending.reward is None and ending.error is not None:
            raise ending.error
        return ending

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
            self._rules.stop = StopReason.ROLLOUT_TIMEOUT
            stop_in_background(self._episode)
            raise
        except Exception:
            await self._episode.close()
            raise
