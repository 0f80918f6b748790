"""Tools of the host that a program calls through its bridge."""

from __future__ import annotations

from pathlib import Path

import pytest
from inspect_ai.agent import BridgedToolsSpec
from inspect_ai.tool import Tool, tool
from tests.agents.sandboxed import agent, free_port, task_of
from tests.rl.policies import roll_out_task

from inspect_tinker_plugin.contracts.errors import Cause, EpisodeError

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
def broken(raised: type[BaseException]) -> Tool:
    async def execute() -> str:
        """Look."""
        raise raised("a mistake of the tool's")

    return execute


@pytest.mark.parametrize("raised", [ZeroDivisionError, SystemExit, GeneratorExit])
async def test_a_mistake_of_a_tool_is_the_tools(
    raised: type[BaseException], tmp_path: Path
) -> None:
    port = free_port()
    spec = BridgedToolsSpec(name="host", tools=[broken(raised)], require_proposal=False)
    command = ["python3", "-c", f"PORT = {port}{CALL}"]
    run = agent(command, port=port, bridged={"bridged_tools": [spec]})
    with pytest.raises(EpisodeError, match="a mistake of the tool's") as caught:
        await roll_out_task(task_of("local", tmp_path, run), ["plum"])
    assert caught.value.cause is Cause.TOOL
