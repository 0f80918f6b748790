"""Tools of the host that a program calls through its bridge."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest
from inspect_ai import Task
from inspect_ai.agent import BridgedToolsSpec
from inspect_ai.dataset import Sample
from inspect_ai.scorer import includes
from inspect_ai.solver import generate, use_tools
from inspect_ai.tool import Tool, tool
from tests.agents.sandboxed import agent, free_port, task_of
from tests.rl.policies import Words, renderer, tool_call
from tinker_cookbook.rl.rollouts import do_group_rollout

from inspect_tinker_plugin.contracts.errors import Cause, EpisodeError
from inspect_tinker_plugin.rl.dataset import as_rl_dataset

CALL = """
import os, sys
sys.path.insert(0, "agent")
import program
said = program.post(PORT, "/v1/chat/completions", {"model": "inspect", "messages": [
    {"role": "user", "content": "Do it."}]})
os.system(said["choices"][0]["message"]["content"] or "")
program.post(PORT, "/mcp/host", {"jsonrpc": "2.0", "id": 1, "method": "tools/call",
    "params": {"name": NAME, "arguments": ARGUMENTS}})
"""


@tool
def broken(raised: type[BaseException]) -> Tool:
    async def execute() -> str:
        """Look."""
        raise raised("a mistake of the tool's")

    return execute


def calling(kind: str, folder: Path, name: str, tool: Tool, arguments: dict[str, str]) -> Task:
    """A task whose program asks, does what it is told, and calls a tool of the host."""
    port = free_port()
    spec = BridgedToolsSpec(name="host", tools=[tool], require_proposal=False)
    given = f"PORT, NAME, ARGUMENTS = {port}, {name!r}, {arguments!r}"
    command = ["python3", "-c", f"{given}{CALL}"]
    return task_of(kind, folder, agent(command, port=port, bridged={"bridged_tools": [spec]}))


def through_a_bridge(raised: type[BaseException], folder: Path) -> Task:
    return calling("local", folder, "broken", broken(raised), {})


def by_inspect(raised: type[BaseException], folder: Path) -> Task:
    sample = Sample(id=1, input="Do it.", target="plum")
    return Task(dataset=[sample], solver=[use_tools(broken(raised)), generate()], scorer=includes())


@pytest.mark.parametrize("raised", [ZeroDivisionError, SystemExit, GeneratorExit])
@pytest.mark.parametrize("made", [through_a_bridge, by_inspect])
async def test_a_mistake_of_a_tool_is_the_tools(
    made: Callable[[type[BaseException], Path], Task], raised: type[BaseException], tmp_path: Path
) -> None:
    dataset = as_rl_dataset(made(raised, tmp_path), renderer())
    with pytest.raises(EpisodeError, match="a mistake of the tool's") as caught:
        await do_group_rollout(dataset.get_batch(0)[0], Words([tool_call("broken", "{}")]))
    assert caught.value.cause is Cause.TOOL
