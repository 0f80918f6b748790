"""An audit samples attempts from a model, once, and other commands take its advice."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from click.testing import CliRunner
from inspect_ai.log import list_eval_logs, read_eval_log

from inspect_tinker_plugin import local
from inspect_tinker_plugin.audit.attempts import ModelAttempt
from inspect_tinker_plugin.audit.options import AuditOptions
from inspect_tinker_plugin.audit.run import run_audit
from inspect_tinker_plugin.cli.main import rl
from inspect_tinker_plugin.tasks.reference import resolve_task

TASK = """
from inspect_ai import Task, task
from inspect_ai.dataset import Sample
from inspect_ai.scorer import Score, mean, scorer

@scorer(metrics=[mean()])
def letters():
    async def score(state, target):
        text = state.output.completion
        if state.sample_id == "a, odd [id]*":
            return Score(value=1.0)
        return Score(value=sum(c in "abcdefghijklm" for c in text) / max(1, len(text)))
    return score

@task
def three():
    ids = ("plain", "a, odd [id]*", "a, odd [id]**")
    return Task(dataset=[Sample(id=i, input="Write letters.") for i in ids], scorer=letters())
"""


def invoke(*arguments: object) -> Any:
    return CliRunner().invoke(rl, [str(each) for each in arguments])


def audit(*arguments: object) -> dict[str, Any]:
    """Run the command in a process of its own: the SDK's client keeps its connections open."""
    done = subprocess.run(
        [sys.executable, "-c", "from inspect_tinker_plugin.cli.main import main; main()", "audit"]
        + [str(each) for each in arguments],
        capture_output=True,
        text=True,
        check=True,
    )
    assert "Warning" not in done.stderr
    report: dict[str, Any] = json.loads(done.stdout)
    return report


@pytest.fixture
def task(tmp_path: Path) -> str:
    (tmp_path / "task.py").write_text(TASK)
    return f"{tmp_path}/task.py@three"


@pytest.fixture
def attempts(tmp_path: Path) -> Path:
    if (reason := local.missing()) is not None:
        pytest.skip(reason)
    return tmp_path / "out" / "attempts"


def attempts_at(folder: Path) -> dict[str, int]:
    counts: dict[str, int] = {}
    for info in list_eval_logs(str(folder)):
        for sample in read_eval_log(info).samples or []:
            counts[str(sample.id)] = counts.get(str(sample.id), 0) + 1
    return counts


@pytest.mark.local
@pytest.mark.slow
def test_a_local_model_is_sampled_once_and_the_advice_is_taken(
    task: str, attempts: Path, tmp_path: Path
) -> None:
    out = tmp_path / "out"
    sampling = ["--local", "--episodes", 4, "--max-tokens", 8]
    command = [task, *sampling, "--out", out, "--json"]
    command += ["--probe", "signal", "--probe", "cost", "--fail-on", "never"]
    audit(*command, "--samples", 2)
    assert attempts_at(attempts) == {"plain": 4, "a, odd [id]*": 4}
    report = audit(*command)
    signal = report["summary"]["signal"]
    assert (signal["attempts"], signal["groups"], signal["flat_groups"]) == (12, 3, 1)
    assert signal["solved_by_all"] == 1
    assert report["summary"]["cost"]["exact"] is True
    assert report["summary"]["cost"]["per_episode"]["sampled"] <= 8
    assert attempts_at(attempts) == {"plain": 4, "a, odd [id]*": 4, "a, odd [id]**": 4}

    before = sorted(attempts.rglob("*.eval"))
    assert audit(*command)["summary"]["signal"] == signal
    assert sorted(attempts.rglob("*.eval")) == before

    # an exact list of ids, though one of them is a pattern that matches the one left out
    keep = out / "samples.txt"
    assert keep.read_text() == "plain\na, odd [id]**\n"
    exported = invoke("export", task, "--output", tmp_path / "rows", "--sample-id", f"@{keep}")
    assert exported.exit_code == 0, exported.output
    assert "Wrote 2 samples" in exported.output
    advice = json.loads((out / "audit.json").read_text())["summary"]["signal"]["recommendation"]
    options = ["--group-size", advice["group_size"], "--max-tokens", advice["max_tokens"]]
    planned = invoke(
        *("train", task, "--local", "--dry-run", "--sample-id", f"@{keep}"),
        *(*options, "--log-dir", tmp_path / "run"),
    )
    assert planned.exit_code == 0, planned.output
    assert f"2 groups of {advice['group_size']} episodes" in planned.output
    assert f"at most {advice['max_tokens']} tokens" in planned.output


@pytest.mark.parametrize(
    ("options", "says"),
    [
        (["--local", "--logs", "x"], "does not go with --model or --local"),
        (["--model", "m", "--logs", "x"], "does not go with --model or --local"),
        (["--episodes", "3"], "--episodes needs --model or --local"),
        (["--renderer", "qwen3"], "--renderer needs --model or --local"),
        (["--local", "--base-url", "http://x"], "starts its own server"),
        (["--local", "--model", "/nowhere"], "not a model folder"),
        (["--model", "Qwen/Qwen3-8B"], "no TINKER_API_KEY"),
        (["--model", "x", "--base-url", "http://127.0.0.1:9", "--renderer", "no"], "no"),
        (["--logs", "/nowhere"], "no log /nowhere"),
        (["--sample-id", "@/nowhere"], "cannot be read"),
    ],
    ids=str,
)
def test_options_that_cannot_work_are_refused(
    options: list[str], says: str, task: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv("TINKER_API_KEY", raising=False)
    done = invoke("audit", task, "--out", tmp_path / "out", *options)
    assert done.exit_code != 0
    assert says in done.output
    assert "unexpected" not in done.output


def attempt(sample: str, reward: float | None, failed: bool = False) -> ModelAttempt:
    return ModelAttempt(
        sample=sample,
        group=sample,
        reward=reward,
        stop="stop",
        turns=1,
        input_tokens=10,
        output_tokens=5,
        cached_tokens=0,
        trained_tokens=None,
        seconds=1.0,
        sandbox_seconds=0.0,
        failed=failed,
        log="x.eval",
        epoch=1,
    )


async def test_a_sample_that_was_not_tried_is_kept(task: str, tmp_path: Path) -> None:
    """Also one whose rewards differ only because an episode failed is known to be flat."""
    seen = [
        *(attempt("plain", 1.0) for _ in range(3)),
        attempt("plain", 0.0, failed=True),
    ]
    options = AuditOptions(out=tmp_path / "out", attempts=seen, probes=["signal"])
    report = await run_audit(resolve_task(task).task, options)
    signal = report.summary["signal"]
    assert (signal["flat_groups"], signal["solved_by_all"]) == (1, 1)
    assert (tmp_path / "out" / "samples.txt").read_text() == "a, odd [id]*\na, odd [id]**\n"
    better = AuditOptions(
        out=tmp_path / "out",
        attempts=[attempt("plain", 1.0), attempt("plain", 0.0)],
        probes=["signal"],
    )
    await run_audit(resolve_task(task).task, better)
    assert not (tmp_path / "out" / "samples.txt").exists()


def test_an_audit_with_a_solver_is_continued(task: str, tmp_path: Path) -> None:
    command = ["audit", task, "--solver", "inspect_ai/generate", "--out", tmp_path / "out"]
    command += ["--budget", "4", "--json", "--fail-on", "never"]
    assert json.loads(invoke(*command).stdout)["summary"]["episodes"] == 4
    assert json.loads(invoke(*command).stdout)["summary"]["episodes"] == 8
