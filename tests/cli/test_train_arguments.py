"""The arguments of ``inspect rl train``: tasks, and options of the cookbook."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from click.testing import CliRunner

from inspect_tinker_plugin.cli import train
from inspect_tinker_plugin.cli.train import split_tasks


@pytest.mark.parametrize(
    ("words", "tasks", "pairs"),
    [
        (["a.py@x"], ["a.py@x"], []),
        (["pkg/a", "b.py@y", "c"], ["pkg/a", "b.py@y", "c"], []),
        (["a", "kl_penalty_coef=0.1", "b", "x.y=2"], ["a", "b"], ["kl_penalty_coef=0.1", "x.y=2"]),
        (["a", "dir=1/b.py@y"], ["a"], ["dir=1/b.py@y"]),
        (["dir=1/a.py@x", "./dir=1/b.py@y"], ["dir=1/a.py@x", "./dir=1/b.py@y"], []),
    ],
)
def test_tasks_are_told_from_options(words: list[str], tasks: list[str], pairs: list[str]) -> None:
    assert split_tasks(words) == (tasks, pairs)


def test_several_tasks_reach_the_run_with_their_shares(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    asked: list[Any] = []
    monkeypatch.setattr(train, "_train", asked.append)
    command = ["a.py@x", "b.py@y", "--mix", "5,2.5", "loss_fn=ppo", "--log-dir", str(tmp_path)]
    result = CliRunner().invoke(train.train_command, [*command, "-T", "x.n=3"])
    assert result.exit_code == 0, result.output
    (request,) = asked
    assert (request.task, request.mix) == (["a.py@x", "b.py@y"], [5.0, 2.5])
    assert (request.overrides, request.task_args) == (["loss_fn=ppo"], {"x.n": 3})


def test_shares_that_are_no_numbers_are_refused() -> None:
    result = CliRunner().invoke(train.train_command, ["a", "b", "--mix", "five,three"])
    assert result.exit_code == 2
    assert "expected numbers such as 5,3,2" in result.output
