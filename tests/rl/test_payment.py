"""Every score reaches the trainer as a reward exactly once, or is raised as an error."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Sequence
from typing import Any

import pytest
import tinker
from inspect_ai import Task
from inspect_ai.dataset import Sample
from inspect_ai.scorer import Scorer, includes, match
from inspect_ai.solver import generate, use_tools
from tests.rl.policies import END, Words, encode, renderer, roll_out_task, tool_call
from tests.rl.tasks import adding, arithmetic, crashing, nap, sums
from tinker_cookbook.completers import TokensWithLogprobs
from tinker_cookbook.rl.rollout_limits import ParseErrorPolicy, RolloutLimits
from tinker_cookbook.rl.rollout_runner import run_rollout
from tinker_cookbook.rl.types import StepResult, Trajectory, TrajectoryGroup, Transition
from tinker_cookbook.utils.misc_utils import all_same

from inspect_tinker_plugin.contracts.errors import Cause, EpisodeError
from inspect_tinker_plugin.contracts.hooks import EpisodeEnded, EpisodeObserver
from inspect_tinker_plugin.rl.dataset import as_rl_dataset
from inspect_tinker_plugin.rl.env import InspectEnv
from inspect_tinker_plugin.rl.hooks import Observers

Observe = Callable[[EpisodeObserver], None]


@pytest.fixture
def observe(monkeypatch: pytest.MonkeyPatch) -> Observe:
    """Attach an observer to every dataset, as a plugin would."""

    def attach(observer: EpisodeObserver) -> None:
        observers = Observers([observer])
        monkeypatch.setattr(
            "inspect_tinker_plugin.rl.task_handle.episode_observers",
            lambda *a, **k: observers,
        )

    return attach


@pytest.fixture(autouse=True)
async def warm() -> None:
    """Load what the first rollout of a process loads, before time-outs count."""
    await group_of(arithmetic(), ["1"])


class Slow(EpisodeObserver):
    """Takes its time at the end of an episode, and counts how often it is told."""

    def __init__(self, seconds: float) -> None:
        self.seconds = seconds
        self.told = 0

    async def on_episode_end(self, event: EpisodeEnded, /) -> None:
        self.told += 1
        await asyncio.sleep(self.seconds)


async def group_of(task: Task, lines: Sequence[Any], **options: Any) -> TrajectoryGroup:
    return await roll_out_task(task, lines, **{"group_size": 3, **options})


TIMEOUT = RolloutLimits(rollout_timeout_seconds=4.0)


def one(scorer: Scorer) -> Task:
    return Task(dataset=sums(1), solver=generate(), scorer=scorer, name="one")


async def test_a_timeout_while_an_observer_is_told_pays_the_score_in_full(observe: Observe) -> None:
    slow = Slow(5.0)
    observe(slow)
    group = await group_of(one(match()), ["1"], rollout_limits=TIMEOUT)
    assert group.get_total_rewards() == [1.0, 1.0, 1.0]
    assert slow.told == 3
    assert [m["score/match"] for m in group.metrics_G] == [1.0, 1.0, 1.0]


async def test_a_timeout_while_an_observer_is_told_raises_or_pays_the_penalty(
    observe: Observe,
) -> None:
    observe(Slow(5.0))
    with pytest.raises(EpisodeError) as raised:
        await group_of(one(crashing()), ["1"], rollout_limits=TIMEOUT)
    assert raised.value.cause is Cause.SCORER
    group = await group_of(one(crashing()), ["1"], rollout_limits=TIMEOUT, on_error=-0.5)
    assert group.get_total_rewards() == [-0.5] * 3


async def test_a_timeout_in_a_reward_function_pays_it_once_and_in_full() -> None:
    calls = []

    async def slow(result: Any) -> float:
        calls.append(result)
        await asyncio.sleep(5.0)
        return 0.7

    group = await group_of(one(match()), ["1"], rollout_limits=TIMEOUT, reward=slow)
    assert group.get_total_rewards() == [0.7] * 3
    assert len(calls) == 3


def constant(members: Sequence[Any]) -> list[float]:
    return [0.3] * len(members)


@pytest.mark.parametrize("own", [0.1, 0.7, 1 / 3])
async def test_equal_group_rewards_are_equal_to_the_last_bit(own: float) -> None:
    rewards = iter([own, 0.0, 1.0])

    async def different(result: Any) -> float:
        return next(rewards)

    group = await group_of(one(match()), ["1"], reward=different, group_reward=constant)
    assert group.get_total_rewards() == [0.3] * 3
    assert all_same(group.get_total_rewards())


async def test_a_group_reward_pays_members_that_the_runner_cut_off_alike(observe: Observe) -> None:
    observe(Slow(0.0))
    limits = RolloutLimits(max_turns=1)
    lines = iter(["The sum is 1. " + tool_call("add", '{"x":1,"y":0}'), "1", "1"])
    group = await group_of(
        adding(),
        [lambda prompt: next(lines)],
        group_reward=constant,
        rollout_limits=limits,
    )
    assert {t.stop_reason for t in group.trajectories_G} == {"max_turns", "completed"}
    assert group.get_total_rewards() == [0.3] * 3


async def test_members_without_a_group_reward_keep_their_own() -> None:
    group = await group_of(one(crashing()), ["1"], group_reward="rank", on_error=-0.25)
    assert group.get_total_rewards() == [-0.25] * 3


BAD = "<tool_call>\n{not json}\n</tool_call>"


async def graded(
    env_count: int, lines: Sequence[str], policy: ParseErrorPolicy, **options: Any
) -> list[float]:
    builder = as_rl_dataset(adding(), renderer(), group_size=env_count, **options).get_batch(0)[0]
    envs = await builder.make_envs()
    trajectories = [await run_rollout(Words(lines), env, parse_errors=policy) for env in envs]
    finals = await builder.compute_group_rewards(trajectories, envs)
    await builder.cleanup()
    steps = [sum(t.reward for t in trajectory.transitions) for trajectory in trajectories]
    return [of_steps + final for of_steps, (final, _) in zip(steps, finals, strict=True)]


@pytest.mark.parametrize(
    ("lines", "policy", "total"),
    [
        pytest.param(
            [BAD, "1"], ParseErrorPolicy(max_consecutive=1, penalty_per_error=0.25), 0.05, id="each"
        ),
        pytest.param(
            [BAD], ParseErrorPolicy(max_consecutive=0, terminal_reward=-1.0), -0.7, id="terminal"
        ),
    ],
)
async def test_a_group_reward_does_not_take_penalties_back(
    lines: list[str], policy: ParseErrorPolicy, total: float
) -> None:
    assert await graded(2, lines, policy, group_reward=constant) == pytest.approx([total] * 2)
    # and a member for which the aggregator returns None keeps its own reward
    own = await graded(2, lines, policy)
    assert await graded(2, lines, policy, group_reward=its_own) == own


def its_own(members: Sequence[Any]) -> list[Any]:
    return [member.reward for member in members]


async def test_a_step_result_that_the_trainer_lost_is_paid_by_the_group() -> None:
    [builder] = as_rl_dataset(one(match()), renderer()).get_batch(0)
    [env] = await builder.make_envs()
    await env.initial_observation()
    final = await env.step(encode("1" + END))
    assert final.reward == 1.0
    kept = await builder.compute_group_rewards([Trajectory([_transition(final)], _empty())], [env])
    lost = await builder.compute_group_rewards([Trajectory([], _empty())], [env])
    assert [kept[0][0], lost[0][0]] == [0.0, 1.0]
    await builder.cleanup()


def _transition(result: StepResult) -> Transition:
    tokens = TokensWithLogprobs(tokens=[1], maybe_logprobs=[0.0])
    return Transition(_empty(), tokens, result.reward, result.episode_done, result.metrics)


def _empty() -> tinker.ModelInput:
    return tinker.ModelInput.empty()


async def test_a_reply_lost_in_mid_tool_is_scored_as_in_an_eval_and_counted() -> None:
    task = Task(
        dataset=[Sample(id=1, input="Say plum.", target="plum")],
        solver=[use_tools(nap()), generate()],
        scorer=includes(),
    )
    lines = ["plum " + tool_call("nap", "{}")]
    group = await group_of(task, lines, rollout_limits=TIMEOUT, group_size=1)
    [trajectory] = group.trajectories_G
    assert [t.ac.tokens for t in trajectory.transitions] == [[]]
    assert trajectory.stop_reason == "rollout_timeout"
    assert group.get_total_rewards() == [1.0]
    assert group.metrics_G[0]["score/includes"] == 1.0
    assert group.metrics_G[0]["tokens/lost_replies"] == 1


async def test_settle_raises_when_there_is_no_reward_however_often_it_is_asked() -> None:
    [builder] = as_rl_dataset(one(crashing()), renderer()).get_batch(0)
    [env] = await builder.make_envs()
    assert isinstance(env, InspectEnv)
    await env.initial_observation()
    with pytest.raises(EpisodeError):
        await env.step(encode("1" + END))
    for _ in range(2):
        with pytest.raises(EpisodeError):
            await env.settle()
    with pytest.raises(EpisodeError):
        await builder.compute_group_rewards([Trajectory([], _empty())], [env])
    await builder.cleanup()
