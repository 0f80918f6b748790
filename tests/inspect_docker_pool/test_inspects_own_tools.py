"""Inspect puts programs into a sandbox for its tools: who breaks them has no reward."""

from __future__ import annotations

import json
import re

import pytest
from inspect_ai import Task
from inspect_ai.agent import react
from inspect_ai.dataset import Sample
from inspect_ai.scorer import includes
from inspect_ai.tool import Tool, bash, bash_session, text_editor
from inspect_ai.util import SandboxEnvironmentSpec
from tests.rl.policies import Words, renderer, tool_call
from tinker_cookbook.rl.rollouts import do_group_rollout
from tinker_cookbook.rl.types import EnvGroupBuilder

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


def call_text(tool: str, **arguments: str) -> str:
    return tool_call(tool, json.dumps(arguments))


def episode_of(
    tools: list[Tool], script: list[str], config: DockerPoolConfig
) -> tuple[EnvGroupBuilder, Words]:
    task = Task(
        dataset=[Sample(id=1, input="Go.", target="plum")],
        solver=react(tools=tools),
        scorer=includes(),
        sandbox=SandboxEnvironmentSpec("docker_pool", config),
    )
    [builder] = as_rl_dataset(task, renderer()).get_batch(0)
    return builder, Words([*script, call_text("submit", answer="plum")])


@pytest.mark.parametrize(
    ("tool", "script"),
    [
        pytest.param(
            text_editor(),
            [
                call_text("text_editor", command="create", path="/tmp/a", file_text="a"),
                call_text("bash", command=REPLACED),
                call_text("text_editor", command="view", path="/tmp/a"),
            ],
            id="replaced",
            marks=pytest.mark.nightly,
        ),
        pytest.param(
            bash_session(),
            [
                call_text("bash_session", action="type_submit", input="echo"),
                call_text("bash", command=KILLED),
                call_text("bash_session", action="type_submit", input="echo"),
            ],
            id="killed",
        ),
    ],
)
async def test_who_breaks_inspects_program_has_no_reward(tool: Tool, script: list[str]) -> None:
    builder, policy = episode_of([tool, bash(timeout=20)], script, DockerPoolConfig(image=IMAGE))
    with pytest.raises(EpisodeError) as raised:  # as an image that does not suit it
        await do_group_rollout(builder, policy)
    assert raised.value.cause in (Cause.TOOL, Cause.SANDBOX)
    assert len(policy.prompts) == 3


ANOTHER_USERS_TOOLS = [
    pytest.param(
        bash_session(user="nobody"),
        [call_text("bash_session", action="type_submit", input="id -un")],
        id="bash_session",
    ),
    pytest.param(
        text_editor(user="nobody"),
        [
            call_text("text_editor", command="create", path="/tmp/a", file_text="nobody"),
            call_text("text_editor", command="view", path="/tmp/a"),
        ],
        id="text_editor",
    ),
]


@pytest.mark.parametrize(("tool", "script"), ANOTHER_USERS_TOOLS)
async def test_another_user_is_refused_where_nothing_can_become_it(
    tool: Tool, script: list[str]
) -> None:
    builder, policy = episode_of([tool], script, DockerPoolConfig(image=IMAGE))
    with pytest.raises(EpisodeError, match=r"cap_add: \[SETUID, SETGID\]") as raised:
        await do_group_rollout(builder, policy)
    assert raised.value.cause is Cause.SANDBOX


@pytest.mark.parametrize(("tool", "script"), ANOTHER_USERS_TOOLS)
async def test_another_user_works_with_the_capabilities(tool: Tool, script: list[str]) -> None:
    config = DockerPoolConfig(image=IMAGE, cap_add=["SETUID", "SETGID"])
    builder, policy = episode_of([tool], script, config)
    group = await do_group_rollout(builder, policy)
    assert group.get_total_rewards() == [1.0]
    shown = renderer().tokenizer.decode(policy.prompts[-1])
    assert re.search(r"[\t ]nobody$", shown, re.MULTILINE)
