"""The cookbook's own training loop against the real server: it learns, and it resumes."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest

from tinker_local import LocalServer

pytestmark = [pytest.mark.local, pytest.mark.slow, pytest.mark.long, pytest.mark.timeout(600)]

SCRIPT = Path(__file__).parent / "toy_training.py"


def trainer(server: LocalServer, log_path: Path, *options: str) -> subprocess.Popen[str]:
    """Start the toy training in a separate process."""
    return subprocess.Popen(
        [sys.executable, str(SCRIPT), str(server.model), str(log_path), *options],
        env={**os.environ, **server.environ},
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
    )


def finish(process: subprocess.Popen[str]) -> list[float]:
    """Wait for the training and return the mean reward of each step."""
    output, _ = process.communicate(timeout=500)
    assert process.returncode == 0, output
    rewards: list[float] = json.loads(output.splitlines()[-1])
    return rewards


def rows(path: Path) -> list[dict[str, Any]]:
    if not path.is_file():
        return []
    return [json.loads(line) for line in path.read_text(encoding="utf-8").splitlines()]


def mean(values: list[float]) -> float:
    return sum(values) / len(values)


@pytest.mark.parametrize("options", [[], ["--off-policy", "2"]], ids=["sync", "async"])
def test_the_reward_rises(local_server: LocalServer, tmp_path: Path, options: list[str]) -> None:
    rewards = finish(trainer(local_server, tmp_path, "--steps", "16", *options))
    # The async loop drops stale groups, and ends with fewer steps than batches.
    assert len(rewards) >= 10
    assert mean(rewards[-4:]) > mean(rewards[:4]) + 0.1


def test_a_run_killed_with_its_server_goes_on_where_it_was(
    tiny_model: Path, tmp_path: Path
) -> None:
    log_path, state = tmp_path / "run", tmp_path / "state"
    options = ["--steps", "8", "--save-every", "2"]
    with LocalServer(tiny_model, state_dir=state) as server:
        process = trainer(server, log_path, *options)
        deadline = time.monotonic() + 200
        while len(rows(log_path / "checkpoints.jsonl")) < 2:
            assert time.monotonic() < deadline
            assert process.poll() is None, process.communicate()[0]
            time.sleep(0.1)
        process.kill()
        process.communicate()
    saved = rows(log_path / "checkpoints.jsonl")
    with LocalServer(tiny_model, state_dir=state) as server:
        finish(trainer(server, log_path, *options))
    checkpoints = rows(log_path / "checkpoints.jsonl")
    assert checkpoints[: len(saved)] == saved, "nothing saved is lost"
    assert checkpoints[-1]["name"] == "final"
    steps = [row["step"] for row in rows(log_path / "metrics.jsonl") if "step" in row]
    assert steps[-1] == 7
    resumed_at = saved[-1]["batch"]
    assert steps.count(resumed_at - 1) == 1, "the steps before the checkpoint were not repeated"
