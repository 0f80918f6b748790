"""Inspect puts programs into a sandbox for its tools: a policy that breaks them gains nothing."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from inspect_ai import Task
from inspect_ai.agent import as_tool, react
from inspect_ai.dataset import Sample
from inspect_ai.scorer import includes
from inspect_ai.tool import Tool, bash, bash_session, skill, text_editor
from inspect_ai.util import SandboxEnvironmentSpec
from inspect_ai.util._sandbox._cli import SANDBOX_TOOLS_DIR  # private: where a policy gets ahead
from tests.rl.policies import Words, renderer, tool_call
from tinker_cookbook.rl.rollout_strategy import RetryOnFailure
from tinker_cookbook.rl.rollouts import do_group_rollout

from inspect_docker_pool import DockerPoolConfig
from inspect_tinker_plugin.contracts.errors import Cause, EpisodeError
from inspect_tinker_plugin.rl.dataset import as_rl_dataset

pytestmark = pytest.mark.docker

IMAGE = "inspect-rl-test/python:1"
REPLACED = (
    "for d in /var/tmp/.[a-z0-9]*/; do f=$d/inspect-sandbox-tools; rm -f $f; "
    "printf '#!/bin/sh\\necho garbage\\n' > $f; chmod +x $f; done"
)
KILLED = "kill -9 $(grep -la sandbox-tools /proc/[0-9]*/cmdline | cut -d/ -f3)"


def said(tool: str, **arguments: str) -> str:
    return tool_call(tool, json.dumps(arguments))


@pytest.mark.parametrize(
    ("tool", "script"),
    [
        pytest.param(
            text_editor(),
            [
                said("text_editor", command="create", path="/tmp/a", file_text="a"),
                said("bash", command=REPLACED),
                said("text_editor", command="view", path="/tmp/a"),
            ],
            id="replaced",
        ),
        pytest.param(
            bash_session(),
            [
                said("bash_session", action="type_submit", input="echo"),
                said("bash", command=KILLED),
                said("bash_session", action="type_submit", input="echo"),
            ],
            id="killed",
        ),
    ],
)
async def test_who_breaks_inspects_program_has_no_second_try(tool: Tool, script: list[str]) -> None:
    task = Task(
        dataset=[Sample(id=1, input="Go.", target="plum")],
        solver=react(tools=[tool, bash(timeout=20)]),
        scorer=includes(),
        sandbox=SandboxEnvironmentSpec("docker_pool", DockerPoolConfig(image=IMAGE)),
    )
    policy = Words([*script, said("submit", answer="plum")])
    [builder] = as_rl_dataset(task, renderer()).get_batch(0)
    group = await do_group_rollout(builder, policy, strategy=RetryOnFailure())
    assert group.get_total_rewards() == [0.0]
    assert group.trajectories_G[0].transitions[-1].metrics["error/inside_sandbox"] == 1.0
    assert len(policy.prompts) == 3


IN_THE_WAY = {
    "link": "ln -s /tmp {folder}",
    "no_tar": "rm -f /bin/tar /usr/bin/tar",
    "no_uname": "rm -f /bin/uname /usr/bin/uname",
    "no_shell": "rm -f /bin/sh /usr/bin/sh",
}
EDIT = said("text_editor", command="create", path="/tmp/a", file_text="a")


@pytest.mark.parametrize("how", IN_THE_WAY)
async def test_who_is_there_before_inspects_tool_has_no_second_try_once_it_has_worked(
    how: str,
) -> None:
    task = Task(
        dataset=[Sample(id=1, input="Go.", target="plum")],
        solver=react(tools=[text_editor(), bash(timeout=20)]),
        scorer=includes(),
        sandbox=SandboxEnvironmentSpec("docker_pool", DockerPoolConfig(image=IMAGE)),
    )
    command = IN_THE_WAY[how].format(folder=SANDBOX_TOOLS_DIR)
    attack = [said("bash", command=command), EDIT, said("submit", answer="plum")]
    dataset = as_rl_dataset(task, renderer())
    [builder] = dataset.get_batch(0)
    # An image that does not suit the tool looks the same, so the first time is an error.
    with pytest.raises(EpisodeError, match="SandboxInjectionError") as raised:
        await do_group_rollout(builder, Words(attack))
    assert raised.value.cause is Cause.TOOL

    group = await do_group_rollout(builder, Words([EDIT, said("submit", answer="plum")]))
    assert group.get_total_rewards() == [1.0]
    policy = Words(attack)
    group = await do_group_rollout(builder, policy, strategy=RetryOnFailure())
    assert group.get_total_rewards() == [0.0]
    assert group.trajectories_G[0].transitions[-1].metrics["error/inside_sandbox"] == 1.0
    assert len(policy.prompts) == 2


NO_TAR = "FROM inspect-rl-test/python:1\nCOPY Dockerfile /bin/tar\nCOPY Dockerfile /usr/bin/tar\n"


async def test_a_tool_that_has_worked_tells_nothing_about_another_image(tmp_path: Path) -> None:
    (tmp_path / "Dockerfile").write_text(NO_TAR)
    images = [DockerPoolConfig(image=IMAGE), DockerPoolConfig(file=str(tmp_path / "Dockerfile"))]
    boxes = [SandboxEnvironmentSpec("docker_pool", image) for image in images]
    task = Task(
        dataset=[Sample(id=n, input="Go.", target="p", sandbox=b) for n, b in enumerate(boxes)],
        solver=react(tools=[text_editor()]),
        scorer=includes(),
    )
    [suits], [lacks] = (as_rl_dataset(task, renderer()).get_batch(n) for n in (0, 1))
    group = await do_group_rollout(suits, Words([EDIT, said("submit", answer="p")]))
    assert group.get_total_rewards() == [1.0]
    with pytest.raises(EpisodeError, match="SandboxInjectionError") as raised:
        await do_group_rollout(lacks, Words([EDIT]))
    assert raised.value.cause is Cause.TOOL


async def test_a_tool_that_a_sub_agent_has_called_has_worked() -> None:
    worker = react(name="worker", description="Works.", tools=[text_editor(), bash(timeout=20)])
    task = Task(
        dataset=[Sample(id=1, input="Go.", target="plum")],
        solver=react(tools=[as_tool(worker), bash(timeout=20)]),
        scorer=includes(),
        sandbox=SandboxEnvironmentSpec("docker_pool", DockerPoolConfig(image=IMAGE)),
    )
    ask, end = said("worker", input="Edit."), said("submit", answer="plum")
    [builder] = as_rl_dataset(task, renderer()).get_batch(0)
    group = await do_group_rollout(builder, Words([ask, EDIT, end, end]))
    assert group.get_total_rewards() == [1.0]
    breaks = said("bash", command=IN_THE_WAY["no_tar"])
    policy = Words([breaks, ask, EDIT, end, end])
    group = await do_group_rollout(builder, policy, strategy=RetryOnFailure())
    assert group.get_total_rewards() == [0.0]
    assert len(policy.prompts) == 3


async def test_who_plants_a_skill_has_no_second_try(tmp_path: Path) -> None:
    folder = tmp_path / "plums"
    folder.mkdir()
    (folder / "SKILL.md").write_text("---\nname: plums\ndescription: About plums.\n---\nRipe.\n")
    task = Task(
        dataset=[Sample(id=1, input="Go.", target="plum")],
        solver=react(tools=[skill([folder]), bash(timeout=20)]),
        scorer=includes(),
        sandbox=SandboxEnvironmentSpec("docker_pool", DockerPoolConfig(image=IMAGE)),
    )
    use, end = said("skill", command="plums"), said("submit", answer="plum")
    plant = said("bash", command="mkdir -p skills/plums; echo mine > skills/plums/SKILL.md")
    [builder] = as_rl_dataset(task, renderer()).get_batch(0)
    group = await do_group_rollout(builder, Words([use, end]))
    assert group.get_total_rewards() == [1.0]
    group = await do_group_rollout(builder, Words([plant, use, end]), strategy=RetryOnFailure())
    assert group.get_total_rewards() == [0.0]
    assert group.trajectories_G[0].transitions[-1].metrics["error/inside_sandbox"] == 1.0
