"""What `inspect rl watch` shows of a run, from the files of its folder."""

from __future__ import annotations

import json
import os
import shutil
import socket
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import psutil
from rich.console import Group, RenderableType
from rich.table import Table
from rich.text import Text

from inspect_tinker_plugin.contracts.wording import clean_text, counted
from inspect_tinker_plugin.logs.staging import list_folder, runs_in
from inspect_tinker_plugin.rl.hooks import LIVE
from inspect_tinker_plugin.train.history import (
    REWARD,
    ROLLOUT_LOGS,
    SECONDS,
    TEST,
    TEST_LOGS,
    number,
    read_steps,
    step_label,
)
from inspect_tinker_plugin.train.progress import reward_curve

_TRAINER = "trainer.json"
_STEPS = 8


@contextmanager
def watchable(log_dir: Path) -> Iterator[None]:
    """Keep the folder in which processes say what they roll out, while a run is trained."""
    folder = log_dir / LIVE
    shutil.rmtree(folder, ignore_errors=True)
    folder.mkdir(parents=True, exist_ok=True)
    trainer = {"host": socket.gethostname(), "pid": os.getpid()}
    (folder / _TRAINER).write_text(json.dumps(trainer), encoding="utf-8")
    try:
        yield
    finally:
        shutil.rmtree(folder, ignore_errors=True)


@dataclass
class RunState:
    """The state of a run at one moment."""

    trained: bool
    """Whether it is being trained."""
    steps: dict[int, dict[str, Any]]
    """Metrics by step."""
    batches: list[tuple[str, int, int]]
    """What is rolled out, the groups that have ended, and all groups; of unfinished logs."""
    curve: str
    """The reward of all steps."""
    running: list[dict[str, Any]] = field(default_factory=list)
    """Rollouts, the oldest first."""
    ended: list[dict[str, Any]] = field(default_factory=list)
    """Rollouts that have ended, the last first."""


def read_state(log_dir: Path) -> RunState:
    """Read the state of a run, at any time."""
    batches = [
        (f"{what} {(attempt.batch or 0) + 1}", len(attempt.parts()), attempt.groups)
        for what, name in (("batch", ROLLOUT_LOGS), ("test", TEST_LOGS))
        for run in runs_in(log_dir / name)
        for attempt in run.attempts()
    ]
    trainer, *files = [_read(log_dir / LIVE / _TRAINER), *map(_read, _files(log_dir))]
    state = RunState(bool(trainer), read_steps(log_dir), batches, reward_curve(log_dir))
    for file in files if trainer else ():
        state.running += file.get("running", ())
        state.ended += file.get("ended", ())
    state.running.sort(key=lambda rollout: rollout["started"])
    state.ended.sort(key=lambda rollout: -rollout["ended"])
    return state


def _files(log_dir: Path) -> list[Path]:
    files = list_folder(log_dir / LIVE)
    return [path for path in files if path.suffix == ".json" and path.name != _TRAINER]


def _read(path: Path) -> dict[str, Any]:
    """Return what a process has written; nothing if it is not there or has ended."""
    try:
        found: dict[str, Any] = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError):
        return {}
    gone = found["host"] == socket.gethostname() and not psutil.pid_exists(found["pid"])
    return {} if gone else found


def show_state(state: RunState, *, rows: int = 12) -> RenderableType:
    """Draw the state of a run for a terminal.

    Args:
        state: The state.
        rows: Maximum number of rollouts in each table.
    """
    done = sum(number(row, REWARD) is not None for row in state.steps.values())
    head = f"{counted(done, 'step')} done, " + ("training" if state.trained else "not training now")
    shown: list[RenderableType] = [Text(head, style="bold")]
    if state.curve:
        shown.append(Text(state.curve))
    if state.steps:
        shown.append(_steps_table(state))
    shown += [
        Text(f"{what}: {ended} of {counted(groups, 'group')} ended")
        for what, ended, groups in state.batches
    ]
    now = time.time()
    if state.running:
        table = _table(f"{counted(len(state.running), 'rollout')} running", "task", "sample")
        for rollout in state.running[:rows]:
            _add(table, rollout, now)
        if (more := len(state.running) - rows) > 0:
            table.add_row("", f"… {more} more")
        shown.append(table)
    if state.ended:
        table = _table("last ended", "task", "sample", "reward")
        for rollout in state.ended[:rows]:
            reward = rollout["reward"]
            error = " ".join(str(rollout["error"]).split())
            outcome = f"{reward:.3f}" if reward is not None else error[:60]
            _add(table, rollout, rollout["ended"], outcome)
        shown.append(table)
    return Group(*shown)


def _steps_table(state: RunState) -> Table:
    table = Table("step", "reward", "test", "turns", "seconds", box=None)
    for step, row in list(state.steps.items())[-_STEPS:]:
        figures = (
            (REWARD, ".3f"),
            (TEST + REWARD, ".3f"),
            ("env/all/turns_per_episode", ".1f"),
            (SECONDS, ".0f"),
        )
        values = [(number(row, name), form) for name, form in figures]
        table.add_row(
            step_label(step, row),
            *("" if value is None else format(value, form) for value, form in values),
        )
    return table


def _table(title: str, *columns: str) -> Table:
    return Table(*columns, "turns", "seconds", title=title, title_justify="left", box=None)


def _add(table: Table, rollout: dict[str, Any], until: float, *outcome: str) -> None:
    sample = f"{rollout['sample']} ({rollout['epoch']})"
    seconds = f"{until - rollout['started']:.0f}"
    cells = [str(rollout["task"]), sample, *outcome, str(rollout["turns"]), seconds]
    table.add_row(*(Text(clean_text(cell)) for cell in cells))
