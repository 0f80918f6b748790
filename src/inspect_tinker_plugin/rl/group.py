"""A group of episodes of one sample as a cookbook ``EnvGroupBuilder``."""

from __future__ import annotations

import asyncio
import math
import pickle
import weakref
from collections.abc import Sequence
from contextvars import ContextVar
from dataclasses import replace
from functools import partial
from logging import getLogger
from pathlib import Path
from typing import Any

import chz
from inspect_ai.dataset import Sample
from tinker_cookbook.rl.rollout_limits import RolloutLimits
from tinker_cookbook.rl.types import (
    PARSE_ERROR_MASKED_METRIC_KEY,
    Env,
    EnvGroupBuilder,
    Metrics,
    Trajectory,
    Transition,
)

from inspect_tinker_plugin.contracts.episodes import FAILED
from inspect_tinker_plugin.contracts.errors import Cause, EpisodeError, TaskError
from inspect_tinker_plugin.contracts.hooks import Memory, ToolScope
from inspect_tinker_plugin.logs import GroupSlot, Rollout, RolloutStatus, write_group
from inspect_tinker_plugin.logs.rollout import read_group, rebuild_group, record_trajectory
from inspect_tinker_plugin.options import DatasetOptions
from inspect_tinker_plugin.processes.loops import run_uninterrupted
from inspect_tinker_plugin.rewards import AggregatorError, GroupMember, Reward, UnscoredError
from inspect_tinker_plugin.rewards.group import spend_in
from inspect_tinker_plugin.rl.ending import Ending, Received
from inspect_tinker_plugin.rl.env import InspectEnv, wait_to_start
from inspect_tinker_plugin.rl.hooks import EpisodeHooks
from inspect_tinker_plugin.rl.task_handle import TaskHandle
from inspect_tinker_plugin.samplers import OutcomeFile
from inspect_tinker_plugin.tasks.loading import with_roles
from inspect_tinker_plugin.tokens.continuation import Turn
from inspect_tinker_plugin.tokens.episode import EpisodeTokens
from inspect_tinker_plugin.tokens.prompts import PromptCache

logger = getLogger(__name__)

LOST_REPLIES = "tokens/lost_replies"
"""Metric of replies that the scored state holds and the trainer's trajectory does not."""


_Maker = weakref.ref[asyncio.Task[Any]]
_maker: ContextVar[_Maker | None] = ContextVar("maker", default=None)
"""The rollout that makes envs; the cookbook 0.6 cleans up in a task of that one's context."""


class InspectGroupBuilder(EnvGroupBuilder):
    """Builds ``group_size`` episodes of one sample.

    It pickles with plain ``pickle`` and holds nothing live until ``make_envs()``, so it
    works under ``set_rollout_executor`` with a spawn process pool or on Ray.

    Args:
        handle: Task, renderer and options of the dataset.
        sample: The sample, with an id.
        slot: Its position in the training.
        outcome: Where the group's rewards go, if a sampler learns from them.
        size: Episodes of the group, if not ``group_size``.
    """

    def __init__(
        self,
        handle: TaskHandle,
        sample: Sample,
        slot: GroupSlot,
        *,
        outcome: OutcomeFile | None = None,
        size: int | None = None,
    ) -> None:
        self.handle = handle
        self.sample = sample
        self.slot = slot
        self.outcome = outcome
        self.size = handle.options.group_size if size is None else size
        self._envs: list[tuple[_Maker, InspectEnv]] = []
        self._finished: list[tuple[float, Metrics]] | None = None

    async def take_finished(self, log: Path) -> list[Trajectory] | None:
        """Take the group from the log of a run that was stopped, instead of rolling it out.

        Returns:
            Its trajectories, whose rewards :meth:`compute_group_rewards` returns; ``None`` if the
            log is of another sample, or does not keep what was sampled.
        """
        run = self.handle.log_run
        assert run is not None
        records = await asyncio.to_thread(read_group, log, self.slot.index)
        given = rebuild_group(records)
        if given is None or any(record.id != self.sample.id for record in records):
            return None
        trajectories, self._finished = given
        await write_group(run, self.slot, records)
        return trajectories

    async def make_envs(self) -> Sequence[Env]:
        """Make the group's envs; no episode or sandbox starts before their first step.

        Strategies that retry call it again: the epochs of the new envs continue the numbering.
        """
        await wait_to_start()
        if self.outcome is not None:
            self.outcome.check()
        parts = self.handle.parts()
        await self.handle.announce()
        shared = PromptCache()
        memory: Memory = {}
        task = asyncio.current_task()
        assert task is not None
        maker = weakref.ref(task)
        _maker.set(maker)
        made = len(self._own_envs())
        limits = budgets(self.handle.options)
        envs = []
        for member in range(self.size):
            epoch = made + member + 1
            tokens = EpisodeTokens(
                parts.context,
                task=self.handle.name,
                sample_id=self.sample.id,
                epoch=epoch,
                shared_prompts=shared,
                context_window=self.handle.options.context_window,
            )
            scope = ToolScope(
                task=self.handle.name,
                sample_id=self.sample.id,
                epoch=epoch,
                group=memory,
                dataset=parts.memory,
            )
            episode = parts.runner.episode(self.sample, epoch=epoch)
            env = InspectEnv(
                episode,
                tokens,
                parts.outcomes,
                hooks=EpisodeHooks(parts.executor, scope, parts.observers, parts.live),
                rollout_limits=limits,
                pays_in_steps=parts.group_reward is None,
            )
            env.refusal = parts.outcomes.failures.refusal(self.sample.id) if made else None
            envs.append(env)
        self._envs += [(maker, env) for env in envs]
        return envs

    def _own_envs(self) -> list[InspectEnv]:
        """Return what the current rollout has made."""
        own = _maker.get()
        return [env for maker, env in self._envs if maker == own]

    async def compute_group_rewards(
        self, trajectory_group: list[Trajectory], env_group: Sequence[Env]
    ) -> list[tuple[float, Metrics]]:
        """Score the episodes that the trainer's own limits cut off, and apply the group aggregator.

        Each trajectory's transitions are put in the order of the episode's branches, and
        the trainer makes one datum of each branch. When what is paid: docs/design/episodes.md.

        Returns:
            One ``(reward, metrics)`` per trajectory, to be added to its steps' rewards.

        Raises:
            EpisodeError: A member failed and ``on_error`` says to raise.
        """
        if (rewards := self._finished) is None:
            rewards = await self._group_rewards(trajectory_group, env_group)
            for trajectory, env, reward in zip(trajectory_group, env_group, rewards, strict=True):
                if isinstance(env, InspectEnv):
                    leave_out(trajectory, env.side_turns, env.unheard_turns)
                    arrange(trajectory, env.tokens.turns)
                    if self.handle.log_run is not None:
                        env.received = Received(trajectory, *reward)
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
        # All are waited for before the first failure is raised.
        await asyncio.gather(*(env.settle() for env in envs), return_exceptions=True)
        endings = [await env.settle() for env in envs]
        finals = await self._final_rewards(endings)
        least = _least_honest(envs, endings, finals)
        if (group_reward := self.handle.parts().group_reward) is not None:
            least = min(least, group_reward.least)
        result: list[tuple[float, Metrics]] = []
        for env, ending, final, trajectory in zip(
            envs, endings, finals, trajectory_group, strict=True
        ):
            value = env.find_unpaid(trajectory) + env.group_share(final)
            metrics: Metrics = {FAILED: float(ending.error is not None)}
            metrics |= {} if result else self._count_retried(envs)
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
        for env in self._own_envs():
            error = None if env.ending is None or env in envs else env.ending.error
            if error is not None:
                name = f"retried/{error.cause}"
                metrics[name] = metrics.get(name, 0) + 1
        return metrics

    async def _final_rewards(self, endings: Sequence[Ending]) -> Sequence[Reward | None]:
        """Ask the group aggregator, if there is one; ``None`` keeps a member's own reward.

        Raises:
            EpisodeError: It failed, and ``on_error`` states no penalty.
        """
        parts = self.handle.parts()
        if parts.group_reward is None:
            return [None] * len(endings)
        members = [
            GroupMember(each.result, None if each.error else each.reward) for each in endings
        ]
        roles = parts.runner.model_roles
        try:
            with with_roles(roles), spend_in(self.handle.run_folder):
                finals = await parts.group_reward(members)
        except (AggregatorError, UnscoredError) as fault:
            penalty = parts.outcomes.errors.penalty(Cause.REWARD)
            if penalty is None:
                raise EpisodeError(
                    str(fault), cause=Cause.REWARD, task=self.handle.name, sample_id=self.sample.id
                ) from fault
            failed: Metrics = {f"error/{Cause.REWARD}": 1.0, FAILED: 1.0}
            return [Reward(penalty, failed)] * len(endings)
        for ending, final in zip(endings, finals, strict=True):
            if final is not None:
                parts.outcomes.note_paid(ending.result, final.value)
        return finals

    async def cleanup(self) -> None:
        """Close the episodes that this rollout has made; all, if it has made none. Never raises.

        It runs to its end even if the caller is cancelled.
        """
        own = self._own_envs()
        envs = own or [env for _, env in self._envs]
        self._envs = [each for each in self._envs if each[1] not in envs]
        await run_uninterrupted(lambda: self._release(envs))

    async def _release(self, envs: Sequence[InspectEnv]) -> None:
        closing = (env.close() for env in envs)
        results = await asyncio.gather(*closing, return_exceptions=True)
        if (run := self.handle.log_run) is not None and envs:
            rollouts = [_describe_rollout(env) for env in envs if env.episode.task is not None]
            await write_group(run, self.slot, rollouts)
        for env in envs:
            env.forget()
        for result in results:
            if isinstance(result, Exception):
                logger.warning("task %r: closing an episode failed: %s", self.handle.name, result)

    def logging_tags(self) -> list[str]:
        """Tag metrics with the task's name."""
        return [self.handle.name]

    def __getstate__(self) -> dict[str, Any]:
        """Pickle without live envs."""
        try:
            sample = pickle.dumps(self.sample)
        except Exception as error:  # each type of object has its own
            raise TaskError(
                f"task {self.handle.name!r}, sample {self.sample.id!r}: it cannot be sent to "
                f"another process ({error}); its metadata must be plain data"
            ) from error
        return {**self.__dict__, "sample": sample, "_envs": []}

    def __setstate__(self, state: dict[str, Any]) -> None:
        """Unpickle."""
        self.__dict__.update(state, sample=pickle.loads(state["sample"]))


def _describe_rollout(env: InspectEnv) -> Rollout:
    """Say for the log what a closed env's rollout was, and what the trainer received for it."""
    ending, received = env.ending, env.received
    metrics: Metrics = dict(env.tokens.metrics)
    of_reward: set[str] = set()
    if ending is not None:
        metrics |= {"turns": ending.result.turns, **ending.result.metrics}
        if ending.reward is not None:
            metrics |= ending.reward.metrics
            of_reward |= ending.reward.metrics.keys()
    given: dict[str, Any] = {}
    if received is not None:
        trajectory, of_group, group_metrics = received
        steps = trajectory.transitions
        metrics |= {**(steps[-1].metrics if steps else {}), **group_metrics}
        of_reward |= group_metrics.keys() - {LOST_REPLIES, FAILED}
        given = {
            "reward": sum(step.reward for step in steps) + of_group,
            "stop_reason": trajectory.stop_reason,
            "sampled": partial(record_trajectory, trajectory, of_group),
        }
    return Rollout(
        sample=env.episode.sample,
        epoch=env.episode.epoch,
        status=_status(env),
        build=env.episode.build_log,
        error=None if ending is None else ending.error,
        metrics=metrics,
        reward_metrics=of_reward,
        choices=() if ending is None else ending.result.state.choices,
        **given,
    )


def _status(env: InspectEnv) -> RolloutStatus:
    if env.received is not None:
        return RolloutStatus.GRADED
    if env.ending is None:
        return RolloutStatus.CUT
    return RolloutStatus.DROPPED if env.ending.error is None else RolloutStatus.FAILED


def _least_honest(
    envs: Sequence[InspectEnv], endings: Sequence[Ending], finals: Sequence[Reward | None]
) -> float:
    """Return the least reward of the members that did not fail; infinity if there is none."""
    members = zip(envs, endings, finals, strict=True)
    totals = [env.total(final) for env, ending, final in members if ending.error is None]
    return min((total for total in totals if total is not None), default=math.inf)


def budgets(options: DatasetOptions) -> RolloutLimits | None:
    """Return the budgets for the cookbook's runner, which keep replies in the context window."""
    limits, window = options.rollout_limits, options.context_window
    if window is None:
        return limits
    limits = limits or RolloutLimits()
    least = min(window, limits.max_trajectory_tokens or window)
    return chz.replace(limits, max_trajectory_tokens=least)


def arrange(trajectory: Trajectory, turns: Sequence[Turn]) -> None:
    """Put the transitions of a trajectory in branch order, in place.

    The cookbook joins a transition to the one before it when its prompt begins with that whole
    sequence. A solver that runs several conversations at once interleaves their turns, so no turn
    would follow its own. In branch order each branch of the episode is one datum; sums over a
    trajectory do not depend on the order.
    """
    trajectory.transitions[:] = in_branch_order(trajectory.transitions, turns)


def leave_out(trajectory: Trajectory, side: Sequence[bool], unheard: Sequence[bool]) -> None:
    """Mark turns that are not trained on, with the mark for those whose calls cannot be read.

    A program that asks for no model under the policy's own name has no main line to keep, and all
    its turns stay.
    """
    keep_side = all(side)
    for transition, aside, lost in zip(trajectory.transitions, side, unheard, strict=False):
        if lost or (aside and not keep_side):
            transition.metrics[PARSE_ERROR_MASKED_METRIC_KEY] = 1.0


def in_branch_order(transitions: Sequence[Transition], turns: Sequence[Turn]) -> list[Transition]:
    """Return transitions branch by branch, each without the part of its reply that no solver saw.

    Args:
        transitions: those of a trajectory, in time order.
        turns: the answered turns of its episode, in time order.

    Returns:
        The transitions, branch by branch in the order of their first turns; the branch of the
        last turn comes last, so that the transition that ended the episode stays last. A
        transition that belongs to no turn (a runner's own, without tokens) keeps its place
        among the first turns of branches.
    """
    branches: list[list[int]] = []
    open_ends: dict[int, list[int]] = {}
    result = list(transitions)
    for index, transition in enumerate(transitions):
        turn = turns[index] if index < len(turns) else None
        if turn is None or not _is_of(transition, turn):
            branches.append([index])
            continue
        result[index] = _drop_unseen(transition, turn)
        branch = open_ends.pop(id(turn.parent), None)
        if branch is None:
            branch = []
            branches.append(branch)
        branch.append(index)
        open_ends[id(turn)] = branch
    last = len(transitions) - 1
    branches.sort(key=lambda branch: branch[-1] == last)
    return [result[index] for branch in branches for index in branch]


def _is_of(transition: Transition, turn: Turn) -> bool:
    return transition.ob.length == turn.length and tuple(transition.ac.tokens) == turn.sampled


def _drop_unseen(transition: Transition, turn: Turn) -> Transition:
    """Drop tokens sampled after the end of a reply, which nothing that was scored depends on."""
    action = transition.ac
    if turn.kept == len(action.tokens):
        return transition
    logprobs = action.maybe_logprobs
    # Everything else stays, such as the sequence's id, which an asynchronous loss needs.
    kept = replace(
        action,
        tokens=action.tokens[: turn.kept],
        maybe_logprobs=None if logprobs is None else logprobs[: turn.kept],
    )
    return replace(transition, ac=kept)
