"""Whole trainings on the real local server: they learn, stop cleanly, and continue."""

from __future__ import annotations

import json
import re
import shlex
import signal
import subprocess
import sys
from pathlib import Path
from urllib.parse import unquote

import psutil
import pytest
from example_tasks.boxes import FULL
from inspect_ai.log import read_eval_log
from inspect_ai.model import ChatMessageAssistant
from tests.train.runs import (
    MAIN,
    ROOT,
    Run,
    assert_gone,
    environ,
    logged_batches,
    quarters,
    rows,
    steps,
)

pytestmark = [pytest.mark.local, pytest.mark.slow, pytest.mark.long, pytest.mark.timeout(900)]

SMALL = ("--batch-size", "2", "--group-size", "4")


def tried(run: Run) -> list[float]:
    """The rewards of the command that a run ends with."""
    (command,) = re.findall("^try it: (.*)$", run.terminal, re.MULTILINE)
    words = shlex.split(command)[2:]
    done = subprocess.run(
        [sys.executable, "-W", "ignore", "-c", MAIN, *words, "--json"],
        env=environ(run.log_dir),
        capture_output=True,
        text=True,
    )
    assert done.returncode == 0, done.stderr
    return [json.loads(line)["reward"] for line in done.stdout.splitlines()]


def test_the_reward_rises_and_the_folder_tells_everything(tmp_path: Path, tiny_model: Path) -> None:
    run = Run.start(tmp_path, tiny_model, "--steps", "30", "--test-split", "8")
    run.wait_for_steps(1)
    family = run.family()
    assert len(family) >= 3, "trainer, server and engine"
    run.finish()
    assert_gone(family)
    first, last = quarters(tmp_path)
    assert last > first + 0.1, f"{first:.3f} → {last:.3f}\n{run.terminal}"
    assert "step   30/30  reward" in run.terminal
    assert "test reward" in run.terminal
    tests = [row["test/env/all/reward/total"] for row in rows(tmp_path / "metrics.jsonl")[::5]]
    assert tests[-1] > tests[0]
    assert rows(tmp_path / "checkpoints.jsonl")[-1]["name"] == "final"
    assert sorted(logged_batches(tmp_path / "rollouts/train")) == list(range(30))
    measured = [
        (read_eval_log(str(path), header_only=True).eval.metadata or {})["policy_step"]
        for path in sorted(tmp_path.glob("rollouts/test/*.eval"))
    ]
    assert measured == list(range(0, 31, 5))
    rewards = tried(run)
    assert len(rewards) == 4
    assert sum(rewards) / 4 > first, "these are the trained weights"
    page = (tmp_path / "report.html").read_text()
    for path in tmp_path.glob("rollouts/train/*.eval"):
        assert f"rollouts/train/{path.name}" in unquote(page)
    log = read_eval_log(str(next(tmp_path.glob("rollouts/train/*batch-000014_*"))))
    assert log.status == "success"
    assert log.samples is not None
    assert len(log.samples) == 32
    assert all(sample.messages[-1].role == "assistant" for sample in log.samples)


def test_weights_of_a_higher_rank_than_the_servers_default_can_be_tried(
    tmp_path: Path, tiny_model: Path
) -> None:
    run = Run.start(tmp_path, tiny_model, "--steps", "1", *SMALL, "--lora-rank", "64")
    run.finish()
    assert len(tried(run)) == 4


def test_a_model_learns_to_use_its_tool(tmp_path: Path) -> None:
    command = [sys.executable, "-W", "ignore", "-m", "example_tasks.train_boxes", str(tmp_path)]
    done = subprocess.run(command, cwd=ROOT, env=environ(tmp_path), capture_output=True, text=True)
    assert done.returncode == 0, done.stdout + done.stderr
    first, last = quarters(tmp_path / "run")
    assert last > first + 0.1, f"{first:.3f} → {last:.3f}\n{done.stdout}"
    turns = [row["env/all/turns_per_episode"] for row in rows(tmp_path / "run/metrics.jsonl")]
    assert 2 <= turns[-1] < 3, "open one box, submit"
    log = read_eval_log(str(next(tmp_path.glob("run/rollouts/train/*batch-000014_*"))))
    assert log.samples is not None
    opened = [
        message.tool_calls[0].arguments
        for sample in log.samples
        for message in sample.messages
        if isinstance(message, ChatMessageAssistant) and message.tool_calls
        if message.tool_calls[0].function == "open_box"
    ]
    assert opened.count({"box": FULL}) > len(opened) / 2, "it opens the box that holds the word"


def test_the_asynchronous_loop_learns_while_an_evaluation_runs(
    tmp_path: Path, tiny_model: Path
) -> None:
    run = Run.start(
        tmp_path,
        tiny_model,
        *("--steps", "40", "--eval-every", "8", "--eval-limit", "6"),
        *("--eval-task", f"{ROOT}/example_tasks/toy.py@letters"),
        # A batch of the asynchronous loop has as many groups as one of the dataset.
        *("--batch-size", "4", "--group-size", "8", "--learning-rate", "1e-2"),
        "async_config.max_steps_off_policy=2",
        "async_config.groups_per_batch=4",
    )
    run.finish()
    assert len(steps(tmp_path)) >= 12, "stale groups are dropped, so some steps may be missing"
    first, last = quarters(tmp_path)
    assert last > first + 0.1, f"{first:.3f} → {last:.3f}\n{run.terminal}"
    evaluated = [
        row["eval/letters/mean"]
        for row in rows(tmp_path / "metrics.jsonl")
        if "eval/letters/mean" in row
    ]
    assert len(evaluated) >= 3
    assert list((tmp_path / "evaluations").glob("*.eval")), "Inspect's own logs"


@pytest.mark.parametrize(
    ("stop", "workers"),
    [(signal.SIGINT, ()), (signal.SIGTERM, ("--workers", "2"))],
    ids=["Ctrl-C", "SIGTERM with workers"],
)
def test_a_stopped_run_leaves_nothing_behind(
    tmp_path: Path, tiny_model: Path, stop: signal.Signals, workers: tuple[str, ...]
) -> None:
    run = Run.start(tmp_path, tiny_model, *SMALL, "--steps", "50", *workers)
    run.wait_for_steps(1)
    family = run.family()
    run.process.send_signal(stop)
    assert run.process.wait(60) == 128 + stop, run.terminal
    assert_gone(family, seconds=5)
    assert f"--log-dir {tmp_path} starts again" in run.terminal
    assert (tmp_path / "report.html").stat().st_size > 1000
    assert 0 in logged_batches(tmp_path / "rollouts/train")


@pytest.mark.ray
@pytest.mark.filterwarnings("ignore")
def test_training_goes_on_when_a_ray_node_is_killed_in_a_batch(
    tmp_path: Path, tiny_model: Path
) -> None:
    from ray.cluster_utils import Cluster

    cluster = Cluster(
        initialize_head=True, head_node_args={"num_cpus": 2, "include_dashboard": False}
    )
    try:
        second = cluster.add_node(num_cpus=2)
        cluster.wait_for_nodes()
        run = Run.start(
            tmp_path,
            tiny_model,
            *("--batch-size", "4", "--group-size", "4", "--steps", "4"),
            *("--ray", cluster.address),
        )
        run.wait_for_steps(1)
        staged = tmp_path / "rollouts" / "train" / ".rollouts"
        run.wait_until(lambda: any(staged.glob("*/batch-*/*.part")) or len(steps(tmp_path)) > 1)
        cluster.remove_node(second, allow_graceful=False)
        run.finish()
    finally:
        cluster.shutdown()
    assert steps(tmp_path) == [0, 1, 2, 3]
    assert {row["env/all/total_episodes"] for row in rows(tmp_path / "metrics.jsonl")} == {16}


def test_a_server_that_dies_ends_the_run_with_its_reason(tmp_path: Path, tiny_model: Path) -> None:
    run = Run.start(tmp_path, tiny_model, *SMALL, "--steps", "50")
    run.wait_for_steps(1)
    family = run.family()
    for each in family[1:]:
        each.kill()
    assert run.process.wait(60) == 1
    assert "the local server has ended" in run.terminal
    assert_gone([psutil.Process(each.pid) for each in family if each.is_running()], seconds=5)


def test_a_step_without_a_token_to_train_on_says_so(tmp_path: Path, tiny_model: Path) -> None:
    run = Run.start(tmp_path, tiny_model, *SMALL, "--steps", "1", "--context-window", "10")
    assert run.process.wait(300) == 1
    assert "step 1 has nothing to train on: no rollout of its samples (" in run.terminal
    assert "unexpected" not in run.terminal
