"""Inspect's own `inspect score` takes logs of rollouts."""

from __future__ import annotations

from pathlib import Path

import pytest
from inspect_ai.log import EvalLog, read_eval_log
from inspect_ai.model import get_model
from tests.commands import Command
from tests.logs.rollouts import dataset, logs_in, roll_out, run_in_thread, samples

from inspect_tinker_plugin.logs import assemble_pending, trajectory_groups
from inspect_tinker_plugin.logs.rollout import SAMPLED_KEY

ROOT = Path(__file__).parents[2]


def rolled(folder: Path) -> EvalLog:
    """Roll out the tiny task of a file; return its log."""
    task = f"{ROOT}/example_tasks/toy.py@letters"
    made = dataset(task, folder, batch_size=1, group_size=2, limit=1)
    roll_out(made.get_batch(0)[0], ["abc", "abcz"])
    run_in_thread(assemble_pending, folder)
    (log,) = logs_in(folder)
    return log


def scored(log: EvalLog, target: Path, *options: str) -> EvalLog:
    words = ["score", log.location, *options, "--output-file", str(target)]
    program = f"from inspect_ai._cli.main import inspect; inspect({words!r})"
    done = Command("-c", program, cwd=target.parent).wait()
    assert done.returncode == 0, done.stdout + done.stderr
    made: EvalLog = run_in_thread(read_eval_log, str(target))
    return made


@pytest.mark.forks
@pytest.mark.parametrize("action", ["append", pytest.param("overwrite", marks=pytest.mark.nightly)])
def test_it_runs_the_tasks_own_scorers(action: str, tmp_path: Path) -> None:
    log = rolled(tmp_path / "logs")
    new = scored(log, tmp_path / "new.eval", "--action", action)
    before = set(samples(log)[0].scores or {}) if action == "append" else set()
    (name,) = set(samples(new)[0].scores or {}) - before
    assert [(each.scores or {})[name].value for each in samples(new)] == [1.0, 0.75]
    assert ("reward" in (samples(new)[0].scores or {})) is (action == "append")
    assert [each.store[SAMPLED_KEY] for each in samples(new)] == [
        each.store[SAMPLED_KEY] for each in samples(log)
    ]
    assert [group.get_total_rewards() for group in trajectory_groups(samples(new))] == [[1.0, 0.75]]


@pytest.mark.forks
def test_it_runs_another_scorer(tmp_path: Path) -> None:
    log = rolled(tmp_path / "logs")
    new = scored(log, tmp_path / "new.eval", "--action", "append", "--scorer", "includes")
    assert set(samples(new)[0].scores or {}) == {"reward", "share_of_letters", "includes"}


async def test_the_model_of_a_log_exists_and_says_why_it_cannot_be_asked() -> None:
    with pytest.raises(
        RuntimeError, match=r"rl/Qwen/Qwen3-8B is the model under training.*--model"
    ):
        await get_model("rl/Qwen/Qwen3-8B", policy_step=3).generate("Who are you?")
