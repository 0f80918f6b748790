"""Random sequences of calls on an episode: none hangs, nothing leaks, no reward is invented."""

from __future__ import annotations

import asyncio
import gc
from collections.abc import Coroutine
from typing import Any

import pytest
from hypothesis import HealthCheck, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, rule
from inspect_ai import Task
from inspect_ai.dataset import Sample
from inspect_ai.scorer import Score, Target, mean
from inspect_ai.solver import Generate, TaskState
from tests.episode import sandbox_folder
from tests.functions import make_scorer, make_solver
from tests.rl.policies import END, encode, renderer
from tinker_cookbook.rl.types import InitialObservationOverflow, StepResult, Trajectory

from inspect_tinker_plugin.contracts.episodes import EpisodeState
from inspect_tinker_plugin.contracts.errors import EpisodeClosedError, EpisodeError
from inspect_tinker_plugin.episode import runner as episode_runner
from inspect_tinker_plugin.episode.runner import Episode
from inspect_tinker_plugin.episode.sandbox import sandbox_places
from inspect_tinker_plugin.rl.dataset import as_rl_dataset
from inspect_tinker_plugin.rl.ending import Ending
from inspect_tinker_plugin.rl.env import InspectEnv

PATIENCE = 20.0
_scored: list[float] = []


@make_solver
async def twice(state: TaskState, generate: Generate) -> TaskState:
    for _ in range(2):
        state = await generate(state)
        await asyncio.sleep(sandbox_folder.PAUSE)
    return state


@make_scorer(mean())
async def counted(state: TaskState, target: Target) -> Score:
    """A value that no other run of the scorer gives."""
    await asyncio.sleep(sandbox_folder.PAUSE)
    _scored.append(1.0 + len(_scored) / 1024)
    return Score(value=_scored[-1])


def make_task() -> Task:
    return Task(
        dataset=[Sample(id=1, input="?", target="!", files={"word": "plum"})],
        solver=twice(),
        scorer=counted(),
        sandbox=sandbox_folder.PROVIDER,
    )


class EpisodeCalls(RuleBasedStateMachine):
    """One env and all its callers: rollout, group, clean-up, time-outs, the garbage collector.

    A rule that does not apply does nothing. There are no preconditions: which calls are done
    depends on time, and Hypothesis needs the choice of rules to be repeatable.
    """

    @initialize()
    def make(self) -> None:
        self.loop = asyncio.new_event_loop()
        _scored.clear()
        [self.builder] = as_rl_dataset(make_task(), renderer()).get_batch(0)
        [env] = self._finish(self.builder.make_envs())
        assert isinstance(env, InspectEnv)
        self.env: InspectEnv | None = env
        self.calls: list[asyncio.Task[Any]] = []
        self.cancelled: set[asyncio.Task[Any]] = set()
        self.state = EpisodeState.NEW

    def _finish(self, call: Coroutine[Any, Any, Any]) -> Any:
        return self.loop.run_until_complete(asyncio.wait_for(call, PATIENCE))

    def _call(self, call: Coroutine[Any, Any, Any]) -> None:
        self.calls.append(self.loop.create_task(call))

    def _forget_calls(self) -> None:
        # A call that was cancelled holds the frames that it was in, and they hold the env.
        self.calls.clear()
        self.cancelled.clear()

    @rule()
    def start(self) -> None:
        if self.env is not None:
            self._call(self.env.initial_observation())

    @rule(text=st.sampled_from(["yes", "no"]))
    def step(self, text: str) -> None:
        if self.env is not None:
            self._call(self.env.step(encode(text + END)))

    @rule()
    def settle(self) -> None:
        if self.env is not None:
            self._call(self.env.settle())

    @rule()
    def close(self) -> None:
        if self.env is not None:
            self._call(self.env.close())

    @rule()
    def clean_up(self) -> None:
        self._call(self.builder.cleanup())

    @rule(how=st.sampled_from(["halt", "shut"]))
    def end(self, how: str) -> None:
        if self.env is not None:
            self._finish(_end(self.env.episode, how))

    @rule(seconds=st.sampled_from([0.0, 0.001, 0.004, 0.02, 0.1]))
    def go_on(self, seconds: float) -> None:
        self._finish(asyncio.sleep(seconds))

    @rule(which=st.integers(0, 14), again=st.booleans())
    def cancel(self, which: int, again: bool) -> None:
        call = self.calls[which % len(self.calls)] if self.calls else None
        if call is not None and not call.done():
            self.cancelled.add(call)
            call.cancel()
            if again:
                self._finish(asyncio.sleep(0))
                call.cancel()

    @rule()
    def drop(self) -> None:
        if not all(call.done() for call in self.calls):
            return
        self.env = None
        self.builder._envs = []
        self._forget_calls()
        gc.collect()

    @invariant()
    def states_only_move_on(self) -> None:
        if getattr(self, "env", None) is not None:
            assert self.env is not None
            now = self.env.episode.state
            assert now is self.state or self.state.before(now), f"{self.state} to {now}"
            self.state = now

    @invariant()
    def what_is_given_is_what_was_scored(self) -> None:
        for call in getattr(self, "calls", []):
            if call.done():
                self._check(call)

    def _check(self, call: asyncio.Task[Any]) -> None:
        if call.cancelled():
            assert call in self.cancelled, "it was cancelled, and nobody did"
            return
        error = call.exception()
        if error is not None:
            assert isinstance(error, EpisodeError | EpisodeClosedError | RuntimeError), error
            return
        result = call.result()
        if isinstance(result, Ending):
            assert result.reward is not None
            assert result.reward.value in _scored
        elif isinstance(result, InitialObservationOverflow) or (
            isinstance(result, StepResult) and result.episode_done
        ):
            assert result.reward in _scored
        elif isinstance(result, StepResult):
            assert result.reward == 0.0

    def teardown(self) -> None:
        if not hasattr(self, "loop"):
            return
        self._finish(self.builder.cleanup())
        if self.calls:
            self.loop.run_until_complete(asyncio.wait(self.calls, timeout=PATIENCE))
        assert all(call.done() for call in self.calls), "a call hangs"
        self.what_is_given_is_what_was_scored()
        if self.env is not None and self.env.ending is not None:
            ending = self._finish(self.env.settle()) if self.env.ending.reward else None
            if ending is not None:
                unpaid = self.env.find_unpaid(Trajectory([], []))  # type: ignore[arg-type]
                assert unpaid == ending.reward.value, "what nobody got is still owed"
        self.env = None
        self._forget_calls()
        gc.collect()
        for _ in range(200):  # a dropped episode is released in its own time
            left = asyncio.all_tasks(self.loop)
            if not left and not episode_runner._running:
                break
            self._finish(asyncio.sleep(0.01))
        assert not asyncio.all_tasks(self.loop)
        assert not episode_runner._running
        assert not sandbox_folder.alive
        assert sandbox_places(sandbox_folder.PROVIDER).alive == 0
        released = [number for number, _ in sandbox_folder.releases]
        assert len(released) == len(set(released)), "a sandbox was released twice"
        assert not any(interrupted for _, interrupted in sandbox_folder.releases)
        self.loop.close()


async def _end(episode: Episode, how: str) -> None:
    """Ask for the end from inside the loop, as envs and rollouts do."""
    if how == "halt":
        episode.halt("out of time")
    else:
        episode.shut()


def make_settings(max_examples: int) -> settings:
    return settings(
        max_examples=max_examples,
        stateful_step_count=12,
        deadline=None,
        derandomize=True,
        suppress_health_check=list(HealthCheck),
    )


class ManyEpisodeCalls(EpisodeCalls):
    """The same with more sequences."""


TestEpisodeCalls = EpisodeCalls.TestCase
TestEpisodeCalls.settings = make_settings(8)
TestManyEpisodeCalls = pytest.mark.nightly(ManyEpisodeCalls.TestCase)
TestManyEpisodeCalls.settings = make_settings(60)
