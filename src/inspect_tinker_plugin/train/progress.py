"""Shows a run in the terminal: one line per step, and a curve of the reward at the end.

Both are read from the files that the cookbook writes.
"""

from __future__ import annotations

import math
import re
import threading
import time
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from statistics import fmean
from typing import Any

from inspect_tinker_plugin.contracts.wording import counted
from inspect_tinker_plugin.processes.journal import parse_rows
from inspect_tinker_plugin.train.history import (
    EVALUATION,
    LOSS,
    METRICS,
    REWARD,
    TEST,
    number,
    of_task,
    read_steps,
    step_problems,
    tasks_of,
)

PERIOD = 0.5
"""Seconds between looks at the files."""

_PROBLEM = re.compile(r"^(\S+?)(?::\d+)? \[(?:WARNING|ERROR|CRITICAL)\] (.*)$")
_MANY = 5
_REMIND = 10
"""Steps after which a warning about a run that learns nothing is repeated."""


class FileTail:
    """Yields the lines that are added to a file; existing lines are skipped."""

    def __init__(self, path: Path) -> None:
        self._path = path
        self._position = path.stat().st_size if path.is_file() else 0
        self._rest = b""

    def lines(self) -> list[str]:
        """Return the complete lines since the last call."""
        if not self._path.is_file():
            return []
        with self._path.open("rb") as file:
            file.seek(self._position)
            data = self._rest + file.read()
            self._position = file.tell()
        *whole, self._rest = data.split(b"\n")
        return [line.decode(errors="replace") for line in whole]


@contextmanager
def show_progress(
    log_dir: Path, say: Callable[[str], None], *, steps: int | None = None
) -> Iterator[None]:
    """Follow the files of a run in a thread, and say what is new in them.

    Args:
        log_dir: Folder of the run.
        say: Called with each line.
        steps: Steps of the whole run.
    """
    progress = _Progress(log_dir, say, steps)
    ended = threading.Event()

    def follow() -> None:
        while not ended.wait(PERIOD):
            progress.look()

    thread = threading.Thread(target=follow, name="train-progress", daemon=True)
    thread.start()
    try:
        yield
    finally:
        ended.set()
        thread.join()
        progress.look()
        progress.count_problems()


class _Progress:
    def __init__(self, log_dir: Path, say: Callable[[str], None], steps: int | None) -> None:
        self._metrics = FileTail(log_dir / METRICS)
        self._log = FileTail(log_dir / "logs.log")
        self._say = say
        self._total = f"/{steps}" if steps else ""
        self._problems = Counter[str]()
        self._last = time.monotonic()
        self._rollout_errors = 0.0
        self._silent: dict[str, int] = {}

    def look(self) -> None:
        for line in self._log.lines():
            self._problem(line)
        for row in parse_rows(self._metrics.lines()):
            for line in self._lines(row):
                self._say(line)

    def count_problems(self) -> None:
        """Say how often those problems were seen that were seen several times."""
        for text, count in self._problems.items():
            if count > 1:
                self._say(f"         (seen {count} times) {text}")

    def _problem(self, line: str) -> None:
        match = _PROBLEM.match(line)
        if match is None or match[1] == "py.warnings":
            return
        text = match[2][:200]
        self._problems[text] += 1
        if self._problems[text] == 1 and len(self._problems) <= _MANY:
            self._say(f"         ! {text}")

    def _lines(self, row: Mapping[str, Any]) -> list[str]:
        lines = []
        test = number(row, TEST + REWARD)
        if test is not None:
            samples = number(row, f"{TEST}env/all/total_episodes")
            lines.append(
                f"         test reward {test:.3f} ({counted(int(samples or 0), 'rollout')})"
            )
        evaluated = [
            f"{name.removeprefix(EVALUATION)} {value:.3f}"
            for name in row
            if name.startswith(EVALUATION) and (value := number(row, name)) is not None
        ]
        if evaluated:
            lines.append(f"         evaluation {', '.join(evaluated)}")
        loss = number(row, LOSS)
        if loss is not None:
            done = int(row.get("step", 0)) + 1
            lines.append(f"imitation {done:>4}{self._total}  loss {loss:.3f}")
        reward = number(row, REWARD)
        if reward is not None:
            lines.append(self._step(row, reward))
            lines += self._silence(row)
        return lines

    def _step(self, row: Mapping[str, Any], reward: float) -> str:
        now = time.monotonic()
        seconds = number(row, "time/total") or now - self._last
        self._last = now
        done = int(row.get("step", 0)) + 1
        parts = [f"step {done:>4}{self._total}  reward {reward:6.3f}"]
        by_task = [
            f"{task} {value:.3f}"
            for task in tasks_of(row)
            if (value := number(row, of_task(task, REWARD))) is not None
        ]
        if by_task:
            parts.append(f"({', '.join(by_task)})")
        for label, name, digits in (
            ("turns", "env/all/turns_per_episode", 1),
            ("tokens", "env/all/ac_tokens_per_turn", 0),
        ):
            value = number(row, name)
            if value is not None:
                parts.append(f"{label} {value:.{digits}f}")
        parts.append(f"{seconds:.1f} s")
        if errors := self._errors(row):
            parts.append(f"errors {errors:.0f}")
        return "  ".join(parts)

    def _silence(self, row: Mapping[str, Any]) -> list[str]:
        """Say what kept the step from learning: immediately, then less often while it lasts."""
        self._silent = {each: self._silent.get(each, 0) + 1 for each in step_problems(row)}
        lines = []
        for problem, steps in self._silent.items():
            if steps == 1 or steps % _REMIND == 0:
                again = f" ({counted(steps, 'step')} in a row)" if steps > 1 else ""
                lines.append(f"         ! {problem}{again}")
        return lines

    def _errors(self, row: Mapping[str, Any]) -> float:
        """Return the failures of a step: the cookbook counts them from the start of the run."""
        total = number(row, "rollout_errors/total") or 0.0
        new, self._rollout_errors = total - self._rollout_errors, total
        rollouts = number(row, "env/all/total_episodes") or 0.0
        penalties = sum(
            (number(row, name) or 0.0) * rollouts
            for name in row
            if name.startswith("env/all/error/")
        )
        return max(0.0, new) + penalties


HEIGHT = 8
WIDTH = 60
_BARS = " ▁▂▃▄▅▆▇█"


def reward_curve(log_dir: Path) -> str:
    """Draw the mean reward of every step, and compare the first and the last quarter.

    Args:
        log_dir: Folder of a run.

    Returns:
        Lines for a terminal; empty when fewer than two steps have a reward.
    """
    rows = read_steps(log_dir).values()
    rewards = [reward for row in rows if (reward := number(row, REWARD)) is not None]
    if len(rewards) < 2:
        return ""
    quarter = max(1, len(rewards) // 4)
    first, last = fmean(rewards[:quarter]), fmean(rewards[-quarter:])
    caption = f"mean reward: first quarter {first:.3f}, last quarter {last:.3f}"
    return "\n".join([*_rows(rewards), caption])


def _rows(values: Sequence[float]) -> list[str]:
    """Draw one column per value, or per several of them if they do not fit, with a scale."""
    low, high = min(0.0, *values), max(values)
    each = math.ceil(len(values) / WIDTH)
    columns = [fmean(values[i : i + each]) for i in range(0, len(values), each)]
    eighths = [round((value - low) / ((high - low) or 1.0) * HEIGHT * 8) for value in columns]
    wide = max(1, WIDTH // (2 * len(columns)))
    rows = []
    for row in reversed(range(HEIGHT)):
        label = f"{high:.2f}" if row == HEIGHT - 1 else f"{low:.2f}" if row == 0 else ""
        bars = "".join(_BARS[max(0, min(8, filled - row * 8))] * wide for filled in eighths)
        rows.append(f"{label:>7} │{bars}")
    rows.append(f"{'':>7} └{'─' * wide * len(columns)} {counted(len(values), 'step')}")
    return rows
