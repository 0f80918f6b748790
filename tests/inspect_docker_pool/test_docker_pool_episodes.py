"""Episodes in `docker_pool`: pre-warmed by the dataset, measured, killed on a real engine."""

from __future__ import annotations

import asyncio
import gc
import subprocess
import threading
from pathlib import Path
from typing import Any

import pytest
from inspect_ai import Task
from inspect_ai.dataset import Sample
from inspect_ai.scorer import includes
from inspect_ai.solver import generate, use_tools
from inspect_ai.tool import bash
from inspect_ai.util import SandboxEnvironmentSpec
from tests.rl.policies import END, Words, encode, renderer, tool_call
from tests.waiting import until
from tinker_cookbook.rl.rollout_limits import RolloutLimits
from tinker_cookbook.rl.rollout_strategy import RetryOnFailure
from tinker_cookbook.rl.rollouts import do_group_rollout
from tinker_cookbook.rl.types import TrajectoryGroup

from inspect_docker_pool import DockerPoolConfig
from inspect_docker_pool.compose import parse_config
from inspect_docker_pool.context import process_metrics
from inspect_docker_pool.environment import DockerPoolSandboxEnvironment
from inspect_docker_pool.manager import PoolManager, pool_manager
from inspect_tinker_plugin import inspect_internals
from inspect_tinker_plugin.contracts.errors import Cause, EpisodeError
from inspect_tinker_plugin.episode.sandbox import sandbox_places
from inspect_tinker_plugin.rl import prewarm
from inspect_tinker_plugin.rl.dataset import as_rl_dataset
from inspect_tinker_plugin.rl.env import InspectEnv

pytestmark = pytest.mark.docker

IMAGE = "inspect-rl-test/python:1"


def in_pool(count: int = 1, **config: Any) -> Task:
    given = DockerPoolConfig(image=IMAGE, environment={"POOL": str(config)}, **config)
    samples = [
        Sample(id=number, input=f"{number}: what is in f?", target="plum", files={"f": "plum"})
        for number in range(count)
    ]
    return Task(
        dataset=samples,
        solver=[use_tools(bash(timeout=20)), generate()],
        scorer=includes(),
        sandbox=SandboxEnvironmentSpec("docker_pool", given),
    )


READ = tool_call("bash", '{"command":"cat f"}')


async def test_a_group_works_in_containers_of_its_own_and_says_what_they_cost() -> None:
    dataset = as_rl_dataset(in_pool(), renderer(), group_size=4)

    def line(prompt: str) -> str:
        return "It says plum." if "<tool_response>" in prompt else READ

    group = await do_group_rollout(dataset.get_batch(0)[0], Words([line]))
    assert group.get_total_rewards() == [1.0] * 4
    metrics = group.trajectories_G[0].transitions[-1].metrics
    assert metrics["sandbox/acquire_s"] >= 0
    assert metrics["sandbox/exec_s"] > 0


def three_batches(**config: Any) -> Task:
    """Six samples: the groups of one batch of two, and of the two batches after it."""
    return in_pool(6, warm=0, **config)


def says_it_for_even_samples(prompt: str) -> str:
    number = int(prompt.split(": what is in f?")[0][-1])
    return "It says plum." if "<tool_response>" in prompt and number % 2 == 0 else READ


def containers_of(manager: PoolManager) -> int:
    filters = [f"--filter=label=inspect-tinker-plugin.owner={manager.owner.id}"]
    listed = ["docker", "ps", "--all", "--quiet", *filters]
    return len(subprocess.run(listed, capture_output=True, text=True, check=True).stdout.split())


@pytest.mark.timeout(240)
@pytest.mark.parametrize(
    ("config", "options", "countable"),
    [
        pytest.param({"max": 2}, {}, "containers", id="max"),
        pytest.param(
            {"max": 3}, {"max_sandboxes": 2}, "places", id="both", marks=pytest.mark.nightly
        ),
        pytest.param(
            {}, {"max_sandboxes": 2}, "places", id="max_sandboxes", marks=pytest.mark.nightly
        ),
    ],
)
async def test_groups_of_several_batches_at_once_keep_to_the_limit_and_all_end(
    manager: PoolManager, config: dict[str, Any], options: dict[str, Any], countable: str
) -> None:
    """As the cookbook's asynchronous training runs them, which in 0.6 is not bound to a batch.

    Every second group never ends by itself: the runner's budget stops its episodes. Their places
    are needed by those of the other groups, and of their own.
    """
    dataset = as_rl_dataset(
        three_batches(**config),
        renderer(),
        batch_size=2,
        group_size=3,
        shuffle=False,
        rollout_limits=RolloutLimits(max_turns=2),
        **options,
    )
    places = sandbox_places("docker_pool")
    most = {"containers": 0, "places": 0}

    async def watch() -> None:
        while True:
            most["places"] = max(most["places"], places.alive)
            found = await asyncio.to_thread(containers_of, manager)
            most["containers"] = max(most["containers"], found)
            await asyncio.sleep(0.01)

    watching = asyncio.create_task(watch())
    groups = await asyncio.gather(
        *[
            do_group_rollout(builder, Words([says_it_for_even_samples]), RetryOnFailure(0))
            for batch in range(3)
            for builder in dataset.get_batch(batch)
        ]
    )
    watching.cancel()
    assert [group.get_total_rewards() for group in groups] == [[1.0] * 3, [0.0] * 3] * 3
    assert most[countable] == 2
    assert most["containers"] <= config.get("max", 1000)
    longest = max(waited(group) for group in groups)
    assert longest > 2 * min(waited(group) for group in groups), "those who waited say so"
    assert places.alive == 0
    await until(lambda: not any(pool.state.leased for pool in manager.pools()))


def waited(group: TrajectoryGroup) -> float:
    ends = [trajectory.transitions[-1].metrics for trajectory in group.trajectories_G]
    return max(end.get("sandbox/acquire_s", 0.0) for end in (*ends, *group.metrics_G))


async def test_groups_of_several_batches_that_are_cancelled_leave_no_container(
    manager: PoolManager,
) -> None:
    """As at the end of the cookbook's asynchronous training, when some run and some wait."""
    dataset = as_rl_dataset(
        three_batches(max=2), renderer(), batch_size=2, group_size=3, max_sandboxes=2
    )
    rollouts = [
        asyncio.create_task(do_group_rollout(builder, Words([READ], delay_s=0.2)))
        for batch in range(3)
        for builder in dataset.get_batch(batch)
    ]
    await until(lambda: sandbox_places("docker_pool").alive == 2)
    await asyncio.sleep(0.5)
    for rollout in rollouts:
        rollout.cancel()
    await asyncio.wait(rollouts, timeout=60)
    assert all(rollout.cancelled() for rollout in rollouts)
    assert sandbox_places("docker_pool").alive == 0
    await until(lambda: containers_of(manager) == 0)


def image_per_sample(folder: Path, count: int, run: str = "true", **sample: Any) -> Task:
    samples = []
    for number in range(count):
        path = folder / str(number) / "Dockerfile"
        path.parent.mkdir(parents=True)
        path.write_text(f"FROM {IMAGE}\nRUN {run} && echo {folder} {number} > /which\n")
        config = DockerPoolConfig(file=str(path), warm=0)
        given = SandboxEnvironmentSpec("docker_pool", config)
        samples.append(Sample(id=number, input="x", target="plum", sandbox=given, **sample))
    return Task(dataset=samples, solver=generate(), scorer=includes())


def there(task: Task) -> list[object]:
    """List the samples whose images are on the engine."""
    known = pool_manager().known
    return [s.id for s in task.dataset if s.sandbox and known(parse_config(s.sandbox.config))]


def threads() -> list[threading.Thread]:
    return [each for each in threading.enumerate() if each.name == "prewarm sandboxes"]


async def test_images_are_made_a_bounded_way_ahead_and_no_longer_than_the_dataset_lives(
    manager: PoolManager, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    gc.collect()
    await until(lambda: not threads())
    monkeypatch.setattr(prewarm, "IMAGES_AHEAD", 2)
    task = image_per_sample(tmp_path, 8)
    dataset = as_rl_dataset(task, renderer(), batch_size=2, group_size=2, shuffle=False)
    await until(lambda: there(task) == [0, 1])
    group = await do_group_rollout(dataset.get_batch(0)[0], Words(["plum"]))
    assert group.get_total_rewards() == [1.0] * 2
    await until(lambda: there(task) == [0, 1, 2, 3])
    await asyncio.sleep(1)
    assert there(task) == [0, 1, 2, 3]
    starting = process_metrics().get("sandbox/started", 0)
    dataset.get_batch(2)  # as after a resumption
    await until(lambda: {6, 7} <= set(there(task)))
    await asyncio.sleep(1.5)
    assert there(task) == [0, 1, 2, 3, 6, 7]
    assert process_metrics().get("sandbox/started", 0) == starting, "nobody wants them yet"
    del dataset, group
    gc.collect()
    await until(lambda: not threads())
    await until(lambda: all(pool.state.idle == 0 for pool in manager.pools()))


async def test_an_image_that_cannot_be_made_ahead_is_the_episodes_error(
    manager: PoolManager, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    task = image_per_sample(tmp_path, 1, run="false")
    dataset = as_rl_dataset(task, renderer(), group_size=1)
    await until(lambda: "could not be made ahead" in caplog.text)
    [env] = await dataset.get_batch(0)[0].make_envs()
    with pytest.raises(EpisodeError, match="the build failed") as raised:
        await env.initial_observation()
    assert raised.value.cause is Cause.SANDBOX


@pytest.mark.parametrize(("setup", "count"), [("true\n", 2), (None, 6)], ids=["shared", "each"])
async def test_groups_that_share_their_set_up_get_one_container_each(
    manager: PoolManager, tmp_path: Path, setup: str | None, count: int
) -> None:
    before = process_metrics().get("sandbox/started", 0)
    task = image_per_sample(tmp_path, 2, setup=setup)
    dataset = as_rl_dataset(task, renderer(), batch_size=2, group_size=3)
    await until(lambda: process_metrics().get("sandbox/started", 0) >= before + count)
    await asyncio.sleep(2)
    assert process_metrics()["sandbox/started"] == before + count
    assert len(dataset) == 1


def kill_sandbox(env: InspectEnv) -> None:
    [sandbox] = env.episode.sandboxes.values()
    inner = inspect_internals.strip_proxy(sandbox)
    assert isinstance(inner, DockerPoolSandboxEnvironment)
    subprocess.run(["docker", "kill", inner.container.id], check=True, capture_output=True)


async def test_a_killed_container_is_the_sandboxs_fault_and_the_next_episode_works() -> None:
    dataset = as_rl_dataset(in_pool(), renderer())
    builder = dataset.get_batch(0)[0]
    [env] = await builder.make_envs()
    assert isinstance(env, InspectEnv)
    await env.initial_observation()
    await asyncio.to_thread(kill_sandbox, env)
    with pytest.raises(EpisodeError) as raised:
        await env.step(encode(READ + END))
    assert raised.value.cause is Cause.SANDBOX
    await builder.cleanup()
    group = await do_group_rollout(dataset.get_batch(0)[0], Words([READ, "plum"]))
    assert group.get_total_rewards() == [1.0]
