"""A bound on sandboxes holds across threads, loops and evals, and no waiter waits for ever."""

from __future__ import annotations

import asyncio
from pathlib import Path

import inspect_ai
import pytest
from inspect_ai import Task
from inspect_ai.dataset import Sample
from inspect_ai.scorer import Score, Target, includes, mean
from inspect_ai.solver import Generate, TaskState, generate, use_tools
from tests.functions import make_scorer, make_solver
from tests.rl.policies import END, Words, encode, renderer, tool_call
from tests.rl.tasks import look
from tests.waiting import until
from tinker_cookbook.rl.rollout_limits import RolloutLimits
from tinker_cookbook.rl.rollout_strategy import FailFast, MinViableGroup, RetryOnFailure
from tinker_cookbook.rl.rollouts import do_group_rollout

from inspect_tinker_plugin.processes.loops import Places
from inspect_tinker_plugin.rl.dataset import InspectRLDataset, as_rl_dataset


class _Crowd:
    def __init__(self) -> None:
        self.now = 0
        self.most = 0


@make_solver
async def linger(state: TaskState, generate: Generate, crowd: _Crowd) -> TaskState:
    crowd.now += 1
    crowd.most = max(crowd.most, crowd.now)
    await until(lambda: crowd.most >= 2)
    await asyncio.sleep(0.02)
    crowd.now -= 1
    return state


@make_scorer(mean())
async def one(state: TaskState, target: Target) -> Score:
    return Score(value=1)


def _dataset(crowd: _Crowd, *, group_size: int) -> InspectRLDataset:
    task = Task(
        dataset=[Sample(id=1, input="?", target="!")],
        solver=linger(crowd),
        scorer=one(),
        sandbox="local",
    )
    return as_rl_dataset(task, renderer(), group_size=group_size, max_sandboxes=2)


async def _all_end(dataset: InspectRLDataset) -> None:
    builder = dataset.get_batch(0)[0]
    try:
        envs = await builder.make_envs()
        await asyncio.gather(*[env.initial_observation() for env in envs])
    finally:
        await builder.cleanup()


async def test_an_eval_in_the_same_process_does_not_lift_the_bound(tmp_path: Path) -> None:
    crowd = _Crowd()
    rollouts = asyncio.ensure_future(_all_end(_dataset(crowd, group_size=12)))
    await asyncio.sleep(0.05)
    plain = Task(dataset=[Sample(input="?", target="!")], solver=[], scorer=one())
    await inspect_ai.eval_async(plain, model="mockllm/model", log_dir=str(tmp_path))
    await _all_end(_dataset(crowd, group_size=4))
    await rollouts
    assert crowd.most == 2


async def test_a_cancelled_waiter_gives_its_place_to_the_next() -> None:
    places = Places()
    entered: list[str] = []

    async def hold(name: str, gate: asyncio.Event) -> None:
        async with places.place(1):
            entered.append(name)
            await gate.wait()

    async with places.place(1):
        gate = asyncio.Event()
        second, third = (asyncio.ensure_future(hold(name, gate)) for name in "bc")
        await asyncio.sleep(0)
    second.cancel()  # it has been given the place, and has not run yet
    gate.set()
    await asyncio.wait_for(third, 60)
    assert second.cancelled()
    assert entered == ["c"]


async def test_a_waiter_of_a_loop_that_is_gone_is_passed_over() -> None:
    places = Places()

    async with places.place(1):
        # Not by asyncio.run(): where nest_asyncio is in force, that leaves its loop open.
        gone = asyncio.new_event_loop()
        places._waiting.append((gone.create_future(), 1))
        gone.close()
    async with asyncio.timeout(60), places.place(1):
        pass


# episodes that the runner has stopped, while others of their group wait

LOOK = tool_call("look", '{"at": "plum"}')


def looking(limits: RolloutLimits | None = None) -> InspectRLDataset:
    task = Task(
        dataset=[Sample(id=1, input="Where is it?", target="plum")],
        solver=[use_tools(look()), generate()],
        scorer=includes(),
        sandbox="local",
    )
    return as_rl_dataset(task, renderer(), group_size=3, max_sandboxes=1, rollout_limits=limits)


@pytest.mark.parametrize(
    "strategy",
    [FailFast(), RetryOnFailure(per_rollout_timeout=50), MinViableGroup(3)],
    ids=lambda strategy: type(strategy).__name__,
)
@pytest.mark.parametrize(
    "limits",
    [
        RolloutLimits(max_turns=2),
        RolloutLimits(max_sampled_tokens=10),
        RolloutLimits(max_trajectory_tokens=500),
    ],
    ids=["turns", "sampled", "trajectory"],
)
async def test_an_episode_over_a_budget_gives_its_place_to_the_next_of_its_group(
    limits: RolloutLimits, strategy: FailFast | RetryOnFailure | MinViableGroup
) -> None:
    [builder] = looking(limits).get_batch(0)
    group = await do_group_rollout(builder, Words([LOOK]), strategy)
    assert group.get_total_rewards() == [0.0] * 3
    assert all(metrics["score/includes"] == 0.0 for metrics in group.metrics_G)


async def test_a_task_that_makes_one_call_of_an_env_does_not_end_its_episode() -> None:
    [builder] = looking().get_batch(0)
    env, *_ = await builder.make_envs()
    await asyncio.create_task(env.initial_observation())
    step = await asyncio.create_task(env.step(encode(LOOK + END)))
    assert not step.episode_done
    last = await asyncio.create_task(env.step(encode("plum" + END)))
    assert last.reward == 1.0
    await builder.cleanup()
