"""However a process abandons its episodes, none of their containers keeps running."""

from __future__ import annotations

import subprocess
import sys
import uuid
from pathlib import Path

import pytest
from tests.faults.leaving import MOMENTS
from tests.waiting import wait_until

ROOT = Path(__file__).parents[2]
COMPOSE = """
services:
  default:
    image: inspect-rl-test/python:1
    x-local: true
    init: true
    command: tail -f /dev/null
    network_mode: none
    labels:
      inspect-rl-test: {label}
"""


def containers(label: str) -> list[str]:
    command = ["docker", "ps", "-aq", "--filter", f"label=inspect-rl-test={label}"]
    return subprocess.run(command, capture_output=True, text=True, check=True).stdout.split()


@pytest.fixture
def label(tmp_path: Path) -> str:
    name = uuid.uuid4().hex
    (tmp_path / "compose.yaml").write_text(COMPOSE.format(label=name))
    return name


def leave(mode: str, folder: Path) -> subprocess.Popen[str]:
    return subprocess.Popen(
        [
            sys.executable,
            "-W",
            "ignore",
            "-m",
            "tests.faults.leaving",
            mode,
            str(folder / "compose.yaml"),
        ],
        cwd=ROOT,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
    )


@pytest.mark.docker
@pytest.mark.slow
@pytest.mark.parametrize("mode", ["return", "raise", *MOMENTS, "interrupt"])
def test_leaving_a_process_leaves_no_container(mode: str, tmp_path: Path, label: str) -> None:
    process = leave(mode, tmp_path)
    output, _ = process.communicate(timeout=180)
    assert mode in MOMENTS or "started" in output, output
    assert containers(label) == []


@pytest.mark.docker
@pytest.mark.slow
def test_dropping_envs_releases_their_containers(tmp_path: Path, label: str) -> None:
    with leave("drop", tmp_path) as process:
        assert process.stdout is not None
        assert any(line.startswith("started") for line in process.stdout)
        wait_until(lambda: not containers(label))
        assert process.poll() is None
        process.kill()
