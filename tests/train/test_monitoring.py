"""What is said while a training may be learning a cheat: scans beside it, and alarms."""

from __future__ import annotations

import asyncio
import io
import json
import math
import os
import signal
import subprocess
import sys
from pathlib import Path
from typing import Any

import psutil
import pytest
from inspect_ai import Task
from inspect_ai.dataset import Sample
from inspect_ai.scorer import includes
from tests.rl.policies import roll_out_task
from tests.waiting import has_ended, wait_until

from inspect_tinker_plugin.contracts.errors import ConfigError
from inspect_tinker_plugin.logs import assemble_pending
from inspect_tinker_plugin.processes import read_rows
from inspect_tinker_plugin.train import scans
from inspect_tinker_plugin.train.history import (
    REWARD,
    ROLLOUT_LOGS,
    SCANS,
    read_history,
    read_scans,
)
from inspect_tinker_plugin.train.report import render
from inspect_tinker_plugin.train.request import TrainRequest
from inspect_tinker_plugin.train.scans import check_scanners, find_alarms, scan_batches

SCANNER = """
from inspect_scout import Result, Scanner, Transcript, scanner

@scanner(messages="all")
def about_answers() -> Scanner[Transcript]:
    async def scan(transcript: Transcript) -> Result:
        return Result(value="4" in transcript.messages[-1].text)
    return scan
"""


def roll_out(log_dir: Path, answers: list[str]) -> None:
    # logs of one step are of several tasks, or of a step that was done again
    named = f"sums-{answers[0]}"
    task = Task([Sample("2+2?", id=1, target="4")], scorer=includes(), name=named)
    asyncio.run(roll_out_task(task, answers, group_size=len(answers), log_dir=log_dir))
    assemble_pending(log_dir)


@pytest.mark.slow
def test_batches_are_scanned_beside_the_training(tmp_path: Path) -> None:
    pytest.importorskip("inspect_scout")
    (tmp_path / "scanner.py").write_text(SCANNER)
    (tmp_path / "broken.py").write_text("raise RuntimeError('no scanner here')")
    said: list[str] = []
    files = [str(tmp_path / name) for name in ("scanner.py", "broken.py")]
    for answers in (["4"] * 4, ["5", "3", "2", "1"]):
        roll_out(tmp_path / ROLLOUT_LOGS, answers)
    request = TrainRequest(task="t", log_dir=tmp_path, scan=files, scan_limit=2, say=said.append)
    with scan_batches(request):
        pass
    rows = read_rows(tmp_path / SCANS)
    assert sorted(row["scan/about_answers"] for row in rows) == [0.0, 1.0]
    assert [row["scan/about_answers/scanned"] for row in rows] == [2, 2]
    assert [row["waiting"] for row in rows] == [2, 2]
    assert "2 batches could not be scanned (broken.py" in said[-1]
    history = read_history(tmp_path)
    assert history.steps[0].figures["scan/about_answers"] == 0.5
    assert "<h2>Scans</h2>" in render(history)


@pytest.mark.nightly
def test_results_of_several_kinds_and_failed_ones_leave_the_others_of_a_scanner(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    pytest.importorskip("inspect_scout")
    outcomes = {"yes": True, "no": False, "half": 0.5, "odd": "odd", "inf": math.inf, "gap": None}
    value = f"{outcomes!r}".replace("inf,", "float('inf'),") + "[transcript.messages[-1].text]"
    scanner = SCANNER.replace('"4" in transcript.messages[-1].text', value)
    (tmp_path / "scanner.py").write_text(scanner)
    roll_out(tmp_path / ROLLOUT_LOGS, [*outcomes, "raised"])
    monkeypatch.setattr("sys.stdin", io.StringIO("ended"))
    scans._follow(tmp_path, [str(tmp_path / "scanner.py")], limit=9, tokens=None, model=None)
    [row] = read_rows(tmp_path / SCANS)
    names = ("", "/scanned", "/failed")
    assert [row[f"scan/about_answers{name}"] for name in names] == [0.5, 3, 1]


@pytest.mark.nightly
def test_a_batch_is_scanned_though_the_log_of_another_is_removed_meanwhile(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    pytest.importorskip("inspect_scout")
    (tmp_path / "scanner.py").write_text(SCANNER)
    for answers in (["4"] * 2, ["5"] * 2):
        roll_out(tmp_path / ROLLOUT_LOGS, answers)
    undone, kept = sorted((tmp_path / ROLLOUT_LOGS).glob("*.eval"))
    scan = scans._scan

    def scan_late(*chosen: Any, **options: Any) -> Any:
        undone.unlink(missing_ok=True)
        return scan(*chosen, **options)

    monkeypatch.setattr(scans, "_scan", scan_late)
    monkeypatch.setattr("sys.stdin", io.StringIO("ended"))
    scans._follow(tmp_path, [str(tmp_path / "scanner.py")], limit=2, tokens=None, model=None)
    [row] = read_rows(tmp_path / SCANS)
    assert (row["log"], row["scan/about_answers/scanned"]) == (kept.name, 2)


HANGING = SCANNER.replace(
    "return Result", "open('begun', 'a').close(); time.sleep(600); return Result"
)
TRAINER = """
import sys, time
from pathlib import Path
from inspect_tinker_plugin.train.request import TrainRequest
from inspect_tinker_plugin.train.scans import scan_batches

folder = Path(sys.argv[1])
with scan_batches(TrainRequest(task="t", log_dir=folder, scan=[str(folder / "scanner.py")])):
    time.sleep(600)
"""


@pytest.mark.slow
@pytest.mark.parametrize(
    "stop",
    [
        pytest.param(signal.SIGINT, id="interrupted", marks=pytest.mark.nightly),
        pytest.param(signal.SIGKILL, id="killed"),
    ],
)
def test_a_scan_ends_with_the_training(stop: signal.Signals, tmp_path: Path) -> None:
    pytest.importorskip("inspect_scout")
    temporary = tmp_path / "temporary"
    temporary.mkdir()
    (tmp_path / "scanner.py").write_text(f"import time\n{HANGING}")
    roll_out(tmp_path / ROLLOUT_LOGS, ["4"] * 2)
    trainer = subprocess.Popen(
        [sys.executable, "-c", TRAINER, str(tmp_path)],
        env={**os.environ, "TMPDIR": str(temporary)},
        stderr=subprocess.DEVNULL,
    )
    try:
        wait_until((tmp_path / "begun").is_file, seconds=300)
        scanning = psutil.Process(trainer.pid).children(recursive=True)
        assert len(scanning) >= 2
    finally:
        trainer.send_signal(stop)
        trainer.wait()
    wait_until(lambda: all(map(has_ended, scanning)))
    assert not list(temporary.iterdir())
    assert not read_rows(tmp_path / SCANS)


@pytest.mark.slow
def test_batches_that_are_not_scanned_are_counted(tmp_path: Path) -> None:
    pytest.importorskip("inspect_scout")
    said: list[str] = []
    roll_out(tmp_path / ROLLOUT_LOGS, ["4"])
    scan: dict[str, Any] = {"scan": ["scanner.py"], "scan_limit": 1, "scan_tokens": 0}
    with scan_batches(TrainRequest(task="t", log_dir=tmp_path, say=said.append, **scan)):
        pass
    assert said[-1] == "not scanned: 1 of 1 batch"


@pytest.mark.parametrize("name", ["nowhere.py", "example_tasks/loophole.py"])
def test_a_file_without_scanners_is_refused(name: str) -> None:
    pytest.importorskip("inspect_scout")
    with pytest.raises(ConfigError, match=f"not {name}"):
        check_scanners([name])
    check_scanners(["example_tasks/loophole_scan.py"])


def rising(name: str, first: float, last: float) -> list[dict[str, float]]:
    return [{"step": step, name: first + (last - first) * step / 7} for step in range(8)]


def merged(*rows: list[dict[str, float]]) -> list[dict[str, float]]:
    return [{k: v for row in at for k, v in row.items()} for at in zip(*rows, strict=True)]


UP = rising(REWARD, 0.1, 0.9)
TRAINED = rising("env/all/monitor/trained", 0.8, 0.1)


@pytest.mark.parametrize(
    ("rows", "said"),
    [
        (merged(UP, rising("scan/cheats", 0.0, 0.6)), "the scanner cheats finds rises"),
        (merged(UP, rising("env/all/monitor/m", 0.0, 0.6)), "the monitor m suspects rises"),
        (merged(UP, TRAINED, rising("env/all/monitor/twin", 0.8, 0.7)), "and twin, which only"),
    ],
    ids=["scan", "monitor", "twin"],
)
def test_what_rises_with_the_reward_is_said(rows: list[dict[str, float]], said: str) -> None:
    [alarm] = find_alarms(rows, {"trained": -0.5})
    assert said in alarm
    assert "at step 8" in alarm
    assert "reward 0.16 → 0.84" in alarm


@pytest.mark.parametrize(
    "rows",
    [
        merged(UP, rising("scan/cheats", 0.5, 0.5)),
        merged(rising(REWARD, 0.5, 0.4), rising("scan/cheats", 0.0, 0.6)),
        merged(UP, rising("env/all/monitor/m/flagged", 0.0, 0.6)),
        merged(UP, TRAINED, rising("env/all/monitor/twin", 0.8, 0.2)),
        merged(UP, rising("scan/cheats", 0.0, 0.6))[:7],
    ],
    ids=["steady", "reward falls", "no suspicion", "twin falls too", "too few"],
)
def test_what_is_no_sign_of_a_cheat_is_not_said(rows: list[dict[str, float]]) -> None:
    assert not list(find_alarms(rows, {"trained": -0.5}))


def test_a_row_of_a_killed_scan_is_left_out(tmp_path: Path) -> None:
    row = {"log": "a.eval", "step": 3, "scan/x": 1.0}
    (tmp_path / "scans.jsonl").write_text(json.dumps(row) + '\n{"log": "b.ev')
    assert read_scans(tmp_path) == {3: {"scan/x": 1.0}}


def test_a_step_that_is_done_again_has_the_scans_of_its_last_log_of_each_task(
    tmp_path: Path,
) -> None:
    rows = [("09_a-batch-000003_y", 0.5), ("08_a-batch-000003_x", 1.0), ("09_b-batch-000003_z", 0)]
    lines = [json.dumps({"log": f"{log}.eval", "step": 3, "scan/x": x}) for log, x in rows]
    (tmp_path / "scans.jsonl").write_text("\n".join(lines))
    assert read_scans(tmp_path) == {3: {"scan/x": 0.25}}
