"""A loop is left while a process is being started, in it or for it: it ends all the same."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
SCRIPT = """
import asyncio, faulthandler, sys, warnings
warnings.simplefilter("ignore")
from inspect_ai import Task
from inspect_ai.dataset import Sample
from inspect_ai.scorer import Score, mean, scorer
from inspect_ai.solver import generate, solver
from inspect_ai.util import SandboxEnvironment, sandbox, sandboxenv, subprocess
from inspect_ai.util._sandbox.local import LocalSandboxEnvironment  # private: starts processes
from tests.rl.policies import Words, renderer
from tinker_cookbook.rl.rollouts import do_group_rollout
from inspect_tinker_plugin.rl.dataset import as_rl_dataset

NOTHING = [sys.executable, "-S", "-c", "pass"]
reached = 0

async def in_a_process(where):
    global reached
    if where == WHERE:
        reached += 1
        began.set()
        await subprocess(NOTHING)

@sandboxenv(name="rl_leaving")
class Left(LocalSandboxEnvironment):
    @classmethod
    async def task_init(cls, task_name, config):
        await in_a_process("task_init")

    @classmethod
    async def sample_init(cls, task_name, config, metadata):
        await in_a_process("sample_init")
        return await LocalSandboxEnvironment.sample_init(task_name, config, metadata)

    @classmethod
    async def sample_cleanup(cls, *arguments):
        await LocalSandboxEnvironment.sample_cleanup(*arguments)
        await in_a_process("sample_cleanup")

@solver
def solving():
    async def solve(state, generate):
        await in_a_process("solver")
        return await generate(state)
    return solve

@scorer(metrics=[mean()])
def scoring():
    async def score(state, target):
        await in_a_process("scorer")
        return Score(value=1)
    return score

async def main(steps):
    global began
    began = asyncio.Event()
    from inspect_tinker_plugin.episode import sandbox as sandboxes
    sandboxes._lifecycle = None
    task = Task(
        dataset=[Sample(id=1, input="?", target="!")],
        solver=solving(),
        scorer=scoring(),
        sandbox="rl_leaving",
    )
    [builder] = as_rl_dataset(task, renderer(), group_size=1).get_batch(0)
    rollout = asyncio.create_task(do_group_rollout(builder, Words(["yes"])))
    await began.wait()
    for _ in range(steps):
        await asyncio.sleep(0)

for WHERE in ("task_init", "sample_init", "sample_cleanup", "solver", "scorer"):
    reached = 0
    for steps in (0, 1, 2, 3, 4, 6, 9):
        faulthandler.dump_traceback_later(100, exit=True)
        asyncio.run(main(steps))
        faulthandler.cancel_dump_traceback_later()
    assert reached >= 7, (WHERE, reached)
print("left")
"""


@pytest.mark.slow
def test_a_loop_can_be_left_at_any_step_of_a_processs_start() -> None:
    done = subprocess.run(
        [sys.executable, "-c", SCRIPT],
        cwd=ROOT,
        capture_output=True,
        text=True,
        timeout=280,
        check=False,
    )
    assert done.stdout == "left\n", done.stdout + done.stderr
