"""Episodes in `docker_pool`: pre-warmed by the dataset, measured, killed on a real engine."""

from __future__ import annotations

import asyncio
import subprocess
import time

import pytest
from inspect_ai import Task
from inspect_ai.dataset import Sample
from inspect_ai.scorer import includes
from inspect_ai.solver import generate, use_tools
from inspect_ai.tool import bash
from inspect_ai.util import SandboxEnvironmentSpec
from tests.rl.policies import END, Words, encode, renderer, tool_call
from tinker_cookbook.rl.rollouts import do_group_rollout

from inspect_tinker_plugin import inspect_internals
from inspect_tinker_plugin.errors import Cause, EpisodeError
from inspect_tinker_plugin.rl.dataset import as_rl_dataset
from inspect_tinker_plugin.rl.env import InspectEnv
from inspect_tinker_plugin.sandboxes import DockerPoolConfig
from inspect_tinker_plugin.sandboxes.environment import DockerPoolSandboxEnvironment
from inspect_tinker_plugin.sandboxes.metrics import process_metrics

pytestmark = pytest.mark.docker

IMAGE = "inspect-rl-test/python:1"


def in_pool(pool: str = "shared") -> Task:
    return Task(
        dataset=[Sample(id=1, input="What is in the file?", target="plum", files={"f": "plum"})],
        solver=[use_tools(bash(timeout=20)), generate()],
        scorer=includes(),
        sandbox=SandboxEnvironmentSpec(
            "docker_pool", DockerPoolConfig(image=IMAGE, environment={"POOL": pool})
        ),
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


async def test_building_a_dataset_starts_its_containers() -> None:
    before = process_metrics().get("sandbox/started", 0)
    as_rl_dataset(in_pool("of its own"), renderer(), group_size=3)
    deadline = time.monotonic() + 60
    while process_metrics().get("sandbox/started", 0) < before + 3:
        assert time.monotonic() < deadline, "no container was started ahead"
        await asyncio.sleep(0.1)


def kill_sandbox(env: InspectEnv) -> None:
    [sandbox] = env._episode.sandboxes.values()
    inner = inspect_internals.unproxied(sandbox)
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
