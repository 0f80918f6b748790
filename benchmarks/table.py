"""All figures of speed in one table, with ratios within each round.

Every line runs in a process of its own, its sides one after the other in each round; the figure is
the median over the rounds, and a ratio the median of the rounds' ratios. Times are CPU of the
process, in milliseconds, garbage collection included.
Run ``python -m benchmarks.table [--rounds N] [--lines NAME,...] [--bridge FOLDER] [--json FILE]``.
"""

from __future__ import annotations

import argparse
import asyncio
import gc
import json
import os
import pickle
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Awaitable, Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from inspect_tinker_plugin.processes.workers import THRESHOLDS

os.environ.setdefault("INSPECT_DISPLAY", "none")

ROOT = Path(__file__).parents[1]
OURS = "ours"
EARLY = "early"
"""Ours, in the first turns of the same episodes."""

Sides = Mapping[str, Callable[[], Awaitable[float]]]


@dataclass(frozen=True)
class Line:
    """One line of the table."""

    what: str
    sides: Callable[[Path | None], Sides]
    """Makes the sides, given the folder of the older bridge."""

    bars: Mapping[str, float]
    """What ours may be at most, alone (``""``) or in the ratio to a side."""

    rounds: int = 7
    apart: bool = False
    """Whether each side and round needs a process of its own."""

    least: bool = False
    """Whether more is better."""


def one_turn(bridge: Path | None) -> Sides:
    from benchmarks import sides

    found = {
        OURS: sides.one_turn_ours(),
        "by hand": sides.one_turn_by_hand(),
        **{name: sides.one_turn_eval(name) for name in sides.EVALS},
    }
    return found | ({} if bridge is None else {"bridge": sides.one_turn_bridge(bridge)})


def one_turn_logged(bridge: Path | None) -> Sides:
    from benchmarks import sides

    folder = tempfile.TemporaryDirectory()
    logged = sides.one_turn_ours(log_dir=folder.name)

    async def ours() -> float:
        from inspect_tinker_plugin.logs import assemble_pending

        started = time.process_time()
        await logged()
        await asyncio.to_thread(assemble_pending, folder.name)
        return (time.process_time() - started) / sides.EPISODES * 1000

    return {OURS: ours, "eval, logs": sides.one_turn_eval("eval, logs")}


def tool_turn(bridge: Path | None) -> Sides:
    from benchmarks.sides import ToolWork

    work = ToolWork(8, 100)
    return {
        OURS: work.turn_of_rollout(work.ours),
        "by hand": work.turn_of_rollout(work.by_hand),
        "eval": work.turn_of_eval("eval"),
    }


def late_turn(bridge: Path | None) -> Sides:
    from benchmarks.sides import ToolWork

    work = ToolWork(64, 500)
    return {
        OURS: work.late_turn_of_rollout(work.ours),
        EARLY: work.early_turn_of_rollout(work.ours),
        "by hand": work.late_turn_of_rollout(work.by_hand),
        "eval": work.late_turn_of_eval(),
    }


def react_turn(turns: int) -> Callable[[Path | None], Sides]:
    def made(bridge: Path | None) -> Sides:
        from benchmarks.sides import EVALS, ToolWork

        work = ToolWork(turns, 100, agent=True)
        return {
            OURS: work.turn_of_rollout(work.ours),
            **{name: work.turn_of_eval(name) for name in EVALS},
        }

    return made


def parked(bridge: Path | None) -> Sides:
    from benchmarks import parked

    return {
        OURS: lambda: parked.package(1000),
        "by hand": lambda: parked.by_hand(1000),
        "eval": lambda: parked.evaluation(1000),
    }


def pause(count: int) -> Callable[[Path | None], Sides]:
    def made(bridge: Path | None) -> Sides:
        from benchmarks import starts

        return {OURS: lambda: starts.ours(count), "by hand": lambda: starts.by_hand(count)}

    return made


def exported(bridge: Path | None) -> Sides:
    from benchmarks import exports

    found = {OURS: exports.ours, "datasets": exports.bare}
    return found | ({} if bridge is None else {"bridge": lambda: exports.through(bridge)})


def by_workers(bridge: Path | None) -> Sides:
    from benchmarks import exports

    return {OURS: lambda: exports.by_workers(2), "one process": lambda: exports.by_workers(1)}


def first_rows(bridge: Path | None) -> Sides:
    from benchmarks import exports

    return {OURS: exports.first_rows}


async def _first_pickle() -> float:
    from benchmarks import sides

    [builder] = as_dataset(sides.one_turn_task(100_000)).get_batch(0)
    started = time.process_time()
    pickle.dumps(builder)
    return (time.process_time() - started) * 1000


def as_dataset(task: Any) -> Any:
    from benchmarks import sides

    from inspect_tinker_plugin.rl.dataset import as_rl_dataset

    return as_rl_dataset(task, sides.RENDERER)


async def _first_observation() -> float:
    from benchmarks import sides

    [builder] = as_dataset(sides.one_turn_task(1)).get_batch(0)
    started = time.process_time()
    [env] = await builder.make_envs()
    await env.initial_observation()
    return (time.process_time() - started) * 1000


LINES = {
    # No bar against the env by hand: 1.4 could only be had by exchanging functions of Inspect.
    "one-turn": Line("one-turn episode, 199+141 tokens", one_turn, {"eval": 0.3, "bridge": 1.2}),
    "logged": Line("the same with log_dir", one_turn_logged, {"eval, logs": 0.6}),
    "tool-turn": Line("tool turn of an 8-turn episode", tool_turn, {"eval": 0.8}),
    "late-turn": Line(
        "late turn of 64, 500-token results",
        late_turn,
        {EARLY: 1.25, "eval": 0.7},
        rounds=3,
    ),
    # Without a bar: 0.4 x eval could only be had by exchanging functions of Inspect.
    "react": Line("react agent, one turn of 8", react_turn(8), {}),
    "react-short": Line("react agent, one turn of 3", react_turn(3), {}),
    "parked": Line("1,000 episodes parked, MB", parked, {"": 55}, rounds=1, apart=True),
    "start-1000": Line(
        "longest pause of the loop, 1,000 start, ms", pause(1000), {"": 150}, rounds=1, apart=True
    ),
    "start-5000": Line("the same, 5,000 start, ms", pause(5000), {"": 150}, rounds=1, apart=True),
    "export": Line(
        "export, samples per second of CPU",
        exported,
        {"bridge": 1.2},
        rounds=1,
        apart=True,
        least=True,
    ),
    "export-workers": Line(
        "export by 2 workers, samples per second",
        by_workers,
        {"one process": 1.3},
        rounds=1,
        apart=True,
        least=True,
    ),
    "first-rows": Line(
        "first rows of 20,000 on disk, s", first_rows, {"": 2.0}, rounds=1, apart=True
    ),
    "pickle": Line(
        "first pickle of a Task, 100,000 samples, ms",
        lambda bridge: {OURS: _first_pickle},
        {"": 20},
        rounds=3,
        apart=True,
    ),
    "first": Line(
        "first initial_observation in a process, ms",
        lambda bridge: {OURS: _first_observation},
        {"": 100},
        rounds=3,
        apart=True,
    ),
}


async def measure(line: Line, bridge: Path | None, rounds: int) -> dict[str, list[float]]:
    """All rounds of a line, in this process; a round before them warms up.

    Ours run with the thresholds of ``freeze_memory()``, as the docs tell trainers to; the others
    with Python's own, as they would.
    """
    pythons_own = gc.get_threshold()
    sides = line.sides(bridge)
    figures: dict[str, list[float]] = {name: [] for name in sides}
    for round_ in range(rounds + 1):
        for name, side in sides.items():
            gc.set_threshold(*(THRESHOLDS if name in (OURS, EARLY) else pythons_own))
            figure = await side()
            if round_:
                figures[name].append(figure)
    return figures


def run(name: str, bridge: Path | None, rounds: int) -> dict[str, list[float]]:
    """Measure a line in other processes."""
    line = LINES[name]
    common = [
        "--line",
        name,
        "--rounds",
        str(rounds),
        *(["--bridge", str(bridge)] if bridge else []),
    ]
    if not line.apart:
        return _figures(common)
    figures: dict[str, list[float]] = {}
    for _ in range(rounds):
        for side in line.sides(bridge):
            figures.setdefault(side, []).extend(_figures([*common, "--side", side])[side])
    return figures


def _figures(arguments: list[str]) -> dict[str, list[float]]:
    out = subprocess.run(
        [sys.executable, "-W", "ignore", "-m", "benchmarks.table", *arguments],
        cwd=ROOT,
        stdout=subprocess.PIPE,
        text=True,
        check=True,
    )
    found: dict[str, list[float]] = json.loads(out.stdout.splitlines()[-1])
    return found


def shown(name: str, figures: Mapping[str, list[float]]) -> str:
    """One line of the table: figures, ratios, and whether the bars are held."""
    line = LINES[name]
    ours = figures[OURS]
    parts = [f"{line.what:46} {OURS} {statistics.median(ours):9.2f}"]
    missed = []
    for side, values in figures.items():
        ratio = statistics.median(mine / other for mine, other in zip(ours, values, strict=True))
        if side != OURS:
            parts.append(f"{side} {statistics.median(values):.2f} (x{ratio:.2f})")
        bar = line.bars.get("" if side == OURS else side)
        figure = statistics.median(ours) if side == OURS else ratio
        if bar is not None and (figure < bar if line.least else figure > bar):
            missed.append(f"{'' if side == OURS else side + ' x'}{bar:g}")
    held = "bars held" if line.bars else "no bar"
    return " | ".join([*parts, f"bar missed: {', '.join(missed)}" if missed else held])


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--rounds", type=int, help="rounds of every line, not its own number")
    parser.add_argument("--lines", default=",".join(LINES), help="lines, with commas")
    parser.add_argument("--bridge", type=Path, help="folder of the older bridge's source")
    parser.add_argument("--json", type=Path, help="file for all figures")
    parser.add_argument("--line", help=argparse.SUPPRESS)
    parser.add_argument("--side", help=argparse.SUPPRESS)
    given = parser.parse_args()
    names = given.lines.split(",")
    if unknown := [name for name in names if name not in LINES]:
        parser.error(f"no line {', '.join(unknown)}; there are {', '.join(LINES)}")
    if given.side:
        side = LINES[given.line].sides(given.bridge)[given.side]
        print(json.dumps({given.side: [asyncio.run(_awaited(side))]}))
    elif given.line:
        print(json.dumps(asyncio.run(measure(LINES[given.line], given.bridge, given.rounds))))
    else:
        every = {}
        for name in names:
            every[name] = run(name, given.bridge, given.rounds or LINES[name].rounds)
            print(shown(name, every[name]), flush=True)
        if given.json:
            given.json.write_text(json.dumps(every, indent=1))


async def _awaited(side: Callable[[], Awaitable[float]]) -> float:
    return await side()


if __name__ == "__main__":
    main()
