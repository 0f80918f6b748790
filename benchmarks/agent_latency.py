"""A program's model call and a bridge's start, in an episode and in an eval of the same task.

The program runs in a sandbox and asks over plain sockets; the model answers at once, so what is
measured is the way there and back. A start is from entering ``sandbox_agent_bridge`` until the
port takes connections; a command is ``exec_remote(["true"])``, by which inspect_swe starts its
agents. Episodes and evals alternate; the image is the tests' own.
The bar: a call of an episode in docker_pool and local costs at most 50 ms, a warm start 0.5 s,
a command 0.5 s.
Run ``python benchmarks/agent_latency.py [ROUNDS]`` (needs Docker; a minute per round).
"""

from __future__ import annotations

import asyncio
import json
import os
import statistics
import sys
import tempfile
import time
from collections import defaultdict
from pathlib import Path

os.environ.setdefault("INSPECT_DISPLAY", "none")
sys.path.insert(0, str(Path(__file__).parents[1]))  # the tests' program

from inspect_ai import eval_async
from inspect_ai.agent import sandbox_agent_bridge
from inspect_ai.solver import Generate, Solver, TaskState, solver
from inspect_ai.util import sandbox
from tests.agents.sandboxed import free_port, plum, task_of
from tests.tokens.conversations import play_out

from inspect_tinker_plugin.testing.replies import scripted_model

CALL_LIMIT, START_LIMIT, COMMAND_LIMIT = 0.050, 0.5, 0.5
CONNECT = """
import socket, time
while True:
    try: socket.create_connection(("localhost", {port})).close(); break
    except ConnectionRefusedError: time.sleep(0.01)
"""


@solver
def timed(
    port: int, turns: int, starts: list[float], calls: list[float], commands: list[float]
) -> Solver:
    """Open the bridge, wait for its port, run commands and the program; note the seconds."""

    async def solve(state: TaskState, generate: Generate) -> TaskState:
        begun = time.monotonic()
        async with sandbox_agent_bridge(port=port):
            entered = time.monotonic() - begun
            timer = "import time; begun = time.monotonic()" + CONNECT.format(port=port)
            timer += "print(time.monotonic() - begun)"
            waited = await sandbox().exec(["python3", "-c", timer])
            starts.append(entered + float(waited.stdout))
            begun = time.monotonic()
            await sandbox().exec_remote(["true"], stream=False)
            commands.append(time.monotonic() - begun)
            asked = {"dialect": "chat", "turns": turns, "talks": 1, "port": port}
            run = ["python3", "agent/program.py", json.dumps(asked)]
            result = await sandbox().exec(run)
            calls.extend(json.loads(result.stdout))
        return state

    return solve


async def measure(rounds: int) -> bool:
    starts: dict[tuple[str, str], list[float]] = defaultdict(list)
    calls: dict[tuple[str, str], list[float]] = defaultdict(list)
    commands: dict[tuple[str, str], list[float]] = defaultdict(list)
    with tempfile.TemporaryDirectory() as folder:
        for number in range(rounds + 1):  # the first fills caches and pools
            for kind in ("docker_pool", "docker", "local"):
                for side in ("episode", "eval"):
                    if number == 0 and side == "eval":
                        continue
                    at = (kind, side) if number else ("warm-up", side)
                    turns = 50 if side == "episode" else 4
                    noted = starts[at], calls[at], commands[at]
                    task = task_of(kind, Path(folder), timed(free_port(), turns, *noted))
                    if side == "episode":
                        result = await play_out(task, plum)
                        assert result.error is None, result.error
                    else:
                        model = scripted_model(["plum"] * turns)
                        (log,) = await eval_async(task, model=model, log_dir=folder)
                        assert log.status == "success", log.error
    print(
        f"{'sandbox':14}{'side':10}{'start, s':>10}{'command, s':>12}"
        f"{'call p50, ms':>14}{'p95':>8}{'calls':>7}"
    )
    for kind, side in calls:
        if kind == "warm-up":
            continue
        times = sorted(calls[kind, side])
        start, p50 = statistics.median(starts[kind, side]), statistics.median(times)
        p95 = times[int(len(times) * 0.95)]
        command = statistics.median(commands[kind, side])
        line = f"{kind:14}{side:10}{start:10.3f}{command:12.3f}"
        line += f"{p50 * 1e3:14.1f}{p95 * 1e3:8.1f}{len(times):7}"
        if side == "eval":
            of_start = start / statistics.median(starts[kind, "episode"])
            of_call = p50 / statistics.median(calls[kind, "episode"])
            of_command = command / statistics.median(commands[kind, "episode"])
            line += f"   {of_start:.0f}x, {of_command:.0f}x and {of_call:.0f}x an episode's"
        print(line)
    return all(
        statistics.median(calls[kind, "episode"]) <= CALL_LIMIT
        and statistics.median(starts[kind, "episode"]) <= START_LIMIT
        and statistics.median(commands[kind, "episode"]) <= COMMAND_LIMIT
        for kind in ("docker_pool", "local")
    )


def main() -> int:
    rounds = int(sys.argv[1]) if len(sys.argv) > 1 else 3
    return 0 if asyncio.run(measure(rounds)) else 1


if __name__ == "__main__":
    sys.exit(main())
