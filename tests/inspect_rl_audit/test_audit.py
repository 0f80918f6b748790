"""Audits are bounded, continue where they stopped, and report findings in three ways."""

from __future__ import annotations

import asyncio
import json
import os
import re
import sys
from collections import Counter
from functools import partial
from pathlib import Path
from typing import Any

import pytest
from click.testing import CliRunner, Result
from inspect_ai import Task, eval_async
from inspect_ai.dataset import Sample
from inspect_ai.log import read_eval_log_sample_async
from inspect_ai.scorer import Score, Target, includes, mean
from inspect_ai.solver import TaskState
from tests.commands import Command
from tests.functions import make_scorer
from tests.packages import install

from inspect_rl_audit import (
    AuditOptions,
    Severity,
    run_audit,
)
from inspect_rl_audit.plugin import audit as command
from inspect_rl_audit.probes.cheats import judged_places
from inspect_rl_audit.records import FINISHED, JOURNAL
from inspect_rl_audit.report import render
from inspect_rl_audit.stage import read_budget
from inspect_tinker_plugin.contracts.episodes import TurnRequest
from inspect_tinker_plugin.contracts.errors import ConfigError
from inspect_tinker_plugin.options import DatasetOptions
from inspect_tinker_plugin.plugins.manager import default_plugins
from inspect_tinker_plugin.processes import alone_in
from inspect_tinker_plugin.tasks import task_digest
from inspect_tinker_plugin.testing.replies import scripted_model

SAMPLES = [
    Sample(id="rome", input="Capital of Italy?", target="Rome"),
    Sample(id="oslo", input="Capital of Norway?", target="Oslo"),
    Sample(id="hole", input="Capital of Atlantis?", target=""),
]

TASK_FILE = """
from inspect_ai import Task, task
from inspect_ai.dataset import Sample
from inspect_ai.scorer import includes

@task
def planted():
    print("a task that talks")
    samples = [
        Sample(id="rome", input="Capital of Italy?", target="Rome"),
        Sample(id="hole", input="Capital of Atlantis?", target=""),
    ]
    return Task(dataset=samples, scorer=includes())
"""


def planted() -> Task:
    return Task(name="planted", dataset=list(SAMPLES), scorer=includes())


def audited(folder: Path, *options: str) -> Result:
    """What the command does with the task of the file."""
    (folder / "task.py").write_text(TASK_FILE)
    where = [str(folder / "task.py"), "--out", str(folder / "out")]
    return CliRunner().invoke(command, [*where, *options])


async def test_a_finding_leads_to_the_episode_that_shows_it(tmp_path: Path) -> None:
    report = await run_audit(planted(), AuditOptions(out=tmp_path, probes=["baselines"]))
    [found] = [f for f in report.findings if f.code == "empty-reply"]
    assert (found.severity, found.sample) == (Severity.HIGH, "hole")
    shown = await read_eval_log_sample_async(
        str(tmp_path / found.evidence["log"]), id="hole", epoch=found.evidence["epoch"]
    )
    assert shown.messages[-1].text == ""
    assert shown.scores is not None
    assert shown.scores["includes"].value == "C"
    assert shown.metadata["audit"]["policy"] == "empty"


async def test_an_audit_within_a_budget_goes_on_where_it_stopped(tmp_path: Path) -> None:
    bounded = AuditOptions(out=tmp_path, budget=["10"], probes=["baselines", "gold"])
    first = await run_audit(planted(), bounded)
    assert first.summary["episodes_this_run"] == 10
    assert "budget-spent" in {f.code for f in first.findings}
    played = 10
    for _ in range(20):
        report = await run_audit(planted(), bounded)
        played += report.summary["episodes_this_run"]
        if "budget-spent" not in {f.code for f in report.findings}:
            break
    assert report.summary["episodes"] == played
    assert (tmp_path / FINISHED).is_file()
    assert not (tmp_path / JOURNAL).exists()
    whole = await run_audit(
        planted(), AuditOptions(out=tmp_path / "whole", probes=["baselines", "gold"])
    )
    assert [f.code for f in report.findings] == [f.code for f in whole.findings]


async def test_an_audit_that_was_killed_loses_no_line_but_the_last(tmp_path: Path) -> None:
    options = AuditOptions(out=tmp_path, budget=["6"], probes=["baselines"])
    await run_audit(planted(), options)
    journal = tmp_path / JOURNAL
    whole = journal.read_text()
    journal.write_text(whole[:-40])
    report = await run_audit(planted(), options)
    assert report.summary["episodes"] == 5 + report.summary["episodes_this_run"]


async def test_a_journal_of_another_task_is_refused(tmp_path: Path) -> None:
    options = AuditOptions(out=tmp_path, budget=["3"])
    await run_audit(planted(), options)
    changed = Task(name="planted", dataset=SAMPLES[:2], scorer=includes())
    with pytest.raises(ConfigError, match="another audit"):
        await run_audit(changed, options)


@pytest.mark.parametrize(
    "wrong",
    [{"budget": ["ten"]}, {"dataset": DatasetOptions(reward="meen")}],
    ids=["budget", "reward"],
)
async def test_a_refused_audit_leaves_nothing(tmp_path: Path, wrong: dict[str, Any]) -> None:
    with pytest.raises(ConfigError):
        await run_audit(planted(), AuditOptions(out=tmp_path, **wrong))
    assert os.listdir(tmp_path) == []


def test_samples_may_hold_half_a_character() -> None:
    def digest(text: str) -> str:
        return task_digest(Task(dataset=[Sample(input=text, target="x")]))

    assert digest("a\ud83d") == digest("a\ud83d") != digest("a\ud83e")


@pytest.mark.parametrize(
    ("text", "episodes", "seconds"),
    [(["200"], 200, None), (["90s"], None, 90), (["2m", "5"], 5, 120), (["1h"], None, 3600)],
)
def test_budgets(text: list[str], episodes: int | None, seconds: float | None) -> None:
    budget = read_budget(text)
    assert (budget.episodes, budget.seconds) == (episodes, seconds)


@pytest.mark.parametrize("text", ["", "ten", "-5", "0", "5d"])
def test_a_budget_that_is_none_is_refused(text: str) -> None:
    with pytest.raises(ConfigError, match="budget"):
        read_budget([text])


BROKEN = """
import asyncio
from inspect_rl_audit import Finding, Play
from inspect_tinker_plugin import hookimpl

async def raises(audit):
    raise LookupError("nothing here")

async def forgets(audit):
    return None

async def exits(audit):
    raise SystemExit(0)

async def cancels(audit):
    task = asyncio.ensure_future(asyncio.Event().wait())
    task.cancel()
    await task

async def plays(audit):
    def reply(*turn):
        raise KeyError("level")
    await audit.stage.run([Play(policy="one", sample=each, reply=reply) for each in audit.chosen])

async def exaggerates(audit):
    return [Finding(code="so-bad", severity="terrible", message="Too bad.")]

PROBES = (raises, forgets, exits, cancels, plays, exaggerates)

@hookimpl
def inspect_rl_audit_probes():
    return {each.__name__: (lambda each=each: each) for each in PROBES}
"""


def find_packages_in(folder: Path) -> None:
    sys.path.insert(0, str(folder))
    default_plugins.cache_clear()


@pytest.mark.forks
def test_a_probe_that_fails_stops_no_other(tmp_path: Path) -> None:
    """It is exit code 3, and named with its plugin, package and version, as a hook is."""
    install(tmp_path, "broken_probes", BROKEN, version="3.1")
    (tmp_path / "task.py").write_text(TASK_FILE)
    command = ["audit", "task.py", "--out", "out", "--json", "--fail-on", "never"]
    names = ["raises", "forgets", "exits", "cancels", "plays", "exaggerates", "gold"]
    for name in names:
        command += ["--probe", name]
    done = Command(*command, cwd=tmp_path, prepare=partial(find_packages_in, tmp_path)).wait(300)
    assert done.returncode == 3, done.stderr
    of_plugin = "of plugin 'broken_probes' (broken-probes 3.1) raised"
    for name, how in (
        ("raises", "LookupError: nothing here"),
        ("forgets", "TypeError: it gave None, not a sequence of Finding"),
        ("exits", "SystemExit: 0"),
        ("cancels", "CancelledError: "),
        ("plays", f"KeyError: 'level' ({tmp_path / 'broken_probes.py'}:"),
        ("exaggerates", "ValueError: 'terrible' is no severity; there is high, "),
    ):
        assert f"probe {name!r} {of_plugin} {how}" in done.stderr
    report = json.loads(done.stdout)
    assert [f["code"] for f in report["findings"]].count("probe-failed") == 6
    assert report["summary"]["probes"] == names


async def test_right_answers_are_drawn_as_such(tmp_path: Path) -> None:
    """Whatever their policies are called; what no answer earns is no reward for nothing either."""
    task = Task(dataset=list(SAMPLES[:2]), scorer=includes())
    options = AuditOptions(out=tmp_path, probes=["scorer", "answers"])
    report = await run_audit(task, options)
    page = (tmp_path / "audit.html").read_text()
    drawn = dict(re.findall(r"<tr><td>([^<]+)</td>.*?class=\"bar (\w+)\"", page))
    assert drawn.keys() == report.summary["policies"].keys()
    for policy in ("gold:ANSWER", "rescored:gold", "clock:gold", "repeated:gold", "variant:bold"):
        assert drawn[policy] == "good"
    assert drawn["clock:unknowing"] == "plain"
    assert drawn["hedged-answer"] == "odd"


async def test_a_missing_extra_is_reported(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "datasketch", None)
    report = await run_audit(planted(), AuditOptions(out=tmp_path, probes=["samples"]))
    assert "near-duplicates-unchecked" in {f.code for f in report.findings}


async def test_questions_that_differ_in_a_sign_are_no_duplicates(tmp_path: Path) -> None:
    question = "Write the value that a program in the language Python prints for 17 {} 5."
    samples = [
        Sample(id=sign, input=question.format(sign), target=target)
        for sign, target in {"+": "22", "-": "12", "*": "85"}.items()
    ]
    task = Task(dataset=samples, scorer=includes())
    report = await run_audit(task, AuditOptions(out=tmp_path, probes=["samples"]))
    assert "near-duplicates" not in {f.code for f in report.findings}


async def test_gold_may_be_named(tmp_path: Path) -> None:
    samples = [
        Sample(id=n, input=f"{n}?", target="see key", metadata={"key": f"k{n}"}) for n in (1, 2)
    ]

    @make_scorer(mean())
    async def by_key(state: TaskState, target: Target) -> Score:
        return Score(value=float(state.metadata["key"] in state.output.completion))

    task = Task(dataset=samples, scorer=by_key())
    without = await run_audit(task, AuditOptions(out=tmp_path / "a", probes=["gold"]))
    assert [f.code for f in without.findings] == ["gold-fails"]
    named = await run_audit(task, AuditOptions(out=tmp_path / "b", probes=["gold"], gold="key"))
    assert named.findings == []
    assert named.summary["mean_reward"]["gold"] == 1.0


@pytest.mark.parametrize(
    ("line", "leak"),
    [
        ("FILE ./answer.txt (7 bytes): 1:deploy", True),
        ("FILE ./service.log (9000 bytes): 12:login failed user=deploy", False),
        ("FILE ./data.json (400 bytes): 3:  'target': 'deploy'", True),
        ("FILE ./x (7 bytes): 1:deploy", True),
        ("FILE ./x (9 bytes): 1:deploy33d", False),
        ("ENV SECRET=deploy", True),
        ("ENV USER=deploy", False),
        ("ENV CHECK=deploy", True),
        ("PROC python grader.py --expected deploy", True),
        ("PROC python redeployer.py", False),
        ("NAME ./answers/deploy.txt", True),
        ("NAME ./data/deploy.txt", False),
        ("BASE64 ./expected.b64", True),
        ("BASE64 ./letter.txt", False),
    ],
)
def test_a_leak_is_told_from_the_matter_of_a_task(line: str, leak: bool) -> None:
    assert bool(judged_places(line, "deploy")) == leak


def test_the_command_prints_json_and_nothing_else(tmp_path: Path) -> None:
    done = audited(tmp_path, "--json", "--probe", "baselines")
    report = json.loads(done.stdout)
    assert set(report) == {"task", "findings", "summary"}
    assert {tuple(f) for f in report["findings"]} == {
        ("code", "severity", "sample", "message", "evidence")
    }
    assert done.exit_code == 1
    assert (tmp_path / "out" / "audit.html").is_file()
    again = audited(tmp_path, "--json", "--probe", "baselines", "--fail-on", "never")
    assert again.exit_code == 0


async def test_an_audit_in_python_is_alone_in_its_folder_too(tmp_path: Path) -> None:
    options = AuditOptions(out=tmp_path, probes=["samples"])
    with (
        alone_in(tmp_path, ".audit.lock", taken="is taken"),
        pytest.raises(ConfigError, match="is being written by another"),
    ):
        await run_audit(planted(), options)


def test_two_audits_never_write_into_one_folder(tmp_path: Path) -> None:
    out = tmp_path / "out"
    with alone_in(out, ".audit.lock", taken="is taken"):
        (out / JOURNAL).write_text("of the audit that runs")
        refused = audited(tmp_path, "--probe", "samples", "--overwrite")
    assert (refused.exit_code, refused.stdout) == (1, "")
    assert f"Error: {out} is being written by another `inspect rl audit`" in refused.stderr
    assert (out / JOURNAL).read_text() == "of the audit that runs"


def test_a_command_that_is_refused_leaves_no_folder(tmp_path: Path) -> None:
    assert audited(tmp_path, "--probe", "unknown").exit_code == 1
    assert not (tmp_path / "out").exists()


SIGNAL_TASK = """
from inspect_ai import Task, task
from inspect_ai.dataset import Sample
from inspect_ai.scorer import includes

@task
def quiz():
    names = ("easy", "hard", "mixed")
    return Task(dataset=[Sample(id=n, input=n, target="plum") for n in names], scorer=includes())
"""


async def test_attempts_of_a_model_say_which_samples_teach(tmp_path: Path) -> None:
    (tmp_path / "task.py").write_text(SIGNAL_TASK)
    tries = Counter[str]()

    def says(request: TurnRequest) -> str:
        asked = request.messages[-1].text
        tries[asked] += 1
        return "plum" if asked == "easy" or (asked == "mixed" and tries[asked] == 3) else "pear"

    [log] = await eval_async(
        f"{tmp_path}/task.py@quiz",
        model=scripted_model(says),
        epochs=4,
        log_dir=str(tmp_path / "logs"),
        max_samples=1,
    )
    assert log.status == "success"
    done = await asyncio.to_thread(
        CliRunner().invoke,
        command,
        [
            *(f"{tmp_path}/task.py@quiz", "--logs", (tmp_path / "logs").as_uri()),
            *("--probe", "signal", "--probe", "cost", "--json", "--out", str(tmp_path / "out")),
        ],
    )
    report = json.loads(done.stdout)
    found = {f["code"]: f for f in report["findings"]}
    assert found["solved-by-all"]["sample"] == "easy"
    assert found["solved-by-none"]["sample"] == "hard"
    signal = report["summary"]["signal"]
    assert signal["per_sample"]["mixed"] == {
        "attempts": 4,
        "mean": 0.25,
        **{"pass@1": 0.25, "pass@2": 0.5, "pass@4": 1.0},
    }
    assert (signal["groups"], signal["flat_groups"]) == (3, 2)
    assert found["no-signal"]["severity"] == "medium"
    assert (tmp_path / "out" / "samples.txt").read_text() == "mixed\n"
    evidence = found["solved-by-none"]["evidence"]
    path = str(tmp_path / "out" / evidence["log"])
    shown = await read_eval_log_sample_async(path, id="hard", epoch=evidence["epoch"])
    assert shown.output.completion == "pear"


def test_the_table_names_findings_and_the_report(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    done = audited(tmp_path, "--probe", "baselines")
    assert "empty-reply" in done.stdout
    assert "audit.html" in done.stdout.replace("\n", "")
    lines = done.stdout.splitlines()
    assert all(line == line.rstrip() for line in lines)
    monkeypatch.setenv("COLUMNS", "60")
    narrow = audited(tmp_path, "--probe", "baselines").stdout
    table = narrow[: narrow.index("\nempty-reply: ")]
    assert max(map(len, table.splitlines())) <= 60 < max(map(len, lines))


def test_the_page_shows_what_others_wrote_as_text() -> None:
    report = {
        "task": "<b>task</b>",
        "findings": [
            {
                "code": "mine",
                "severity": "high",
                "sample": "<script>",
                "message": "<img src=x onerror=alert(1)>",
                "evidence": {"log": "logs/<x>.eval", "sample": 1},
            }
        ],
        "summary": {
            "counts": {str(s): 0 for s in Severity},
            "samples": 1,
            "samples_tried": 1,
            "episodes": 1,
            "policies": {"<i>": {"kind": "other", "episodes": 1, "failed": 0, "mean_reward": 0.5}},
        },
    }
    page = render(report)
    for text in ("<script", "<img", "<b>task", "<i>", "http://", "https://"):
        assert text not in page
