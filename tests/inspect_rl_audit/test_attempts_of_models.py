"""An audit samples attempts from a model, once, and other commands take its advice."""

from __future__ import annotations

import json
import shutil
import subprocess
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from click.testing import CliRunner
from inspect_ai.log import list_eval_logs, read_eval_log
from tests.commands import Command
from tests.inspect_rl_audit.corpus.answers import attempt

import tinker_local as local
from inspect_rl_audit.contract import AuditOptions
from inspect_rl_audit.records import ModelAttempt
from inspect_rl_audit.report import AuditReport, render, signal_lines
from inspect_rl_audit.run import run_audit
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


NOWHERE = "http://127.0.0.1:9"


def invoke(*arguments: object) -> Any:
    return CliRunner().invoke(rl, [str(each) for each in arguments])


def in_own_process(*arguments: object, **variables: str) -> subprocess.CompletedProcess[str]:
    """Run a command in its own process: the SDK's client keeps its connections open."""
    done = Command(*map(str, arguments), cwd=Path.cwd(), environ=variables).wait(300)
    assert "Warning" not in done.stderr
    return done


def audit(*arguments: object, **variables: str) -> dict[str, Any]:
    done = in_own_process("audit", *arguments, **variables)
    assert done.returncode == 0, done.stderr
    report: dict[str, Any] = json.loads(done.stdout)
    return report


@pytest.fixture
def task(tmp_path: Path) -> str:
    (tmp_path / "task.py").write_text(TASK)
    return f"{tmp_path}/task.py@three"


@pytest.fixture
def attempts(tmp_path: Path) -> Path:
    return tmp_path / "out" / "attempts"


def attempts_at(folder: Path) -> dict[str, int]:
    counts: dict[str, int] = {}
    for info in list_eval_logs(str(folder)):
        for sample in read_eval_log(info).samples or []:
            counts[str(sample.id)] = counts.get(str(sample.id), 0) + 1
    return counts


@pytest.mark.local
@pytest.mark.nightly
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


@pytest.fixture(scope="module")
def server(tiny_model: Path) -> Iterator[local.LocalServer]:
    """A server with the Tinker API that commands know by environment variables only."""
    with local.LocalServer(tiny_model) as running:
        yield running


@pytest.mark.local
@pytest.mark.nightly
def test_a_hosted_model_is_sampled_once(
    task: str, attempts: Path, tiny_model: Path, server: local.LocalServer, tmp_path: Path
) -> None:
    command = [task, "--model", tiny_model, "--renderer", "qwen3_instruct", "--episodes", 4]
    command += ["--max-tokens", 8, "--out", tmp_path / "out", "--json"]
    command += ["--probe", "signal", "--probe", "cost", "--fail-on", "never"]
    # what a server refuses is no attempt, and is tried again
    other = tmp_path / "other"
    shutil.copytree(tiny_model, other)
    refused = in_own_process(
        "audit", *[other if each is tiny_model else each for each in command], **server.environ
    )
    assert refused.returncode == 1
    assert f"cannot sample from {other}" in refused.stderr
    assert f"serves {tiny_model}" in refused.stderr
    assert not list(attempts.rglob("*.eval"))

    report = audit(*command, **server.environ)
    every = {"plain": 4, "a, odd [id]*": 4, "a, odd [id]**": 4}
    assert attempts_at(attempts) == every
    assert report["summary"]["signal"]["attempts"] == 12
    # nothing is missing, so nothing is asked
    again = audit(*command, **{**server.environ, "TINKER_BASE_URL": NOWHERE})
    assert again["summary"]["signal"] == report["summary"]["signal"]


@pytest.mark.local
@pytest.mark.nightly
def test_a_hosted_model_is_rolled_out(
    task: str, tiny_model: Path, server: local.LocalServer, tmp_path: Path
) -> None:
    command = ["rollout", task, "--model", tiny_model, "--renderer", "qwen3_instruct", "--json"]
    command += ["--max-tokens", "8", "--group-size", "2", "--sample-id", "plain"]
    done = in_own_process(*command, **server.environ)
    assert done.returncode == 0, done.stderr
    rollouts = [json.loads(line) for line in done.stdout.splitlines()]
    assert [each["sample_id"] for each in rollouts] == ["plain", "plain"]
    assert all(0 < each["output_tokens"] <= 8 for each in rollouts)
    weights = "tinker://unknown/sampler_weights/1"
    lost = in_own_process(
        *[weights if each is tiny_model else each for each in command],
        *("--tokenizer", tiny_model),
        **server.environ,
    )
    assert lost.returncode == 1
    assert f"there are no weights {weights}" in lost.stderr
    assert not lost.stdout, "nothing was rolled out"
    started = in_own_process(
        *("train", task, "--model", tiny_model, "--renderer", "qwen3_instruct"),
        *("--learning-rate", "1e-4", "--log-dir", tmp_path / "run"),
        *(f"load_checkpoint_path={weights}", "--steps", "1"),
        **server.environ,
    )
    assert started.returncode == 1
    assert f"there are no weights {weights}" in started.stderr


@pytest.mark.local
@pytest.mark.slow
@pytest.mark.parametrize(
    "command",
    ["rollout", *(pytest.param(each, marks=pytest.mark.nightly) for each in ("audit", "train"))],
)
def test_a_server_that_is_not_there_is_reported_at_once(
    command: str, task: str, tiny_model: Path, tmp_path: Path
) -> None:
    options = ["--model", tiny_model, "--renderer", "qwen3_instruct"]
    options += {"audit": ["--out", tmp_path / "out"], "rollout": []}.get(
        command, ["--learning-rate", "1e-4", "--log-dir", tmp_path / "run"]
    )
    variables = {"TINKER_BASE_URL": NOWHERE, "TINKER_API_KEY": "tml-none"}
    done = in_own_process(command, task, *options, **variables)
    assert done.returncode == 1
    assert f"no Tinker API server can be reached at {NOWHERE}" in done.stderr


async def signal_of(task: str, out: Path, *tried: ModelAttempt) -> AuditReport:
    options = AuditOptions(out=out, attempts=tried, probes=["signal"])
    return await run_audit(resolve_task(task).task, options)


async def test_attempts_without_a_reward_recommend_nothing(task: str, tmp_path: Path) -> None:
    report = await signal_of(task, tmp_path / "out", attempt("plain", None, failed=True))
    assert signal_lines(report.summary["signal"], "out") == ["1 attempt: none ended with a reward"]
    assert render(report.as_json())


async def test_findings_name_logs_from_the_folder_of_the_audit(task: str, tmp_path: Path) -> None:
    """So that both can be moved or shared together, wherever the attempts were sampled."""
    out = tmp_path / "out"
    for folder, named in ((out / "attempts", "attempts/x.eval"), (tmp_path, "../x.eval")):
        tried = replace(attempt("plain", 0.0), log=str(folder / "x.eval"))
        report = await signal_of(task, out, *[tried] * 4)
        logs = {f.evidence["log"] for f in report.findings if "log" in f.evidence}
        assert logs == {named}
        assert str(tmp_path) not in json.dumps(report.as_json()["findings"])


@pytest.mark.parametrize(
    ("options", "says"),
    [
        (["--local", "--logs", "x"], "does not go with --model or --local"),
        (["--model", "m", "--logs", "x"], "does not go with --model or --local"),
        (["--episodes", "3"], "--episodes needs --model or --local"),
        (["--renderer", "qwen3"], "--renderer needs --model or --local"),
        (["--local", "--base-url", "http://x"], "starts its own server"),
        (["--local", "--max-tokens", "8192"], "--max-tokens 8,192 is too much"),
        (["--local", "--model", "/nowhere"], "not a model folder"),
        (["--model", "Qwen/Qwen3-8B"], "no TINKER_API_KEY"),
        (["--tokenizer", "x"], "--tokenizer needs --model or --local"),
        (["--model", "x", "--base-url", NOWHERE, "--renderer", "no"], "there is no renderer no"),
        (["--logs", "/nowhere"], "no log and no folder /nowhere"),
        (["--sample-id", "@/nowhere"], "cannot be read"),
    ],
    ids=str,
)
def test_options_that_cannot_work_are_refused(
    options: list[str], says: str, task: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("TINKER_API_KEY", "tml-none" if "--renderer" in options else "")
    monkeypatch.setattr(
        "tinker_local.settings.missing", lambda: "the extra is not installed"
    )  # asked last
    done = invoke("audit", task, "--out", tmp_path / "out", *options)
    assert done.exit_code != 0
    assert says in done.output
    assert "unexpected" not in done.output


async def test_a_sample_that_was_not_tried_is_kept(task: str, tmp_path: Path) -> None:
    """Also one whose rewards differ only because an episode failed is known to be flat."""
    right, failed = attempt("plain", 1.0), attempt("plain", 0.0, failed=True)
    report = await signal_of(task, tmp_path / "out", right, right, right, failed)
    signal = report.summary["signal"]
    assert (signal["flat_groups"], signal["solved_by_all"]) == (1, 1)
    assert signal["recommendation"]["group_size"] == 8  # the usual one: no rewards say another
    assert (tmp_path / "out" / "samples.txt").read_text() == "a, odd [id]*\na, odd [id]**\n"
    await signal_of(task, tmp_path / "out", right, attempt("plain", 0.0))
    assert not (tmp_path / "out" / "samples.txt").exists()


def test_an_audit_with_a_solver_is_continued(task: str, tmp_path: Path) -> None:
    command = ["audit", task, "--solver", "inspect_ai/generate", "--out", tmp_path / "out"]
    command += ["--budget", "4", "--json", "--fail-on", "never"]
    assert json.loads(invoke(*command).stdout)["summary"]["episodes"] == 4
    assert json.loads(invoke(*command).stdout)["summary"]["episodes"] == 8
