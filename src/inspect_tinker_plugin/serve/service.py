"""Runs groups of episodes of a task with a sampler that the caller lends."""

from __future__ import annotations

import asyncio
import itertools
import uuid
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import cached_property
from typing import Any, Unpack, cast

import tinker
from inspect_ai.dataset import Sample
from tinker_cookbook.completers import StopCondition, TokenCompleter, TokensWithLogprobs
from tinker_cookbook.renderers import Renderer
from tinker_cookbook.rl.rollout_limits import RolloutLimits
from tinker_cookbook.rl.rollout_runner import SamplingTurnTimeoutError
from tinker_cookbook.rl.types import PARSE_ERROR_MASKED_METRIC_KEY, Trajectory

from inspect_tinker_plugin.contracts.episodes import TurnRequest
from inspect_tinker_plugin.contracts.errors import ConfigError, EpisodeError
from inspect_tinker_plugin.logs import GroupSlot
from inspect_tinker_plugin.options import (
    DatasetKeywords,
    DatasetOptions,
    read_keywords,
    spell_out_options,
)
from inspect_tinker_plugin.processes.loops import is_being_cancelled
from inspect_tinker_plugin.rl.dataset import TaskLike, prepare_task
from inspect_tinker_plugin.rl.env import InspectEnv, wait_to_start
from inspect_tinker_plugin.rl.group import InspectGroupBuilder
from inspect_tinker_plugin.rl.rollouts import MemberRollout, report_rollout, roll_group
from inspect_tinker_plugin.rl.task_handle import open_logs
from inspect_tinker_plugin.serve.results import Failure, RolloutResult, SampledTurn, join_turns
from inspect_tinker_plugin.serve.samplers import Prompt, Sampled, Sampler, SamplerError

OnTurn = Callable[[SampledTurn], None]
"""Is called with each turn once the task has read its reply, in time order; side turns wait for the
first other turn, which decides whether they are trained on."""


class RolloutService:
    """Runs episodes of a task, as a training of this package runs them, for any trainer.

    ::

        service = RolloutService("tasks.py@math", renderer)
        [first, second] = await service.run_group("sample-7", sampler, size=2)
        first.reward, first.branches[0].tokens, first.branches[0].mask

    The caller chooses samples, so options that choose them batch by batch (``batch_size``,
    ``epochs``, ``shuffle``, ``sampler``) have no effect.
    """

    @spell_out_options
    def __init__(
        self,
        task: TaskLike,
        renderer: Renderer,
        *,
        task_args: Mapping[str, Any] | None = None,
        **options: Unpack[DatasetKeywords],
    ) -> None:
        """Load the task and check that it can be rolled out.

        Args:
            task: A ``Task``, a ``@task`` function, a registered name (``pkg/task``), a file
                (``file.py@task``) or a ``TaskRef``.
            renderer: A ``tinker_cookbook`` renderer for the model under training.
            task_args: Arguments of the task function, for tasks given by name or function.
            {options}

        Raises:
            ConfigError: An option, the task, the reward or the renderer is not usable.
        """
        self.options = DatasetOptions(**read_keywords(options))
        self._handle, self.samples = prepare_task(task, renderer, self.options, task_args)
        open_logs(self._handle, batches=len(self.samples))
        self._groups = itertools.count()
        self._vocabulary = len(renderer.tokenizer)

    @property
    def name(self) -> str:
        """Name of the task."""
        return self._handle.name

    @cached_property
    def _positions(self) -> dict[str, int]:
        return {str(sample.id): position for position, sample in enumerate(self.samples)}

    def sample(self, key: int | str) -> Sample:
        """Return a sample by its id (a string), or by its position (an integer).

        Raises:
            ConfigError: There is no such sample.
        """
        position = self._positions.get(key) if isinstance(key, str) else key
        if position is None or not 0 <= position < len(self.samples):
            raise ConfigError(f"task {self.name!r} has no sample {key!r}")
        return self.samples[position]

    async def run_group(
        self,
        sample: int | str,
        sampler: Sampler,
        *,
        size: int | None = None,
        limits: RolloutLimits | None = None,
        on_turn: OnTurn | None = None,
    ) -> list[RolloutResult]:
        """Run a group of episodes of one sample together.

        Cancelling it ends its episodes and releases their sandboxes before it returns.

        Args:
            sample: Id of the sample (a string) or its position.
            sampler: Answers the episodes' model calls.
            size: Episodes of the group, if not ``group_size``.
            limits: Budgets in the place of ``rollout_limits``; an episode that reaches one is
                scored as it is.
            on_turn: Is called with each turn.

        Returns:
            One result per episode. Failures are results, too: their siblings continue.
        """
        builder = InspectGroupBuilder(
            self._handle,
            self.sample(sample),
            GroupSlot(next(self._groups), 0, 1, step_known=False),
            size=size,
        )

        policies: dict[InspectEnv, _LentPolicy] = {}

        def policy_for(env: InspectEnv, sample: Sample, position: int) -> TokenCompleter:
            if limits is not None:
                env.rollout_limits = limits
            policies[env] = policy = _LentPolicy(env, sampler, on_turn, self._vocabulary)
            return cast("TokenCompleter", policy)  # only called, its class is never checked

        members: list[MemberRollout] = []
        failed: EpisodeError | None = None
        try:
            await roll_group(builder, policy_for, members)
        except EpisodeError as error:  # of the group's reward, which all of its members lack
            failed = error
        return [self._result(each, policies[each.env], builder.sample, failed) for each in members]

    async def run_episode(
        self,
        sample: int | str,
        sampler: Sampler,
        *,
        limits: RolloutLimits | None = None,
        on_turn: OnTurn | None = None,
    ) -> RolloutResult:
        """Run one episode, as a group of one.

        Raises:
            ConfigError: The option ``group_reward`` compares the members of a group.
        """
        if self.options.group_reward is not None:
            raise ConfigError(
                f"task {self.name!r}: group_reward={self.options.group_reward!r} compares the "
                "episodes of a group; run groups, or leave it out"
            )
        [result] = await self.run_group(sample, sampler, size=1, limits=limits, on_turn=on_turn)
        return result

    def _result(
        self,
        member: MemberRollout,
        policy: _LentPolicy,
        sample: Sample,
        failed: EpisodeError | None,
    ) -> RolloutResult:
        report = report_rollout(member)
        policy.finish()
        if isinstance(member.result, Exception):
            error: Exception | None = member.result
            turns = policy.turns
        else:
            error = failed
            turns = policy.paid_turns(member.result)
        branches = join_turns(turns)
        return RolloutResult(
            task=self.name,
            sample_id=sample.id,
            number=member.number,
            reward=None if error is not None else report.reward,
            failure=None if error is None else _failure(error),
            stop_reason=report.stop,
            scores=report.scores,
            metrics=report.metrics,
            messages=report.messages,
            turns=turns,
            branches=branches,
        )


@dataclass
class LentTokens(TokensWithLogprobs):
    """A sampled reply as the cookbook's runner carries it."""

    index: int = 0
    """Number of the turn in its rollout, in time order."""


class _LentPolicy:
    """A lent sampler as the policy of one rollout.

    Attributes:
        turns: The answered turns, in time order.
    """

    def __init__(
        self, env: InspectEnv, sampler: Sampler, on_turn: OnTurn | None, vocabulary: int
    ) -> None:
        self.turns: list[SampledTurn] = []
        self._vocabulary = vocabulary
        self._told = 0
        self._env = env
        self._sampler = sampler
        self._on_turn = on_turn
        self._episode = uuid.uuid4().hex
        self._asked: tuple[TurnRequest, Prompt, Sampled] | None = None

    async def __call__(
        self,
        model_input: tinker.ModelInput,
        stop: StopCondition,
        *,
        max_tokens: int | None = None,
    ) -> LentTokens:
        """Ask the sampler.

        Raises:
            SamplerError: It failed, or is of another model, or the prompt holds an image.
        """
        self.note_reply()
        request = self._env.request
        assert request is not None
        prompt = Prompt(
            tokens=_token_ids(model_input),
            stop=stop,
            max_tokens=max_tokens,
            episode=self._episode,
        )
        try:
            sampled = await self._sampler(prompt)
        except SamplerError:
            raise
        except asyncio.CancelledError as error:
            if is_being_cancelled():
                raise
            raise SamplerError("the sampler was cancelled, and not by its episode") from error
        except Exception as error:  # the boundary of the caller's code
            raise SamplerError(f"{type(error).__name__}: {error}") from error
        if not isinstance(sampled, Sampled):
            raise SamplerError(f"the sampler returned {sampled!r:.80}, not a Sampled")
        if (largest := max(sampled.tokens)) >= self._vocabulary:
            raise SamplerError(
                f"the sampler returned the token {largest}, and the tokenizer has "
                f"{self._vocabulary:,}: is it a server of another model?"
            )
        self._asked = (request, prompt, sampled)
        await wait_to_start()  # many replies may arrive at once, too
        return LentTokens(
            tokens=list(sampled.tokens),
            maybe_logprobs=list(sampled.logprobs),
            stop_reason=sampled.stop_reason,
            index=len(self.turns),
        )

    def note_reply(self) -> None:
        """Add the last turn, if the task has read its reply."""
        asked, self._asked = self._asked, None
        if asked is None or len(self._env.tokens.turns) <= len(self.turns):
            return
        request, prompt, sampled = asked
        answered = self._env.tokens.turns[len(self.turns)]
        assert answered.reply is not None
        turn = SampledTurn(
            prompt_tokens=prompt.tokens,
            tokens=sampled.tokens[: answered.kept],
            logprobs=sampled.logprobs[: answered.kept],
            stop_reason=sampled.stop_reason,
            policy_version=sampled.policy_version,
            messages=request.messages,
            tools=request.tools,
            reply=answered.reply.message,
        )
        self.turns.append(turn)
        self._tell()

    def finish(self) -> None:
        """Note the last reply, and tell of all turns."""
        self.note_reply()
        self._tell(ended=True)

    def _tell(self, *, ended: bool = False) -> None:
        """Tell the caller of turns; of side turns once it is known whether they are trained on."""
        if self._on_turn is None or (not ended and all(self._env.side_turns)):
            return
        aside = not all(self._env.side_turns)
        for index in range(self._told, len(self.turns)):
            turn, side = self.turns[index], self._env.side_turns[index]
            turn.trained = not (self._env.unheard_turns[index] or (side and aside))
            self._on_turn(turn)
        self._told = len(self.turns)

    def paid_turns(self, trajectory: Trajectory) -> list[SampledTurn]:
        """Return the turns that the trainer gets, branch by branch."""
        turns = []
        for transition in trajectory.transitions:
            if isinstance(transition.ac, LentTokens):
                turn = self.turns[transition.ac.index]
                turn.trained = not transition.metrics.get(PARSE_ERROR_MASKED_METRIC_KEY)
                turns.append(turn)
        return turns


def _token_ids(prompt: tinker.ModelInput) -> list[int]:
    tokens: list[int] = []
    for chunk in prompt.chunks:
        if not isinstance(chunk, tinker.EncodedTextChunk):
            raise SamplerError("the prompt holds an image, and a lent sampler takes token ids")
        tokens.extend(chunk.tokens)
    return tokens


def _failure(error: Exception) -> Failure:
    cause = "error"
    if isinstance(error, EpisodeError):
        cause = str(error.cause)
    elif isinstance(error, SamplerError | SamplingTurnTimeoutError):
        cause = "sampler"
    return Failure(cause=cause, message=str(error) or type(error).__name__)
