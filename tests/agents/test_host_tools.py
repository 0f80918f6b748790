"""Tools of the host that a program calls through its bridge."""

from __future__ import annotations

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

from inspect_tinker_plugin.errors import Cause, EpisodeError
from inspect_tinker_plugin.rl.dataset import as_rl_dataset

CALL = """
import sys
sys.path.insert(0, "agent")
import program
program.post(PORT, "/v1/chat/completions", {"model": "inspect", "messages": [
    {"role": "user", "content": "Do it."}]})
program.post(PORT, "/mcp/host", {"jsonrpc": "2.0", "id": 1, "method": "tools/call",
    "params": {"name": "broken", "arguments": {}}})
"""


@tool
def broken() -> Tool:
    async def execute() -> str:
        """Look."""
        raise ZeroDivisionError("a mistake of the tool's")

    return execute


def through_a_bridge(folder: Path) -> Task:
    port = free_port()
    spec = BridgedToolsSpec(name="host", tools=[broken()], require_proposal=False)
    command = ["python3", "-c", f"PORT = {port}{CALL}"]
    return task_of("local", folder, agent(command, port=port, bridged={"bridged_tools": [spec]}))


def by_inspect(folder: Path) -> Task:
    sample = Sample(id=1, input="Do it.", target="plum")
    return Task(dataset=[sample], solver=[use_tools(broken()), generate()], scorer=includes())


@pytest.mark.parametrize("made", [through_a_bridge, by_inspect])
async def test_a_mistake_of_a_tool_is_the_tools(made: object, tmp_path: Path) -> None:
    assert callable(made)
    dataset = as_rl_dataset(made(tmp_path), renderer())
    with pytest.raises(EpisodeError, match="a mistake of the tool's") as caught:
        await do_group_rollout(dataset.get_batch(0)[0], Words([tool_call("broken", "{}")]))
    assert caught.value.cause is Cause.TOOL
