"""One episode as a cookbook ``Env``: tokens in, tokens out, Inspect in between."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Awaitable
from dataclasses import dataclass, replace
from weakref import WeakKeyDictionary

import tinker
from tinker_cookbook.completers import StopCondition
from tinker_cookbook.rl.rollout_limits import ParseErrorPolicy, RolloutLimits
from tinker_cookbook.rl.types import (
    ActionExtra,
    Env,
    InitialObservationOverflow,
    StepResult,
    StopReason,
    Trajectory,
)

from inspect_tinker_plugin.contracts.episodes import (
    EpisodeResult,
    EpisodeState,
    Outcome,
    Reply,
    TurnRequest,
)
from inspect_tinker_plugin.contracts.errors import EpisodeClosedError, EpisodeError
from inspect_tinker_plugin.contracts.wording import counted
from inspect_tinker_plugin.episode.model import RequestRefusedError
from inspect_tinker_plugin.episode.runner import Episode
from inspect_tinker_plugin.processes.loops import cancel, wait_for_end
from inspect_tinker_plugin.processes.workers import note_failed_rollout
from inspect_tinker_plugin.rewards import Reward
from inspect_tinker_plugin.rl.ending import (
    ROLLOUT_ENDED,
    Ending,
    Received,
    RewardRules,
    TurnRules,
    end_with_rollout,
)
from inspect_tinker_plugin.rl.hooks import EpisodeHooks
from inspect_tinker_plugin.tokens.episode import EpisodeTokens, OverWindowError

CLOSE_GRACE = 60.0
"""Seconds that ``close()`` waits for a reward function or observer that it has cancelled."""


AT_ONCE = 8
"""Starts per iteration of the event loop, so that many of them leave it time for the rest."""

_places: WeakKeyDictionary[asyncio.AbstractEventLoop, asyncio.Semaphore] = WeakKeyDictionary()


async def wait_to_start() -> None:
    """Wait until this iteration of the event loop has room for one more start."""
    loop = asyncio.get_running_loop()
    async with _places.setdefault(loop, asyncio.Semaphore(AT_ONCE)):
        await asyncio.sleep(0)


@dataclass(frozen=True)
class Observation:
    """What the policy is shown: a model call as a prompt, with the stop condition of its reply."""

    request: TurnRequest
    prompt: tinker.ModelInput
    stop: StopCondition


class InspectEnv(Env):
    """One episode of a sample. Single-use, like every cookbook env.

    ``initial_observation()`` starts Inspect's solver and waits for its first model call;
    ``step()`` answers the call with the sampled tokens. Whether the reward of a scored episode
    has reached the trainer is known only from the trajectory that it kept (``find_unpaid()``): a
    step may be cancelled after the episode was scored.

    Attributes:
        rollout_limits: Budgets, which the cookbook's rollout runner reads here.
        episode: The episode.
        tokens: Its prompts and replies as tokens.
        ending: How the episode ended, once it is scored.
        received: What the trainer received for it, if a log is to say so.
        refusal: Why it is not run at all: the error that its first step raises.
    """

    def __init__(
        self,
        episode: Episode,
        tokens: EpisodeTokens,
        outcomes: RewardRules,
        *,
        hooks: EpisodeHooks | None = None,
        rollout_limits: RolloutLimits | None = None,
        pays_in_steps: bool = True,
    ) -> None:
        self.rollout_limits = rollout_limits
        self.ending: Ending | None = None
        self.received: Received | None = None
        self.refusal: EpisodeError | None = None
        self.episode = episode
        self.tokens = tokens
        self._outcomes = outcomes
        self._hooks = hooks or EpisodeHooks()
        self._pays_in_steps = pays_in_steps
        self._rules = TurnRules()
        self._entered = False
        self._request: TurnRequest | None = None
        self._refused: EpisodeError | None = None
        self._conclusion: asyncio.Task[None] | None = None
        self._returned = 0
        self.side_turns: list[bool] = []
        self.unheard_turns: list[bool] = []
        self._delivered = False
        self._environment_s = 0.0

    # the cookbook's contract

    async def initial_observation(
        self,
    ) -> tuple[tinker.ModelInput, StopCondition] | InitialObservationOverflow:
        """Run the task's solver to its first model call.

        Returns:
            The first prompt and its stop condition; or the score, of a solver that never calls the
            model, and for a prompt over ``rollout_limits.max_trajectory_tokens``.

        Raises:
            EpisodeError: The episode failed and ``on_error`` says to raise.
            EpisodeClosedError: It was closed, before or during the call.
            RuntimeError: It was called before; the running episode is not affected.
        """
        self.episode.require_new()
        if self.refusal is not None:
            raise self.refusal
        if self._entered:
            raise RuntimeError("initial_observation() is called once; make another env")
        self._entered = True
        try:
            self.episode.end_with(self)
            end_with_rollout(self.episode)
            await wait_to_start()
            observed = await self._observe(await self._time_work(self._hooks.start(self.episode)))
            if isinstance(observed, Observation):
                limits = self.rollout_limits
                budget = None if limits is None else limits.max_trajectory_tokens
                if budget is None or observed.prompt.length <= budget:
                    self._request = observed.request
                    return observed.prompt, observed.stop
                self._rules.stop = StopReason.MAX_TOKENS
                observed = await self._end(
                    f"the first prompt has {counted(observed.prompt.length, 'token')}, "
                    f"over {budget}"
                )
            ending = await self._conclude(observed)
            final = self._final_step(ending)
            return InitialObservationOverflow(
                reward=final.reward, metrics=final.metrics, logs=final.logs
            )
        except BaseException as error:
            await self._close_failed(error)
            raise

    async def step(self, action: list[int], *, extra: ActionExtra | None = None) -> StepResult:
        """Answer the parked model call and run on to the next one, or to the scored end.

        Args:
            action: The sampled tokens, shape ``[T]``, as sampled: end-of-turn token included.
            extra: ``stop_reason`` ``"length"`` marks a reply cut at the token limit.

        Raises:
            EpisodeError: The episode failed and ``on_error`` says to raise.
            EpisodeClosedError: It was closed, before or during the call.
            RuntimeError: No prompt waits for an action; nothing changes.
        """
        request = self._take_request()
        try:
            stop_reason = (extra or {}).get("stop_reason")
            reply = self.tokens.parse(action, stop_reason=stop_reason, request=request)
            self.side_turns.append(request.side)
            self.unheard_turns.append(False)
            if self._hooks.observed:
                await self._hooks.report_turn(request, reply)
            metrics = self._rules.count(reply)
            refused = self._rules.refuse(reply)
            if refused is not None:
                observed: Observation | EpisodeResult = await self._end(refused)
            else:
                outcome = await self._time_work(self.episode.reply(reply))
                self.unheard_turns[-1] = not self.episode.heard
                observed = await self._observe(outcome)
            if isinstance(observed, Observation):
                self._request = observed.request
                self._returned += 1
                return StepResult(
                    reward=self._rules.turn_reward(metrics),
                    episode_done=False,
                    next_observation=observed.prompt,
                    next_stop_condition=observed.stop,
                    metrics=metrics,
                )
            ending = await self._conclude(observed)
            # No await from here on: a step that is marked as delivered must be returned.
            final = self._final_step(ending)
            final.metrics = metrics | final.metrics
            return final
        except BaseException as error:
            await self._close_failed(error)
            raise

    def set_max_tool_calls(self, max_tool_calls: int) -> None:
        """Stop the episode once it has made this many tool calls; its state is scored then."""
        self._rules.allow_tool_calls(max_tool_calls)

    def set_parse_error_policy(self, policy: ParseErrorPolicy) -> None:
        """Count malformed tool calls under the cookbook's policy.

        Its ``retry_message_template`` is not used: the solver answers them, as in an eval.
        """
        self._rules.apply(policy)

    @property
    def request(self) -> TurnRequest | None:
        """The model call that waits for ``step()``, if there is one."""
        return self._request

    # for the group

    async def settle(self) -> Ending:
        """End an episode that the trainer stopped stepping, and score the state reached so far.

        An episode that is already scored keeps its score, however often this is called.

        Raises:
            EpisodeError: It failed and ``on_error`` says to raise.
            EpisodeClosedError: It was closed before it was scored.
        """
        if self.ending is None and self._conclusion is None:
            return await self._conclude(await self.episode.stop(ROLLOUT_ENDED))
        return await self._reward_of_end()

    def find_unpaid(self, trajectory: Trajectory) -> float:
        """Return the part of a settled episode's step rewards that the trainer has not received.

        A step that was cancelled, or whose result was lost on its way, is not in the trajectory
        that the trainer keeps, and neither is its reward.
        """
        return 0.0 if self.reported_in(trajectory) else self._step_reward()

    def reported_in(self, trajectory: Trajectory) -> bool:
        """Whether a trajectory holds the last step of the episode, with its reward and metrics."""
        return self._delivered and len(trajectory.transitions) >= self._returned

    def group_share(self, final: Reward | None) -> float:
        """Return what the group pays: the given reward, or the own one where steps pay nothing."""
        if final is not None:
            return final.value
        if self._pays_in_steps or self._rules.flat_reward() is not None:
            return 0.0
        return self._own_reward()

    def total(self, final: Reward | None) -> float | None:
        """Return its own reward, or the group's; ``None`` if a rule for its turns has set one."""
        if self._rules.flat_reward() is not None:
            return None
        return self._own_reward() if final is None else final.value

    def lost_replies(self, trajectory: Trajectory) -> int:
        """Count replies that the scored state holds and the trainer's trajectory does not."""
        taken = 0 if self.ending is None else self.ending.result.turns
        kept = sum(bool(transition.ac.tokens) for transition in trajectory.transitions)
        return max(0, taken - kept)

    async def close(self) -> None:
        """Release everything; idempotent, and safe at any point."""
        await self.episode.close()
        conclusion = self._conclusion
        if conclusion is not None and not conclusion.done():
            cancel(conclusion)
            await wait_for_end(conclusion, CLOSE_GRACE)

    def forget(self) -> None:
        """Forget what a closed env needs no more, so that its memory is freed."""
        self.received = None
        self.tokens.forget()
        self._hooks.note_closed()
        if self.ending is None or self.ending.error is not None:
            note_failed_rollout()

    # parts of a step

    def _take_request(self) -> TurnRequest:
        request, self._request = self._request, None
        state = self.episode.state
        if state is EpisodeState.CLOSED:
            raise EpisodeClosedError("step(): the episode was closed before")
        if request is not None:
            return request
        raise RuntimeError(
            f"step(): no prompt waits for an action, the episode is {state}. Call "
            "initial_observation() first, then step() once per observation"
        )

    async def _observe(self, outcome: Outcome) -> Observation | EpisodeResult:
        """Render a model call; the end of an episode is passed through.

        What cannot be honoured ends the episode, and the error policy decides. A program that
        asks for it, whom a policy may have told to, is refused instead, as by any model API.
        A call over the context window is answered as by a model API, too, and the solver goes on.
        """
        while not isinstance(outcome, EpisodeResult):
            if self._rules.stop is not None:
                return await self._end(f"stopped: {self._rules.stop}")
            try:
                stop = self.tokens.stop_condition(outcome)
                return Observation(outcome, self.tokens.prompt(outcome), stop)
            except OverWindowError as error:
                answer: Reply = error.answer
            except EpisodeError as error:
                if outcome.dialect is None or not self.tokens.turns:
                    self._refused = error
                    return await self._end(str(error))
                self.tokens.refuse(error)
                answer = RequestRefusedError(error)
            outcome = await self._time_work(self.episode.reply(answer))
        return outcome

    async def _end(self, reason: str) -> EpisodeResult:
        result = await self._time_work(self.episode.stop(reason))
        assert isinstance(result, EpisodeResult)
        return result

    async def _time_work(self, work: Awaitable[Outcome]) -> Outcome:
        started = time.perf_counter()
        try:
            return await work
        finally:
            self._environment_s += time.perf_counter() - started

    # the end

    async def _conclude(self, result: EpisodeResult) -> Ending:
        """Turn a result into a reward or a penalty, once, even if called or cancelled repeatedly.

        Raises:
            EpisodeError: The episode failed and ``on_error`` says to raise.
        """
        if self.ending is None and self._conclusion is None:
            if self._outcomes.at_once and not self._hooks.observed:
                await self._score(result)  # which cannot be cancelled on its way
            else:
                self._conclusion = asyncio.ensure_future(self._score(result))
        return await self._reward_of_end()

    async def _reward_of_end(self) -> Ending:
        """Wait until the episode is scored; return how it ended, or raise what ``on_error`` says.

        Raises:
            EpisodeError: It failed, and has no price.
            EpisodeClosedError: It was closed meanwhile.
        """
        scoring = self._conclusion
        if scoring is not None:
            if not await wait_for_end(scoring) or scoring.cancelled():
                raise EpisodeClosedError("the episode was closed while it was scored")
            scoring.result()
        assert self.ending is not None
        if self.ending.reward is None and self.ending.error is not None:
            raise self.ending.error
        return self.ending

    async def _score(self, result: EpisodeResult) -> None:
        if self._refused is not None:
            result = replace(result, error=self._refused)
        self.ending = ending = await self._outcomes.ending(result)
        if self._hooks.observed:
            reward = None if ending.reward is None else ending.reward.value
            await self._hooks.report_end(replace(result, error=ending.error), reward)

    def _final_step(self, ending: Ending) -> StepResult:
        """Make the step that carries the reward; it counts as delivered from here on."""
        self._returned += 1
        self._delivered = True
        return StepResult(
            reward=self._step_reward(),
            episode_done=True,
            next_observation=tinker.ModelInput.empty(),
            next_stop_condition=[],
            metrics={
                "time/environment_s": self._environment_s,
                **self.tokens.metrics,
                **ending.metrics(self._rules.stop),
            },
            logs=ending.logs(),
        )

    def _step_reward(self) -> float:
        flat = self._rules.flat_reward()
        if flat is not None:
            return flat
        return self._own_reward() if self._pays_in_steps else 0.0

    def _own_reward(self) -> float:
        assert self.ending is not None
        assert self.ending.reward is not None
        return self.ending.reward.value

    # failure and cancellation

    async def _close_failed(self, error: BaseException) -> None:
        """Close the episode, because a call has failed.

        After a cancelled call the cookbook keeps the rollout and grades it (its time-out), so the
        episode is ended as by a limit and scored in its own task; ``settle()`` returns that score.
        """
        if isinstance(error, asyncio.CancelledError):
            if self._conclusion is None and self.ending is None:
                self.episode.halt("the rollout was cancelled")
        elif isinstance(error, Exception):
            await self.episode.close()
