"""`inspect rl bench`: both sides really run, and a failing side gives no figure."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from click.testing import CliRunner, Result

from inspect_tinker_plugin.cli.compare import bench

FOLDER = Path(__file__).parents[2] / "example_tasks"
LOG_SEARCH = f"{FOLDER / 'log_search.py'}@log_search"
SCRIPT = str(FOLDER / "scripts" / "log_search.jsonl")


def run(*args: str) -> Result:
    return CliRunner().invoke(bench, list(args))


@pytest.mark.slow
def test_an_agent_is_measured_on_both_sides() -> None:
    options = ("--script", SCRIPT, "--episodes", "4", "--at-once", "2", "--json")
    result = run(LOG_SEARCH, *options)
    assert result.exit_code == 0, result.output
    ours, other = json.loads(result.stdout.splitlines()[-1])
    assert (ours["side"], other["side"]) == ("inspect rl", "inspect eval")
    assert (ours["episodes"], other["episodes"], ours["turns"]) == (4, 4, 3.0)
    for cost in (ours, other):
        assert cost["cpu_s"] > 0
        assert cost["wall_s"] > 0
    assert {"time/environment_s", "time/scoring_s", "sandbox/acquire_s"} <= set(ours["parts"])


def test_a_reader_gets_a_table() -> None:
    result = run(str(FOLDER / "word_problems.py"), "--episodes", "3", "--sample-id", "train")
    assert result.exit_code == 0, result.output
    for seen in ("3 episodes, 1 turn each", "CPU/episode", "inspect eval", "time/environment"):
        assert seen in result.stdout, seen


@pytest.mark.parametrize(
    ("args", "message"),
    [
        ([LOG_SEARCH, "--sample-id", "sunday"], "sunday"),
        ([LOG_SEARCH, "--script", "none.jsonl"], "the script none.jsonl cannot be read"),
    ],
)
def test_what_cannot_be_started_is_one_clear_line(args: list[str], message: str) -> None:
    result = run(*args, "--episodes", "1")
    assert result.exit_code == 1
    assert message in result.stderr.splitlines()[-1]


BROKEN_SCORER = """
from inspect_ai import Task, task
from inspect_ai.dataset import Sample
from inspect_ai.scorer import accuracy, scorer
from inspect_ai.solver import generate


@scorer(metrics=[accuracy()])
def broken():
    async def score(state, target):
        raise ValueError("no such file: answers.csv")

    return score


@task
def unscorable():
    return Task(dataset=[Sample(input="6 x 7?", target="42")], solver=generate(), scorer=broken())
"""


def test_runs_that_all_fail_are_no_figure(tmp_path: Path) -> None:
    task = tmp_path / "unscorable.py"
    task.write_text(BROKEN_SCORER)
    result = run(str(task), "--episodes", "1")
    assert result.exit_code == 1
    assert "nothing was measured" in result.stderr
    assert "answers.csv" in result.stderr
