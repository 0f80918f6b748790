"""A group of episodes of one sample as a cookbook ``EnvGroupBuilder``."""

from __future__ import annotations

import asyncio
import math
import pickle
import weakref
from collections.abc import Sequence
from logging import getLogger
from typing import Any

import chz
from inspect_ai.dataset import Sample
from tinker_cookbook.rl.rollout_limits import RolloutLimits
from tinker_cookbook.rl.types import Env, EnvGroupBuilder, Metrics, Trajectory

from inspect_tinker_plugin.contracts.errors import Cause, EpisodeError, TaskError
from inspect_tinker_plugin.logs import GroupSlot
from inspect_tinker_plugin.options import DatasetOptions
from inspect_tinker_plugin.processes.cancellation import uninterrupted
from inspect_tinker_plugin.rewards import AggregatorError, GroupMember, Reward, UnscoredError
from inspect_tinker_plugin.rl.ending import Ending
from inspect_tinker_plugin.rl.env import InspectEnv, wait_to_start
from inspect_tinker_plugin.rl.recording import LOST_REPLIES, GroupRecording, log_run
from inspect_tinker_plugin.rl.task_handle import TaskHandle
from inspect_tinker_plugin.samplers.state import OutcomeFile
from inspect_tinker_plugin.tokens.datums import arrange, leave_out
from inspect_tinker_plugin.tokens.episode import EpisodeTokens
from inspect_tinker_plugin.tokens.prompts import PromptCache

logger = getLogger(__name__)


class InspectGroupBuilder(EnvGroupBuilder):
    """Builds ``group_size`` episodes of one sample.

    It pickles with plain ``pickle`` and holds nothing live until ``make_envs()``, so it
    works under ``set_rollout_executor`` with a spawn process pool or on Ray.

    Args:
        handle: Task, renderer and options of the dataset.
        sample: The sample, with an id.
        batch: Index of the batch that the group belongs to, from 0.
        index: Index of the group in its batch, from 0.
        groups: Groups in that batch.
        step_known: Whether the trainer's step follows from the batch. It does not if another
            dataset takes groups out of batches.
        outcome: Where the group's rewards go, if a sampler learns from them.
    """

    def __init__(
        self,
        handle: TaskHandle,
        sample: Sample,
        *,
        batch: int,
        index: int,
        groups: int,
        step_known: bool = True,
        outcome: OutcomeFile | None = None,
    ) -> None:
        self.handle = handle
        self.sample = sample
        self.batch = batch
        self.index = index
        self.groups = groups
        self.step_known = step_known
        self.outcome = outcome
        self._envs: list[tuple[weakref.ref[asyncio.Task[Any]], InspectEnv]] = []
        self._recording = self._new_recording()

    async def make_envs(self) -> Sequence[Env]:
        """Make the group's envs; no episode or sandbox starts before their first step.

        Called again by strategies that retry: each call makes ``group_size`` new envs, whose
        epochs continue the numbering, and ``cleanup()`` closes those of all calls by the same task.
        """
        await wait_to_start()
        if self.outcome is not None:
            self.outcome.check()
        parts = self.handle.parts()
        shared = PromptCache()
        hooks = parts.hooks.group()
        task = asyncio.current_task()
        assert task is not None
        made = len(self._made_by(task))
        limits = budgets(self.handle.options)
        envs = []
        for member in range(self.handle.options.group_size):
            epoch = made + member + 1
            tokens = EpisodeTokens(
                parts.context,
                task=self.handle.name,
                sample_id=self.sample.id,
                epoch=epoch,
                shared_prompts=shared,
                context_window=self.handle.options.context_window,
            )
            episode = parts.runner.episode(self.sample, epoch=epoch)
            env = InspectEnv(
                episode,
                tokens,
                parts.outcomes,
                hooks=hooks.episode(self.sample, epoch=epoch),
                rollout_limits=limits,
                pays_in_steps=parts.group_reward is None,
            )
            env.refusal = parts.outcomes.failures.refusal(self.sample.id) if made else None
            envs.append(env)
            if self._recording is not None:
                self._recording.add(env, episode, tokens)
        maker = weakref.ref(task)
        self._envs += [(maker, env) for env in envs]
        return envs

    def _made_by(self, task: asyncio.Task[Any] | None) -> list[InspectEnv]:
        return [env for maker, env in self._envs if maker() is task]

    async def compute_group_rewards(
        self, trajectory_group: list[Trajectory], env_group: Sequence[Env]
    ) -> list[tuple[float, Metrics]]:
        """Score the episodes that the trainer's own limits cut off, and apply the group aggregator.

        A rollout that the cookbook's runner stopped (token budget, time-out, its own turn
        limit) was not scored. Its episode is ended here as by a limit and scored, and the
        reward is added as the group's part of the total. With a group aggregator nothing is
        paid in steps and everything here, so that equal rewards are equal to the last bit.
        Each trajectory's transitions are put in the order of the episode's branches, and
        the trainer makes one datum of each branch.

        Returns:
            One ``(reward, metrics)`` per trajectory, to be added to its steps' rewards.

        Raises:
            EpisodeError: A member failed and ``on_error`` says to raise.
        """
        rewards = await self._group_rewards(trajectory_group, env_group)
        for trajectory, env in zip(trajectory_group, env_group, strict=True):
            if isinstance(env, InspectEnv):
                leave_out(trajectory, env.side_turns, env.unheard_turns)
                arrange(trajectory, env.turns)
        if self._recording is not None:
            self._recording.graded(env_group, trajectory_group, rewards)
        if self.outcome is not None:
            await self._tell_sampler(self.outcome, trajectory_group, rewards)
        return rewards

    async def _tell_sampler(
        self,
        outcome: OutcomeFile,
        trajectories: list[Trajectory],
        rewards: list[tuple[float, Metrics]],
    ) -> None:
        """Write the rewards before the trainer gets them; an error is only logged."""
        totals = [
            sum(transition.reward for transition in trajectory.transitions) + value
            for trajectory, (value, _) in zip(trajectories, rewards, strict=True)
        ]
        try:
            await asyncio.to_thread(outcome.write, totals)
        except OSError as error:
            logger.warning(
                "task %r: the sampler does not learn from a group: %s", self.handle.name, error
            )

    async def _group_rewards(
        self, trajectory_group: list[Trajectory], env_group: Sequence[Env]
    ) -> list[tuple[float, Metrics]]:
        envs = [env for env in env_group if isinstance(env, InspectEnv)]
        waiting = [env.settle() for env in envs if not env.settled]
        for outcome in await asyncio.gather(*waiting, return_exceptions=True):
            if isinstance(outcome, BaseException):
                raise outcome
        endings = [await env.settle() for env in envs]
        finals = await self._final_rewards(endings)
        least = _least_honest(envs, endings, finals)
        result: list[tuple[float, Metrics]] = []
        for env, ending, final, trajectory in zip(
            envs, endings, finals, trajectory_group, strict=True
        ):
            value = env.unpaid(trajectory) + env.group_share(final)
            metrics: Metrics = {} if result else self._count_retried(envs)
            total = env.total(final)
            if ending.has_built_in_price and total is not None:
                value += min(0.0, least - total)
            if not env.reported_in(trajectory) and ending.reward is not None:
                metrics |= ending.reward.metrics
            if lost := env.lost_replies(trajectory):
                metrics[LOST_REPLIES] = lost
            result.append((value, metrics if final is None else {**metrics, **final.metrics}))
        return result

    def _count_retried(self, envs: Sequence[InspectEnv]) -> Metrics:
        """Count the episodes that failed and are not in the group, by cause."""
        metrics: Metrics = {}
        for env in self._made_by(asyncio.current_task()):
            error = None if env.ending is None or env in envs else env.ending.error
            if error is not None:
                name = f"retried/{error.cause}"
                metrics[name] = metrics.get(name, 0) + 1
        return metrics

    async def _final_rewards(self, endings: Sequence[Ending]) -> Sequence[Reward | None]:
        """Ask the group aggregator, if there is one; ``None`` keeps a member's own reward."""
        aggregate = self.handle.parts().group_reward
        if aggregate is None:
            return [None] * len(endings)
        try:
            return await aggregate([_member(ending) for ending in endings])
        except (AggregatorError, UnscoredError) as fault:
            return self._penalised(endings, fault)

    def _penalised(self, endings: Sequence[Ending], fault: Exception) -> list[Reward]:
        """Return every member's reward when group rewards failed: the penalty of ``on_error``.

        Raises:
            EpisodeError: It states no penalty.
        """
        penalty = self.handle.parts().outcomes.errors.penalty(Cause.REWARD)
        if penalty is None:
            raise EpisodeError(
                str(fault), cause=Cause.REWARD, task=self.handle.name, sample_id=self.sample.id
            ) from fault
        return [Reward(penalty, {f"error/{Cause.REWARD}": 1.0}) for _ in endings]

    async def cleanup(self) -> None:
        """Close every episode that was ever made here. Never raises; safe to call again.

        Of a builder that is rolled out by several tasks together, each closes its own. A task that
        has made none closes all. It runs to its end even if the caller is cancelled, once or
        repeatedly.
        """
        own = self._made_by(asyncio.current_task())
        envs = own or [env for _, env in self._envs]
        self._envs = [each for each in self._envs if each[1] not in envs]
        await uninterrupted(lambda: self._release(envs))

    async def _release(self, envs: Sequence[InspectEnv]) -> None:
        closing = [env.close() for env in envs if not env.released]
        results = await asyncio.gather(*closing, return_exceptions=True)
        if self._recording is not None:
            await self._recording.write(envs)
        for env in envs:
            env.forget()
        for result in results:
            if isinstance(result, Exception):
                logger.warning("task %r: closing an episode failed: %s", self.handle.name, result)

    def logging_tags(self) -> list[str]:
        """Tag metrics with the task's name."""
        return [self.handle.name]

    def __getstate__(self) -> dict[str, Any]:
        """Pickle without live envs.

        Raises:
            TaskError: The sample holds something that cannot be sent to another process.
        """
        try:
            sample = pickle.dumps(self.sample)
        except Exception as error:  # each type of object has its own
            raise TaskError(
                f"task {self.handle.name!r}, sample {self.sample.id!r}: it cannot be sent to "
                f"another process ({error}); its metadata must be plain data"
            ) from error
        fresh: dict[str, Any] = {"_envs": [], "_recording": self._new_recording()}
        return {**self.__dict__, "sample": sample, **fresh}

    def __setstate__(self, state: dict[str, Any]) -> None:
        """Unpickle."""
        self.__dict__.update(state, sample=pickle.loads(state["sample"]))

    def _new_recording(self) -> GroupRecording | None:
        run = log_run(self.handle)
        slot = GroupSlot(self.batch, self.index, self.groups, step_known=self.step_known)
        return None if run is None else GroupRecording(run, slot)


def _least_honest(
    envs: Sequence[InspectEnv], endings: Sequence[Ending], finals: Sequence[Reward | None]
) -> float:
    """Return the least reward of the members that did not fail; infinity if there is none."""
    members = zip(envs, endings, finals, strict=True)
    totals = [env.total(final) for env, ending, final in members if ending.error is None]
    return min((total for total in totals if total is not None), default=math.inf)


def _member(ending: Ending) -> GroupMember:
    return GroupMember(result=ending.result, reward=None if ending.error else ending.reward)


def budgets(options: DatasetOptions) -> RolloutLimits | None:
    """Return the budgets for the cookbook's runner, which keep replies in the context window."""
    limits, window = options.rollout_limits, options.context_window
    if window is None:
        return limits
    limits = limits or RolloutLimits()
    least = min(window, limits.max_trajectory_tokens or window)
    return chz.replace(limits, max_trajectory_tokens=least)
