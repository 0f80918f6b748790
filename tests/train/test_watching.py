"""A run can be watched from its files: what is rolled out at the moment, and what has ended."""

from __future__ import annotations

import asyncio
import json
import os
import re
from collections.abc import Callable
from pathlib import Path
from typing import cast

import pytest
from click.testing import CliRunner
from inspect_ai import Task
from inspect_ai.dataset import Sample
from inspect_ai.scorer import includes
from inspect_ai.solver import Generate, TaskState
from tests.functions import make_solver
from tests.waiting import wait_until
from tinker_cookbook.completers import TokenCompleter
from tinker_cookbook.rl.rollouts import do_group_rollout

from inspect_tinker_plugin import as_rl_dataset
from inspect_tinker_plugin.cli.main import rl
from inspect_tinker_plugin.logs.staging import GroupSlot, LogRun, runs_in
from inspect_tinker_plugin.rl.hooks import LIVE, LiveRollout, LiveRollouts
from inspect_tinker_plugin.testing import ScriptedPolicy, load_renderer
from inspect_tinker_plugin.train.history import METRICS, REPORT, REWARD, ROLLOUT_LOGS, RUN, TEST
from inspect_tinker_plugin.train.progress import RunState, read_state, show_progress, watchable
from inspect_tinker_plugin.train.report import write_report


@pytest.fixture
def run(tmp_path: Path) -> Path:
    """The folder of a run that has done one step."""
    for name in (RUN, "config.json"):
        (tmp_path / name).write_text("{}")
    (tmp_path / "logs.log").touch()
    (tmp_path / METRICS).write_text(json.dumps({"step": 0, REWARD: 0.25}) + "\n")
    return tmp_path


@make_solver
async def waits_after_a_turn(
    state: TaskState, generate: Generate, gate: asyncio.Event
) -> TaskState:
    state = await generate(state)
    if state.epoch == 2:
        await gate.wait()
    return state


async def until(run: Path, holds: Callable[[RunState], bool]) -> RunState:
    async with asyncio.timeout(120):
        while not holds(state := read_state(run)):  # noqa: ASYNC110 - it is in files
            await asyncio.sleep(0.1)
    return state


def watched(*arguments: str) -> str:
    result = CliRunner().invoke(rl, ["watch", *arguments])
    assert result.exit_code == 0, result.output
    return result.output


@pytest.mark.parametrize("cancelled", [False, True], ids=["ends", "is cancelled"])
async def test_a_rollout_is_shown_until_it_ends(run: Path, cancelled: bool) -> None:
    gate = asyncio.Event()
    task = Task(
        name="words",
        dataset=[Sample(id="w1", input="?", target="yes")],
        solver=waits_after_a_turn(gate),
        scorer=includes(),
    )
    renderer = load_renderer()
    policy = cast(TokenCompleter, ScriptedPolicy(renderer, lambda request: "yes"))
    with watchable(run):
        data = as_rl_dataset(task, renderer, group_size=2, log_dir=run / ROLLOUT_LOGS)
        [builder] = data.get_batch(0)
        group = asyncio.create_task(do_group_rollout(builder, policy))
        state = await until(run, lambda state: bool(state.ended and state.running))
        assert state.trained
        [rollout] = state.running
        assert (rollout.task, rollout.sample, rollout.epoch) == ("words", "w1", 2)
        assert rollout.turns == 1
        shown = watched(str(run), "--once")
        assert "1 step done, training" in shown
        assert "1 rollout running" in shown
        assert "w1 (2)" in shown
        if cancelled:
            group.cancel()
            await asyncio.wait([group])
        else:
            gate.set()
            await group
        state = await until(run, lambda state: not state.running)
        assert [each.reward for each in state.ended] == [1.0] * (1 if cancelled else 2)
    assert not (run / LIVE).exists()
    assert "not training now" in watched(str(run))


def test_a_worker_says_that_its_rollouts_have_ended(run: Path) -> None:
    async def begin_and_end(live: LiveRollouts, *, end: bool) -> None:
        live.start("e1", task="words", sample="w1", epoch=1)
        await asyncio.sleep(0)
        if end:
            live.end("e1", reward=0.5)

    with watchable(run):
        live = LiveRollouts.of(run)
        assert live is not None
        for end in (False, True):  # each group of a worker has a loop of its own
            asyncio.run(begin_and_end(live, end=end))
        state = read_state(run)
    assert state.running == []
    assert [rollout.reward for rollout in state.ended] == [0.5]


def test_what_a_dead_process_has_left_is_not_shown(run: Path) -> None:
    rollout = {"task": "words", "sample": 1, "epoch": 1, "turns": 0, "started": 1.0}
    with watchable(run):
        about = {"host": os.uname().nodename, "pid": 2**22 + 1, "running": [rollout], "ended": []}
        file = run / LIVE / "worker.json"
        file.write_text(json.dumps(about))
        assert read_state(run).running == []
        file.write_text(json.dumps({**about, "host": "another-node"}))
        assert read_state(run).running == [LiveRollout.model_validate(rollout)]
        file.write_text(json.dumps({**about, "pid": os.getpid()}))
        os.utime(file, (1.0, 1.0))  # written before the process with its number began
        assert read_state(run).running == []


@pytest.mark.parametrize("name", ["trainer.json", "worker.json"])
@pytest.mark.parametrize(
    "wrong", ["[1]", "{}", '"running": [{}]', '"ended": 0', '"pid": "x"', "[" * 10_000]
)
def test_a_file_of_another_form_is_not_shown(run: Path, name: str, wrong: str) -> None:
    about = f'"host": "{os.uname().nodename}", "pid": {os.getpid()}'
    with watchable(run):
        (run / LIVE / name).write_text(f"{{{about}, {wrong}}}" if ":" in wrong else wrong)
        assert "1 step done" in watched(str(run), "--once")


def test_a_terminal_obeys_nothing_that_a_sample_or_an_error_says(run: Path) -> None:
    rollout = {"task": "words", "sample": "\x1b]0;w1", "epoch": 1, "turns": 0, "started": 1.0}
    error = {"reward": None, "error": "it said\n\x1b[2Jgone", "ended": 2.0}
    about = {"host": os.uname().nodename, "pid": os.getpid()}
    with watchable(run):
        lists = {"running": [rollout], "ended": [{**rollout, **error}]}
        (run / LIVE / "worker.json").write_text(json.dumps({**about, **lists}))
        shown = watched(str(run), "--once")
    assert "\x1b" not in shown
    assert "it said \N{REPLACEMENT CHARACTER}[2Jgone" in shown


def test_a_run_can_be_watched_though_a_worker_of_the_last_one_still_writes(
    run: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (run / LIVE).mkdir()
    monkeypatch.setattr("shutil.rmtree", lambda *_, **options: None)  # a file came meanwhile
    with watchable(run):
        assert read_state(run).trained


def test_a_batch_whose_log_is_made_in_this_moment_has_no_parts(tmp_path: Path) -> None:
    run = LogRun(tmp_path, "run")
    run.folder.mkdir(parents=True)
    assert run.add_part(GroupSlot(batch=0, index=0, groups=1), Path.touch)
    [listed] = run.attempts()
    assert (len(listed.parts()), listed.groups) == (1, 1)
    run.remove(listed)
    assert (listed.parts(), listed.groups, run.attempts()) == ([], 0, [])
    run.discard_if_empty()
    assert (run.attempts(), runs_in(tmp_path)) == ([], [])


def test_the_report_is_renewed_while_the_run_goes_on(run: Path) -> None:
    with show_progress(run, lambda line: None):
        with (run / METRICS).open("a") as file:
            file.write(json.dumps({"step": 1, REWARD: 0.5}) + "\n")
        wait_until((run / REPORT).is_file)
        assert "0.500" in (run / REPORT).read_text()


def test_the_test_of_the_last_weights_is_not_one_more_step(run: Path) -> None:
    with (run / METRICS).open("a") as metrics:
        metrics.write(json.dumps({"step": 1, TEST + REWARD: 0.5}) + "\n")
    write_report(run)
    assert "<td>after 1</td><td></td><td>0.500</td>" in (run / REPORT).read_text()
    shown = watched(str(run), "--once")
    assert re.search(r"^ *after 1 +0\.500", shown, re.MULTILINE), shown
    assert "1 step done" in shown


def test_a_folder_without_a_run_is_refused(tmp_path: Path) -> None:
    result = CliRunner().invoke(rl, ["watch", str(tmp_path)])
    assert result.exit_code == 1
    assert "is not the folder of a run" in result.output
