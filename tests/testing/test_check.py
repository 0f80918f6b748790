"""`inspect rl check`: agreement and disagreement, in words and exit codes."""

from __future__ import annotations

from pathlib import Path

import pytest
from click.testing import CliRunner, Result

from inspect_tinker_plugin.cli.check import check

TASKS = """
import os

from inspect_ai import Task, task
from inspect_ai.agent import react
from inspect_ai.dataset import Sample
from inspect_ai.scorer import includes
from inspect_ai.solver import generate, solver

# modules are loaded afresh for each run; what a task leaves behind elsewhere is not
RUNS = os.environ

def samples():
    return [Sample(input=text, target=text) for text in "abcd"]

@task
def plain():
    return Task(dataset=samples(), scorer=includes())

@task
def agent():
    return Task(dataset=samples(), solver=react(), scorer=includes())

@solver
def counts():
    async def solve(state, generate):
        RUNS["PARITY_RUNS"] = RUNS.get("PARITY_RUNS", "") + "i"
        state.user_prompt.text += f" ({RUNS['PARITY_RUNS']})"
        return await generate(state)
    return solve

@task
def drifting():
    return Task(dataset=samples(), solver=counts(), scorer=includes())
"""


@pytest.fixture
def tasks(tmp_path: Path) -> Path:
    file = tmp_path / "tasks.py"
    file.write_text(TASKS)
    return file


def run(*args: str | Path) -> Result:
    return CliRunner().invoke(check, [str(arg) for arg in args])


@pytest.mark.parametrize(("name", "turns"), [("plain", "1 turn"), ("agent", "2 turns")])
def test_a_task_that_agrees(tasks: Path, name: str, turns: str) -> None:
    result = run(f"{tasks}@{name}", "--limit", "2")
    assert result.exit_code == 0, result.output
    assert f"sample 1, messages: agrees ({turns})" in result.output
    assert f"sample 2, tokens: agrees ({turns})" in result.output
    assert result.output.endswith("4 runs, 4 agree\n")


def test_a_task_that_drifts_is_shown_with_the_place(
    tasks: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("PARITY_RUNS", "")
    result = run(f"{tasks}@drifting", "--limit", "1", "--side", "messages")
    assert result.exit_code == 1
    assert "sample 1, messages: differs" in result.output
    assert "requests[0].messages[0].content: eval 'a (i)', episode 'a (ii)'" in result.output
    assert "1 runs, 0 agree" in result.output


def test_a_script_is_played(tasks: Path, tmp_path: Path) -> None:
    script = tmp_path / "script.jsonl"
    script.write_text('"Hm."\n{"tool_calls": [{"name": "submit", "arguments": {"answer": "a"}}]}\n')
    result = run(f"{tasks}@agent", "--limit", "1", "--script", script)
    assert result.exit_code == 0, result.output
    assert "agrees (2 turns)" in result.output


def test_a_script_that_is_too_short_shows_nothing(tasks: Path, tmp_path: Path) -> None:
    script = tmp_path / "script.jsonl"
    script.write_text('"Hm."\n')
    result = run(f"{tasks}@agent", "--limit", "1", "--script", script)
    assert result.exit_code == 1
    assert "inconclusive" in result.output
    assert "ran out after 1 turns" in result.output


@pytest.mark.parametrize(
    ("args", "message"),
    [(["missing.py@plain"], "missing.py"), (["TASKS@nothing"], "nothing")],
)
def test_bad_input_is_one_line(tasks: Path, args: list[str], message: str) -> None:
    result = run(*[arg.replace("TASKS", str(tasks)) for arg in args])
    assert result.exit_code != 0
    assert result.output.startswith("Error: ")
    assert message in result.output
    assert len(result.output.splitlines()) == 1
