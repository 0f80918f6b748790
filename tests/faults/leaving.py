"""Leaves a process in one of several ways while episodes hold Docker sandboxes.

Run as ``python -m tests.faults.leaving MODE COMPOSE_FILE``; the test looks at the engine.
"""

from __future__ import annotations

import asyncio
import gc
import os
import signal
import sys
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path

import psutil
from inspect_ai import Task
from inspect_ai.dataset import Sample
from inspect_ai.scorer import match
from inspect_ai.solver import generate
from tests.rl.policies import renderer

from inspect_tinker_plugin.rl.dataset import as_rl_dataset

MOMENTS = {"while the engine is asked": "docker", "while starting": " up "}
"""Mode, and a part of the command that runs when the process is left."""


async def until_running(part: str) -> None:
    """Wait for a program; asyncio never returns if it is cancelled while it starts one."""
    while not any(part in command for command in commands()):  # noqa: ASYNC110 - it is another's
        await asyncio.sleep(0.01)
    for _ in range(20):
        await asyncio.sleep(0.01)


def commands() -> Iterator[str]:
    """Return the command lines of what this process has started."""
    for process in psutil.Process().children(recursive=True):
        with suppress(psutil.Error):
            yield " ".join(process.cmdline())


async def main(mode: str, compose: Path) -> None:
    task = Task(
        dataset=[Sample(id=1, input="1+1?", target="2")],
        solver=generate(),
        scorer=match(),
        sandbox=("docker", str(compose)),
    )
    builder = as_rl_dataset(task, renderer(), group_size=1).get_batch(0)[0]
    envs = list(await builder.make_envs())
    starting = [asyncio.create_task(env.initial_observation()) for env in envs]
    if mode in MOMENTS:
        await until_running(MOMENTS[mode])
        return
    await asyncio.gather(*starting)
    print("started", flush=True)
    if mode == "raise":
        raise SystemExit(3)
    if mode == "interrupt":
        os.kill(os.getpid(), signal.SIGINT)
        await asyncio.sleep(30)
    if mode == "drop":
        envs.clear()
        starting.clear()
        builder._envs.clear()
        gc.collect()
        await asyncio.sleep(100)


if __name__ == "__main__":
    asyncio.run(main(sys.argv[1], Path(sys.argv[2])))
