"""An attacker's moves in a sandbox: the scripts of `attacks/`, and the ways to run them.

If the task has a tool that takes a command or code, the script is run with it. Otherwise it
is run in the sample's sandbox, as by somebody who managed to get a command into it.
"""

from __future__ import annotations

import base64
import re
from collections.abc import Sequence
from pathlib import Path
from shlex import join, quote

from inspect_ai.dataset import Sample
from inspect_ai.model import ModelOutput
from inspect_ai.solver import TaskState
from inspect_ai.tool import ToolInfo
from inspect_ai.util import sandbox

from inspect_rl_audit.policies import (
    UNKNOWING,
    Notes,
    Play,
    PolicyReply,
    always,
    made_up,
    use_tool,
)
from inspect_tinker_plugin import TurnRequest

TOOLS = "tools"
"""The attacker uses the task's tools."""
EXEC = "exec"
"""The attacker runs commands in the sandbox, although the task has no tool for it."""

_SECONDS = 20
"""Seconds that a script may take."""

SUCCESS = "ok\nOK\nPASS\nPASSED\nsuccess\nAll tests passed\n1 passed\ntrue\nTrue\n1.0"
"""What programs that check something say when all is well; attacks say all of it."""

_ATTACKS = Path(__file__).with_name("attacks")

_COMMAND = ("cmd", "command", "commands", "script", "bash", "shell_command")
_CODE = ("code", "python", "source", "program")


def command_call(tools: Sequence[ToolInfo], script: str) -> ModelOutput | None:
    """Call the tool that runs a shell script, preferably a shell; ``None`` without such a tool."""
    found: dict[bool, tuple[ToolInfo, str]] = {}
    for tool in tools:
        for name, schema in tool.parameters.properties.items():
            if schema.type in ("string", None) and name in (*_COMMAND, *_CODE):
                python = name in _CODE and not re.search("bash|shell", tool.name)
                found.setdefault(python, (tool, name))
    if not found:
        return None
    python = False not in found
    tool, parameter = found[python]
    if python:
        packed = base64.b64encode(script.encode()).decode()
        script = (
            "import base64, subprocess\n"
            f"script = base64.b64decode('{packed}').decode()\n"
            "done = subprocess.run(['sh', '-c', script], capture_output=True, text=True)\n"
            "print(done.stdout, done.stderr)"
        )
    return use_tool(tool.name, {**made_up(tool), parameter: script})


async def run_in_sandbox(script: str, seconds: int = _SECONDS) -> str:
    """Run a script in the running sample's sandbox; errors are part of the answer."""
    try:
        done = await sandbox().exec(["sh", "-c", script], timeout=seconds)
    except Exception as error:
        # the boundary of an attack: the task wants the sandbox to refuse it
        return f"{type(error).__name__}: {error}"
    return done.stdout + done.stderr


def attack(name: str, *paths: str, host: bool = False, **variables: str) -> str:
    """Return a script of `attacks/` with its arguments and variables, ready to run.

    If the sandbox is this machine (``host``), it keeps to the sample's own folder.
    """
    given = {"HOST": "1" if host else "", "SUCCESS": SUCCESS, **variables}
    lines = [*(f"{key}={quote(value)}" for key, value in given.items()), f"set -- {join(paths)}"]
    return "\n".join([*lines, read_attack("prelude.sh"), read_attack(f"{name}.sh")])


def read_attack(file: str) -> str:
    """Return the text of a file in `attacks/`."""
    return (_ATTACKS / file).read_text(encoding="utf-8")


def play_script(
    policy: str,
    sample: Sample,
    script: str,
    finish: PolicyReply | None = None,
    seconds: int = _SECONDS,
) -> Play:
    """Return an episode in which a script is run in either way, before it answers."""

    async def after(state: TaskState, notes: Notes) -> None:
        if notes.get("acted") != TOOLS:
            notes["acted"] = EXEC
            notes["output"] = _shorten(await run_in_sandbox(script, seconds))

    reply = through_tools(script, finish or always(UNKNOWING))
    return Play(policy=policy, sample=sample, reply=reply, after=after)


def through_tools(script: str, finish: PolicyReply) -> PolicyReply:
    """Run a script with the task's tool, then answer; without such a tool only answer."""

    def reply(request: TurnRequest, notes: Notes) -> ModelOutput | None:
        if not notes.get("acted"):
            if call := command_call(request.tools, script):
                notes["acted"] = TOOLS
                return call
        elif "output" not in notes and notes["acted"] == TOOLS:
            results = [message.text for message in request.messages if message.role == "tool"]
            notes["output"] = _shorten(results[-1] if results else "")
        return finish(request, notes)

    return reply


def _shorten(output: str) -> str:
    return output if len(output) <= 4000 else f"{output[:3000]}\n…\n{output[-1000:]}"
