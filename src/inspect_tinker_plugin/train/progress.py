"""Shows a run in the terminal: a line per step, a curve of the reward, and what ``watch`` shows.

All are read from the files that the cookbook and the episodes write.
"""

from __future__ import annotations

import json
import math
import re
import shutil
import socket
import threading
import time
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from logging import getLogger
from pathlib import Path
from statistics import fmean
from types import MappingProxyType
from typing import Any

import psutil
from rich.console import Group, RenderableType
from rich.table import Table
from rich.text import Text

from inspect_tinker_plugin.contracts.wording import clean_text, counted
from inspect_tinker_plugin.logs.staging import list_folder, runs_in
from inspect_tinker_plugin.processes.journal import parse_rows
from inspect_tinker_plugin.rl.hooks import LIVE, LiveFile, LiveRollout
from inspect_tinker_plugin.train.history import (
    EVALUATION,
    LOSS,
    METRICS,
    REWARD,
    ROLLOUT_LOGS,
    SECONDS,
    TEST,
    TEST_LOGS,
    Row,
    number,
    read_scans,
    read_steps,
    rewards_by_task,
    step_label,
    step_problems,
)
from inspect_tinker_plugin.train.report import write_report
from inspect_tinker_plugin.train.scans import MONITORS, find_alarms

logger = getLogger(__name__)

PERIOD = 0.5
"""Seconds between looks at the files."""

_WARNING = re.compile(r"^(\S+?)(?::\d+)? \[(?:WARNING|ERROR|CRITICAL)\] (.*)$")
_MANY = 5
_RENEW = 30.0
"""Least seconds between two reports of a run that is trained."""
_REMIND = 10
"""Steps after which a warning about a run that learns nothing is repeated."""


@contextmanager
def show_progress(
    log_dir: Path,
    say: Callable[[str], None],
    *,
    steps: int | None = None,
    penalties: Mapping[str, float] = MappingProxyType({}),
) -> Iterator[None]:
    """Follow the files of a run in a thread, and say what is new in them.

    Args:
        log_dir: Folder of the run.
        say: Called with each line.
        steps: Steps of the whole run.
        penalties: The monitors that are trained against.
    """
    progress = _Progress(f"/{steps}" if steps else "", lambda: _look_for(log_dir, penalties))
    metrics, log = _Tail(log_dir / METRICS), _Tail(log_dir / "logs.log")
    ended = threading.Event()

    def follow() -> None:
        last_look, report = False, _Report(log_dir)
        while not last_look:
            last_look = ended.wait(PERIOD)
            for line in log.lines():
                for text in progress.warn(line):
                    say(text)
            for row in parse_rows(metrics.lines()):
                report.stale = True
                for text in progress.describe(row):
                    say(text)
            if last_look:  # the last scans may have come since; the end of a run writes a report
                for text in progress.alarms():
                    say(text)
            else:
                report.renew()

    thread = threading.Thread(target=follow, name="train-progress", daemon=True)
    thread.start()
    try:
        yield
    finally:
        ended.set()
        thread.join()


def _look_for(log_dir: Path, penalties: Mapping[str, float]) -> Iterator[str]:
    steps, scans = read_steps(log_dir), read_scans(log_dir)
    rows = [{**row, **scans.get(step, {})} for step, row in steps.items()]
    return find_alarms(rows, penalties)


class _Report:
    """The report of a run, renewed while it is trained."""

    def __init__(self, log_dir: Path) -> None:
        self._log_dir = log_dir
        self._due = 0.0
        self.stale = False

    def renew(self) -> None:
        """Write it if there is news, at most every 30 s and a twentieth of the time."""
        started = time.monotonic()
        if not self.stale or started < self._due:
            return
        self.stale = False
        try:
            write_report(self._log_dir)
        except Exception as error:  # the training goes on, and its end tries again
            logger.warning("the report cannot be written: %s", error)
        ended = time.monotonic()
        self._due = ended + max(_RENEW, 20 * (ended - started))


class _Tail:
    """Yields the lines that are added to a file; existing lines are skipped."""

    def __init__(self, path: Path) -> None:
        self._path = path
        self._position = path.stat().st_size if path.is_file() else 0

    def lines(self) -> list[str]:
        """Return the complete lines since the last call."""
        if not self._path.is_file():
            return []
        with self._path.open("rb") as file:
            file.seek(self._position)
            whole, newline, _ = file.read().rpartition(b"\n")
        self._position += len(whole) + len(newline)
        return whole.decode(errors="replace").splitlines()


class _Progress:
    def __init__(self, total: str, alarms: Callable[[], Iterable[str]] = tuple) -> None:
        self._total = total
        self._find_alarms = alarms
        self._alarms: set[str] = set()
        self._warnings: set[str] = set()
        self._rollout_errors = 0.0
        self._silent: dict[str, int] = {}

    def warn(self, line: str) -> Iterator[str]:
        """Show a warning in the cookbook's log once, and the first few only."""
        match = _WARNING.match(line)
        if match is None or match[1] == "py.warnings":
            return
        text = match[2][:200]
        if text not in self._warnings and len(self._warnings) < _MANY:
            self._warnings.add(text)
            yield f"         ! {text}"

    def describe(self, row: Row) -> Iterator[str]:
        """Describe a row of metrics, one line for each kind of them."""
        step = f"{int(row.get('step', 0)) + 1:>4}{self._total}"
        if (test := number(row, TEST + REWARD)) is not None:
            rollouts = counted(int(number(row, f"{TEST}env/all/total_episodes") or 0), "rollout")
            yield f"         test reward {test:.3f} ({rollouts})"
        evaluated = [
            f"{name.removeprefix(EVALUATION)} {value:.3f}"
            for name in row
            if name.startswith(EVALUATION) and (value := number(row, name)) is not None
        ]
        if evaluated:
            yield f"         evaluation {', '.join(evaluated)}"
        if LOSS in row:  # also if it is NaN
            yield f"imitation {step}  loss {row[LOSS]:.3f}"
        if (reward := number(row, REWARD)) is not None:
            yield "  ".join([f"step {step}  reward {reward:6.3f}", *self._parts(row)])
            yield from self._problems(row)
            yield from self.alarms()

    def alarms(self) -> Iterator[str]:
        """Say each sign of a cheat once."""
        for alarm in self._find_alarms():
            if (about := alarm.partition(":")[0]) not in self._alarms:
                self._alarms.add(about)
                yield f"         ! {alarm}"

    def _parts(self, row: Row) -> Iterator[str]:
        if by_task := rewards_by_task(row):
            yield f"({', '.join(f'{task} {value:.3f}' for task, value in by_task.items())})"
        for name in row:
            if match := re.fullmatch(MONITORS, name):
                yield f"{match[1]} {row[name]:.2f}"
        for text, name in (
            ("turns {:.1f}", "env/all/turns_per_episode"),
            ("tokens {:.0f}", "env/all/ac_tokens_per_turn"),
            ("{:.1f} s", SECONDS),
        ):
            if (value := number(row, name)) is not None:
                yield text.format(value)
        if errors := self._errors(row):
            yield f"errors {errors:.0f}"

    def _problems(self, row: Row) -> Iterator[str]:
        """Say what kept the step from learning: immediately, then less often while it lasts."""
        self._silent = {each: self._silent.get(each, 0) + 1 for each in step_problems(row)}
        for problem, steps in self._silent.items():
            if steps == 1 or steps % _REMIND == 0:
                again = f" ({counted(steps, 'step')} in a row)" if steps > 1 else ""
                yield f"         ! {problem}{again}"

    def _errors(self, row: Row) -> float:
        """Return the failures of a step: the cookbook counts them from the start of the run."""
        total = number(row, "rollout_errors/total") or 0.0
        new, self._rollout_errors = total - self._rollout_errors, total
        rollouts = number(row, "env/all/total_episodes") or 0.0
        return max(0.0, new) + (number(row, "env/all/failed") or 0.0) * rollouts


WIDTH = 60
_BARS = "▁▂▃▄▅▆▇█"


def reward_curve(log_dir: Path) -> str:
    """Draw the mean reward of the steps as a line of bars, and compare its first and last quarter.

    Args:
        log_dir: Folder of a run.

    Returns:
        A line for a terminal; empty when fewer than two steps have a reward.
    """
    rows = read_steps(log_dir).values()
    rewards = [reward for row in rows if (reward := number(row, REWARD)) is not None]
    if len(rewards) < 2:
        return ""
    quarter = max(1, len(rewards) // 4)
    first, last = fmean(rewards[:quarter]), fmean(rewards[-quarter:])
    low, high = min(0.0, *rewards), max(rewards)
    each = math.ceil(len(rewards) / WIDTH)
    columns = [fmean(rewards[i : i + each]) for i in range(0, len(rewards), each)]
    top = len(_BARS) - 1
    bars = "".join(_BARS[round((value - low) / ((high - low) or 1.0) * top)] for value in columns)
    return f"{bars}\nmean reward: first quarter {first:.3f}, last quarter {last:.3f}"


_TRAINER = "trainer.json"
_STEPS = 8


@contextmanager
def watchable(log_dir: Path) -> Iterator[None]:
    """Keep the folder in which processes say what they roll out, while a run is trained."""
    folder = log_dir / LIVE
    shutil.rmtree(folder, ignore_errors=True)
    folder.mkdir(parents=True, exist_ok=True)
    (folder / _TRAINER).write_text(json.dumps(LiveFile().model_dump()), encoding="utf-8")
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
    running: list[LiveRollout] = field(default_factory=list)
    """Rollouts, the oldest first."""
    ended: list[LiveRollout] = field(default_factory=list)
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
    state = RunState(trainer is not None, read_steps(log_dir), batches, reward_curve(log_dir))
    for file in filter(None, files if trainer else ()):
        state.running += file.running
        state.ended += file.ended
    state.running.sort(key=lambda rollout: rollout.started)
    state.ended.sort(key=lambda rollout: -rollout.ended)
    return state


def _files(log_dir: Path) -> list[Path]:
    files = list_folder(log_dir / LIVE)
    return [path for path in files if path.suffix == ".json" and path.name != _TRAINER]


_SET_CLOCK = 60
"""Seconds by which the clock may have been set since a process began."""


def _read(path: Path) -> LiveFile | None:
    """Return what a process has written; nothing if it is not there, no such file, or has ended."""
    try:
        written = path.stat().st_mtime
        found = LiveFile(**json.loads(path.read_text(encoding="utf-8")))
    except (OSError, RecursionError, TypeError, ValueError):
        return None
    if found.host != socket.gethostname():
        return found
    try:  # a process that began after this was written has only got the same number
        began = psutil.Process(found.pid).create_time()
    except (psutil.NoSuchProcess, ValueError):
        return None
    except psutil.AccessDenied:
        return found
    return found if began < written + _SET_CLOCK else None


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
            error = " ".join(str(rollout.error).split())
            outcome = f"{rollout.reward:.3f}" if rollout.reward is not None else error[:60]
            _add(table, rollout, rollout.ended, outcome)
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


def _add(table: Table, rollout: LiveRollout, until: float, *outcome: str) -> None:
    sample, seconds = f"{rollout.sample} ({rollout.epoch})", f"{until - rollout.started:.0f}"
    cells = [rollout.task, sample, *outcome, str(rollout.turns), seconds]
    table.add_row(*(Text(clean_text(cell)) for cell in cells))
