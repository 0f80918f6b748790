"""Ctrl-C: exit code 130, and finished results are shown."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

TASKS = """
import asyncio
from pathlib import Path
from inspect_ai import Task, task
from inspect_ai.dataset import Sample
from inspect_ai.scorer import match
from inspect_ai.solver import generate, solver

@solver
def quick_then_slow():
    async def solve(state, generate):
        if state.sample_id != "quick":
            Path("slow").touch()
            await asyncio.sleep(300)
        return await generate(state)
    return solve

@task
def some():
    samples = [Sample(id=name, input="?", target="x") for name in ("quick", "slow", "slower")]
    return Task(dataset=samples, solver=[quick_then_slow(), generate()], scorer=match())
"""


def interrupted(folder: Path, *args: str) -> subprocess.CompletedProcess[str]:
    """Run a command until its first slow sample has begun, and press Ctrl-C."""
    (folder / "tasks.py").write_text(TASKS)
    command = [sys.executable, "-W", "ignore", "-m", "inspect_tinker_plugin", *args]
    process = subprocess.Popen(
        command,
        cwd=folder,
        env={**os.environ, "PYTHONPATH": os.pathsep.join(sys.path)},
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )
    deadline = time.monotonic() + 200
    while not (folder / "slow").exists():
        assert process.poll() is None, process.communicate()
        assert time.monotonic() < deadline
        time.sleep(0.1)
    process.send_signal(signal.SIGINT)
    out, err = process.communicate(timeout=100)
    return subprocess.CompletedProcess(command, process.returncode, out, err)


@pytest.mark.slow
def test_a_rollout_shows_the_groups_that_are_finished(tmp_path: Path) -> None:
    done = interrupted(
        tmp_path, "rollout", "tasks.py", "--limit", "3", "--group-size", "2", "--json"
    )
    assert done.returncode == 130, done.stderr
    reports = [json.loads(line) for line in done.stdout.splitlines()]
    assert [(each["sample_id"], each["number"]) for each in reports] == [("quick", 1), ("quick", 2)]
    assert "Interrupted after 2 of 6 rollouts." in done.stderr


@pytest.mark.slow
def test_a_check_shows_the_runs_that_are_finished(tmp_path: Path) -> None:
    done = interrupted(tmp_path, "check", "tasks.py", "--side", "messages")
    assert done.returncode == 130, done.stderr
    assert "sample quick, messages: agrees" in done.stdout


@pytest.mark.slow
def test_a_bench_that_is_interrupted_says_so(tmp_path: Path) -> None:
    done = interrupted(tmp_path, "bench", "tasks.py", "--limit", "2", "--json")
    assert done.returncode == 130, done.stderr
    assert json.loads(done.stdout) == []
    assert "Interrupted after 0 of 2 sides." in done.stderr
