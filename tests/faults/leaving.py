"""Leaves a process in one of several ways while episodes hold Docker sandboxes.

Run as ``python -m tests.faults.leaving MODE COMPOSE_FILE``; the test looks at the engine.
"""

from __future__ import annotations

import asyncio
import gc
import os
import signal
import sys
from pathlib import Path

from inspect_ai import Task
from inspect_ai.dataset import Sample
from inspect_ai.scorer import match
from inspect_ai.solver import generate
from tests.rl.policies import renderer

from inspect_tinker_plugin.rl.dataset import as_rl_dataset

MOMENTS = {"while the engine is asked": 0.02, "while starting": 1.5}
"""Seconds after which a process is left, by mode; what has begun by then is chance."""


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
        await asyncio.sleep(MOMENTS[mode])
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
