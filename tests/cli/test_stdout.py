"""Only a command's own results are on stdout, whatever tasks and their programs print."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
from tests.commands import Command

TASK = """
import os
from inspect_ai import Task, task
from inspect_ai.dataset import Sample
from inspect_ai.scorer import includes
from inspect_ai.solver import solver

def talk(when):
    print("a task that talks", when)
    os.system(f"echo a shell that talks {when}")

talk("when it is loaded")

@solver
def loud():
    async def solve(state, generate):
        talk("in an episode")
        return await generate(state)
    return solve

@task
def planted():
    talk("when it is made")
    return Task(dataset=[Sample(id=1, input="?", target="a")], solver=loud(), scorer=includes())
"""

MODULE = ["-m", "inspect_tinker_plugin"]
EPISODE = "a task that talks in an episode"


@pytest.mark.forks
@pytest.mark.parametrize(
    ("command", "arguments"),
    [
        ("rollout", ["--group-size", "1"]),
        pytest.param("check", [], marks=pytest.mark.nightly),
        pytest.param("audit", ["--out", "audit", "--fail-on", "never"], marks=pytest.mark.nightly),
    ],
)
def test_what_a_task_and_its_programs_print_is_not_on_stdout(
    tmp_path: Path, command: str, arguments: list[str]
) -> None:
    (tmp_path / "loud.py").write_text(TASK)
    done = Command(command, "loud.py@planted", "--json", *arguments, cwd=tmp_path).wait()
    assert done.returncode == 0, done.stderr
    assert EPISODE in done.stderr
    assert "that talks" not in done.stdout
    documents = [done.stdout] if command == "audit" else done.stdout.splitlines()
    assert documents
    for each in documents:
        json.loads(each)


QUIET = """
from inspect_ai import Task, task
from inspect_ai.dataset import Sample
from inspect_ai.scorer import includes

@task
def quiet():
    return Task(dataset=[Sample(id=1, input="pi\u00f1a?", target="a")], scorer=includes())
"""


@pytest.mark.nightly
def test_a_stdout_of_ascii_has_every_letter(tmp_path: Path) -> None:
    (tmp_path / "quiet.py").write_text(QUIET, encoding="utf-8")
    done = subprocess.run(
        [sys.executable, *MODULE, "rollout", "quiet.py", "--group-size", "2"],
        cwd=tmp_path,
        capture_output=True,
        text=True,
        env={**os.environ, "PYTHONIOENCODING": "ascii"},
    )
    assert done.returncode == 0, done.stderr
    assert "Error" not in done.stderr
    assert "pi\\xf1a" in done.stdout


def test_a_reader_that_has_left_is_no_unexpected_error() -> None:
    line = f"{sys.executable} -m inspect_tinker_plugin plugins | true; exit ${{PIPESTATUS[0]}}"
    done = subprocess.run(["bash", "-c", line], capture_output=True, text=True)
    assert done.returncode == 1, done.stderr
    assert "Error" not in done.stderr


@pytest.mark.skipif(not Path("/dev/full").exists(), reason="Linux has this device")
def test_a_full_disk_is_one_line() -> None:
    with open("/dev/full", "w") as full:
        command = [sys.executable, *MODULE, "plugins"]
        done = subprocess.run(command, stdout=full, stderr=subprocess.PIPE, text=True)
    assert done.returncode == 1
    assert done.stderr == "Error: No space left on device: the output cannot be written\n"
