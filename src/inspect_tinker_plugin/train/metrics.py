"""Reads the cookbook's ``metrics.jsonl``, and reports when training learns nothing.

The file can be read while it is being written, and after a crash.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from inspect_tinker_plugin.contracts.wording import counted, part_of

METRICS = "metrics.jsonl"
CHECKPOINTS = "checkpoints.jsonl"
IMITATION = "imitation"
"""Folder of the imitation before a training, in the run's folder."""

REWARD = "env/all/reward/total"
"""Mean reward of a step's rollouts."""

_ALL = "env/all/"

LOSS = "train_mean_nll"
"""Loss of a step of imitation, in nats per token."""

TEST = "test"
"""Prefix of the test set's metrics."""

Row = Mapping[str, Any]


def number(row: Row, name: str) -> float | None:
    """Return a metric of a row; ``None`` when it is absent or not a number."""
    value = row.get(name)
    if isinstance(value, bool) or not isinstance(value, int | float):
        return None
    return float(value)


def of_task(task: str, name: str) -> str:
    """Return the name of a metric over the rollouts of one task of a mixture."""
    return f"env/{task}/{name.removeprefix(_ALL)}"


def tasks_of(row: Row) -> list[str]:
    """Return the tasks that a row has metrics of; none if there is only one task."""
    end = f"/{REWARD.removeprefix(_ALL)}"
    names = [n for n in row if n.startswith("env/") and n.endswith(end) and n != REWARD]
    return [name.removeprefix("env/").removesuffix(end) for name in names]


def parse(lines: Iterable[str]) -> Iterator[dict[str, Any]]:
    """Read rows; a line that a killed process left unfinished is skipped."""
    for line in lines:
        try:
            row = json.loads(line)
        except ValueError:
            continue
        if isinstance(row, dict):
            yield row


def read_rows(path: Path) -> list[dict[str, Any]]:
    """Return the rows of one of the cookbook's files of JSON lines; none if it is not there."""
    if not path.is_file():
        return []
    return list(parse(path.read_text(encoding="utf-8", errors="replace").splitlines()))


def read_steps(log_dir: Path) -> dict[int, dict[str, Any]]:
    """Return the metrics of each step, in order.

    A step has several rows when it was repeated after an interruption, or was evaluated
    beside the training: later values replace earlier ones.
    """
    steps: dict[int, dict[str, Any]] = {}
    for row in read_rows(log_dir / METRICS):
        if isinstance(row.get("step"), int):
            steps.setdefault(row["step"], {}).update(row)
    return dict(sorted(steps.items()))


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


WITH_SIGNAL = "env/all/by_group/frac_mixed"
"""Share of the groups whose rewards differ: only these have non-zero advantages."""

CUT = "max_tokens"
_STOP = "env/all/stop/"


def step_problems(row: Mapping[str, Any]) -> list[str]:
    """Say what kept one step from learning; nothing for a step with a signal.

    Args:
        row: the cookbook's figures of the step.
    """
    problems = []
    if number(row, WITH_SIGNAL) == 0:
        problems.append("no group had different rewards, so nothing was learned")
    # each rollout has one stop reason; the cookbook averages each over those that have it
    if {name for name in row if name.startswith(_STOP)} == {_STOP + CUT}:
        tokens = number(row, "env/all/ac_tokens_per_turn")
        at = "the token limit" if tokens is None else counted(round(tokens), "token")
        problems.append(f"100% of replies were cut at {at} (max_tokens)")
    return problems


def run_problems(
    rows: Sequence[Mapping[str, Any]], stops: Sequence[str | None], max_tokens: object = None
) -> list[str]:
    """Say what kept a run, or part of it, from learning.

    Args:
        rows: the cookbook's figures of each step.
        stops: stop reasons of the rollouts that were trained on.
        max_tokens: the sampler's limit, for the message.
    """
    problems = []
    shares = [share for row in rows if (share := number(row, WITH_SIGNAL)) is not None]
    silent = sum(share == 0 for share in shares)
    if shares and silent == len(shares):
        problems.append("No group had different rewards in any step: nothing was learned.")
    elif silent:
        problems.append(
            f"No group had different rewards in {part_of(silent, len(shares), 'step')}: nothing "
            "was learned in them."
        )
    cut = sum(stop == CUT for stop in stops)
    if cut and cut * 2 >= len(stops):
        at = counted(max_tokens, "token") if isinstance(max_tokens, int) else "the token limit"
        problems.append(f"{cut / len(stops):.0%} of replies were cut at {at}: raise max_tokens.")
    return problems
