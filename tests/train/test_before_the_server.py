"""Requests that can be refused, or are done already, end before a local server is started."""

from __future__ import annotations

import asyncio
import io
import logging
import subprocess
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from tests.train.runs import TOY, Started, toy_request
from tinker_cookbook.rl import train as cookbook
from tinker_cookbook.utils.ml_log import JsonLogger

from inspect_tinker_plugin.contracts.errors import ConfigError
from inspect_tinker_plugin.train.history import last_checkpoint
from inspect_tinker_plugin.train.request import TrainRequest
from inspect_tinker_plugin.train.run import _console, _imitate_train_test, plan_run, train

pytestmark = [pytest.mark.local, pytest.mark.usefixtures("no_server")]


def starts(request: TrainRequest) -> None:
    """Come to the start of the server: nothing is refused, or done already."""
    with pytest.raises(Started):
        train(request)


@pytest.mark.parametrize(
    ("changes", "says"),
    [
        (
            {"options": {"reward": "score:acuracy"}},
            r"reward 'score:acuracy' names the score 'acuracy', which no",
        ),
        ({"options": {"reward": "meen"}}, "meen"),
        ({"options": {"group_reward": "rnak"}}, "rnak"),
        ({"options": {"tool_executor": "cashed"}}, "cashed"),
        ({"options": {"sample_id": "nope"}}, "no sample has the id nope"),
        ({"options": {"on_error": {"scorrer": -1}}}, "unknown cause 'scorrer'"),
        ({"options": {"sandbox": "dokcer"}}, "unknown sandbox .*Did you mean docker"),
        ({"test_split": "100%"}, "leaves none"),
        ({"test_task": f"{TOY}@leters"}, "has no task 'leters'"),
        (
            {"max_tokens": 1_000_000, "model": None},
            "--max-tokens 1,000,000 is too much for the local model, which takes 8,192 tokens",
        ),
        (
            {"overrides": ["kl_reference_config.base_model=x", "kl_penalty_coef=0.1"]},
            "kl_reference_config.base_model must be the model that is trained",
        ),
        ({"group_size": 1}, "--group-size 1 teaches nothing"),
        ({"test_samples": 3}, "--test-samples needs"),
        ({"test_task": f"{TOY}@letters"}, "test samples are also trained on"),
    ],
    ids=str,
)
def test_what_cannot_work_is_refused(changes: dict[str, Any], says: str, tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=says):
        train(toy_request(tmp_path / "run", **changes))
    assert not (tmp_path / "run" / "run.lock").exists()
    starts(toy_request(tmp_path / "run"))


def test_repeated_ids_of_a_task_to_evaluate_are_refused(tmp_path: Path) -> None:
    file = tmp_path / "twice.py"
    file.write_text(
        "from inspect_ai import Task, task\n"
        "from inspect_ai.dataset import Sample\n\n\n"
        "@task\n"
        "def twice() -> Task:\n"
        "    return Task([Sample('a'), Sample('b', id='1')])\n"
    )
    with pytest.raises(ConfigError, match=r"--eval-task twice: several samples have the id '1'"):
        train(toy_request(tmp_path / "run", eval_task=[str(file)]))


def test_steps_that_the_asynchronous_loop_leaves_out_are_said(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    async def loop(config: Any) -> None:
        rows = ['{"step": 0, "env/all/reward/total": 0.5}', '{"step": 2, "test/x": 1}']
        (tmp_path / "metrics.jsonl").write_text("\n".join(rows))

    monkeypatch.setattr(cookbook, "main", loop)
    said: list[str] = []
    options = ("async_config.max_steps_off_policy=1", "async_config.groups_per_batch=2")
    for overrides in ((), options):
        request = toy_request(tmp_path, steps=3, overrides=overrides, say=said.append)
        asyncio.run(_imitate_train_test(plan_run(request, models=tmp_path), None))
        (tmp_path / "metrics.jsonl").unlink()
    (line,) = said
    assert line.startswith("2 of 3 steps not done")


def test_warnings_after_a_training_do_not_go_to_its_closed_log(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    terminal = io.StringIO()
    monkeypatch.setattr(sys, "stderr", terminal)
    with _console(tmp_path / "console.log"):
        logging.getLogger().addHandler(handler := logging.StreamHandler())
    logging.getLogger().warning("something is left")
    logging.getLogger().removeHandler(handler)
    assert terminal.getvalue() == "something is left\n"


def test_a_run_that_is_done_says_so(tmp_path: Path) -> None:
    said: list[str] = []
    starts(toy_request(tmp_path))
    (tmp_path / "checkpoints.jsonl").write_text(
        '{"name": "000010", "batch": 10, "state_path": "tinker://a"}\n'
        '{"name": "final", "batch": 15, "state_path": "tinker://b"}\n'
    )
    result = train(toy_request(tmp_path, say=said.append))
    assert "this run is already done" in said[0]
    assert "checkpoint of step 15" in said[0]
    assert result.log_dir == tmp_path
    assert result.try_it is None, "there are no weights to sample from"
    starts(toy_request(tmp_path, steps=20, say=said.append))
    assert said[1:] == ["continuing from the checkpoint of step 15"]


def test_options_that_a_continued_run_changes_are_said(tmp_path: Path) -> None:
    def request(**changes: Any) -> Any:
        return toy_request(tmp_path, options={"reward": "mean"}, learning_rate=0.1, **changes)

    starts(request())
    (tmp_path / "checkpoints.jsonl").write_text('{"batch": 5, "state_path": "tinker://a"}\n')
    JsonLogger(tmp_path).log_hparams(plan_run(request(), models=tmp_path).config)
    said: list[str] = []
    starts(request(steps=20, say=said.append))
    starts(request(group_size=4, max_tokens=9, say=said.append))
    assert said == [
        "continuing from the checkpoint of step 5",
        "continuing from the checkpoint of step 5",
        "from here on: group_size 4 instead of 16, max_tokens 9 instead of 16",
    ]


def test_the_last_weights_are_tested_when_an_interruption_left_that_out(tmp_path: Path) -> None:
    split = toy_request(tmp_path, test_split="4", task=str(TOY))
    starts(split)
    (tmp_path / "checkpoints.jsonl").write_text(
        '{"name": "final", "batch": 15, "state_path": "tinker://b", "sampler_path": "tinker://c"}\n'
    )
    starts(split)
    starts(replace(split, overrides=("eval_every=3",)))
    assert train(replace(split, eval_every=0)).checkpoint == "tinker://c"
    (tmp_path / "metrics.jsonl").write_text('{"step": 15, "test/env/all/reward/total": 0.0}\n')
    result = train(split)
    assert result.try_it is not None
    assert "--model tinker://c" in result.try_it
    assert result.try_it.endswith(f"--local {tmp_path}")
    assert result.evaluate_it is not None
    # Inspect takes no absolute path without @task
    assert result.evaluate_it == f"inspect eval {TOY}@letters --model tinker/{tmp_path}"


def test_there_is_no_last_checkpoint_before_the_first(tmp_path: Path) -> None:
    assert last_checkpoint(tmp_path) is None
    (tmp_path / "checkpoints.jsonl").write_text('{"name": "x", "batch": 3, "sampler_path": "t"}\n')
    assert last_checkpoint(tmp_path) is None, "nothing to go on from"


SAVED = '{"name": "000003", "batch": 3, "state_path": "tinker://model_a/weights/000003"}'


@pytest.mark.parametrize("end", ["", "\n", '\n{"name": ', "\n{"])
def test_a_line_that_a_killed_run_left_unfinished_is_cut_off(tmp_path: Path, end: str) -> None:
    starts(toy_request(tmp_path))
    (tmp_path / "checkpoints.jsonl").write_text(SAVED + end)
    starts(toy_request(tmp_path))
    assert (tmp_path / "checkpoints.jsonl").read_text() == SAVED + "\n"


@pytest.mark.parametrize("name", ["report.html", "checkpoints.jsonl"])
def test_a_folder_with_files_of_somebody_else_is_refused(tmp_path: Path, name: str) -> None:
    (tmp_path / name).write_text("mine")
    with pytest.raises(ConfigError, match=rf"{name} that is of no run"):
        train(toy_request(tmp_path))
    assert (tmp_path / name).read_text() == "mine"
    assert {each.name for each in tmp_path.iterdir()} == {name}


@pytest.mark.parametrize("held", ["3", "{", None])
def test_a_folder_with_a_damaged_record_of_its_run_is_refused(
    tmp_path: Path, held: str | None
) -> None:
    record = tmp_path / "run.json"
    record.mkdir() if held is None else record.write_text(held)
    with pytest.raises(ConfigError, match=r"run.json is damaged"):
        train(toy_request(tmp_path))


def test_a_folder_in_which_another_process_trains_is_refused(tmp_path: Path) -> None:
    code = (
        "import sys; from filelock import FileLock; lock = FileLock(sys.argv[1]); lock.acquire(); "
        "print(flush=True); sys.stdin.read()"
    )
    other = subprocess.Popen(
        [sys.executable, "-c", code, str(tmp_path / "run.lock")],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
    )
    try:
        assert other.stdout is not None
        other.stdout.readline()
        for task in (f"{TOY}@letters", "a task that would have to be loaded first"):
            with pytest.raises(ConfigError, match="under way"):
                train(toy_request(tmp_path, task=task))
    finally:
        other.kill()
        other.communicate()
    starts(toy_request(tmp_path))  # the lock has gone with its process


def test_a_folder_that_cannot_be_made_is_named() -> None:
    with pytest.raises(ConfigError, match=r"/proc/none cannot be written"):
        train(toy_request(Path("/proc/none")))
