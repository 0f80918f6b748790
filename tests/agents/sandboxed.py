"""Tasks whose solver runs ``program.py`` in a real sandbox, under Inspect's own bridge."""

from __future__ import annotations

import json
import socket
from pathlib import Path
from typing import Any

from inspect_ai import Task
from inspect_ai.agent import sandbox_agent_bridge
from inspect_ai.dataset import Sample
from inspect_ai.model import ModelOutput
from inspect_ai.scorer import includes
from inspect_ai.solver import Generate, Solver, TaskState
from inspect_ai.util import SandboxEnvironmentSpec, sandbox
from tests.functions import make_solver

from inspect_docker_pool import DockerPoolConfig
from inspect_tinker_plugin.contracts.episodes import TurnRequest

IMAGE = "inspect-rl-test/python:1"
PROGRAM = Path(__file__).with_name("program.py")
JSON_MODULE = Path(json.__file__).parent
FILES = {
    "agent/program.py": str(PROGRAM),
    # The image's Python has no JSON; this is the one of here, without its fast parts.
    **{f"agent/json/{path.name}": str(path) for path in sorted(JSON_MODULE.glob("*.py"))},
}


def free_port() -> int:
    """A port that nothing listens on; the local sandbox shares those of this machine."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


def sandbox_of(kind: str, folder: Path) -> Any:
    """Return the specification of a sandbox of a kind."""
    if kind == "docker_pool":
        return SandboxEnvironmentSpec("docker_pool", DockerPoolConfig(image=IMAGE))
    if kind == "docker":
        compose = folder / "compose.yaml"
        service = {"image": IMAGE, "command": "tail -f /dev/null", "init": True}
        compose.write_text(
            json.dumps({"services": {"default": service | {"network_mode": "none"}}})
        )
        return SandboxEnvironmentSpec("docker", str(compose))
    return SandboxEnvironmentSpec("local")


@make_solver
async def agent(
    state: TaskState,
    generate: Generate,
    /,
    command: list[str] | None = None,
    *,
    port: int,
    printed: list[str] | None = None,
    bridged: dict[str, Any] | None = None,
    **asked: Any,
) -> TaskState:
    """Run the program, or another command, while the bridge is open; keep what it printed.

    Args:
        command: Another command.
        port: The bridge's.
        printed: Takes the lines that were printed.
        bridged: Further arguments of the bridge.
        asked: Arguments of the program.
    """
    async with sandbox_agent_bridge(port=port, **(bridged or {})) as bridge:
        given = {"dialect": "chat", "turns": 1, "talks": 1, "port": port} | asked
        run = command or ["python3", "agent/program.py", json.dumps(given)]
        result = await sandbox().exec(run)
        state.output = bridge.state.output
        state.metadata["status"] = result.returncode
        state.metadata["printed"] = result.stdout
        if printed is not None:
            printed.extend(result.stdout.splitlines())
        if not result.success:
            raise RuntimeError(f"the program failed: {result.stderr or result.stdout}")
    return state


def task_of(kind: str, folder: Path, solver: Solver) -> Task:
    """A task of one sample in a sandbox of a kind."""
    sample = Sample(id=1, input="Do it.", target="plum", files=FILES)
    return Task(
        dataset=[sample], solver=solver, scorer=includes(), sandbox=sandbox_of(kind, folder)
    )


def plum(request: TurnRequest) -> ModelOutput:
    return ModelOutput.from_content("rl/policy", "plum")
