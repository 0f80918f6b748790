"""Writes ``report.html``, one self-contained page about a run: figures, charts and tables.

Charts are inline SVG, which needs no network.
"""

from __future__ import annotations

import json
import math
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from html import escape
from pathlib import Path
from statistics import fmean
from urllib.parse import quote

from inspect_tinker_plugin.contracts.wording import part_of
from inspect_tinker_plugin.processes import write_whole
from inspect_tinker_plugin.rl.builder import short_name
from inspect_tinker_plugin.train.history import (
    EVALUATION,
    FAILED,
    GRADED,
    LOSS,
    REPORT,
    REWARD,
    SECONDS,
    TASK_REWARD,
    TEST,
    WITH_SIGNAL,
    History,
    Step,
    number,
    read_history,
    step_label,
    step_problems,
)
from inspect_tinker_plugin.train.scans import MONITORS, SCANNERS, find_alarms

_PAGE = """<!doctype html>
<html lang="en"><head><meta charset="utf-8">
<meta name="viewport" content="width=device-width, initial-scale=1">
<title>{title}</title><style>{style}</style></head>
<body><main>{body}</main></body></html>
"""


def write_report(log_dir: Path) -> Path:
    """Write the report of a run atomically; works at any time of a run.

    Raises:
        OSError: It cannot be written.
    """
    path = log_dir / REPORT
    write_whole(path, render(read_history(log_dir)))
    return path


def render(history: History) -> str:
    """Return the page."""
    task = ", ".join(short_name(each) for each in history.tasks)
    model = str(history.run.get("model", ""))
    about = [Path(model).name or model, history.run.get("renderer")]
    charts = [draw_chart(IMITATION_CHART, history.imitation)]
    charts += [draw_chart(chart, history.steps) for chart in CHARTS]
    penalties = (history.config.get("dataset_builder") or {}).get("monitor_penalty") or {}
    options = escape(json.dumps(history.config, indent=2, default=str))
    body = [
        f"<h1>{escape(task)}</h1>",
        f'<p class="sub">{escape(" · ".join(str(part) for part in about if part))}</p>',
        *(f'<p class="problem">{escape(each)}</p>' for each in _problems(history.steps, penalties)),
        _tiles(history.steps),
        f'<div class="grid2">{"".join(charts) or _NOTHING}</div>',
        _step_table(history.steps),
        _evaluation_table(history.evaluations),
        f'<details class="card"><summary>Configuration</summary><pre>{options}</pre></details>',
    ]
    style = Path(__file__).with_name("report.css").read_text(encoding="utf-8")
    return _PAGE.format(title=escape(f"{task}: training"), style=style, body="\n".join(body))


_NOTHING = '<p class="card none">no figures yet</p>'


def _problems(steps: Sequence[Step], penalties: Mapping[str, float]) -> list[str]:
    """Say what kept a run, or part of it, from learning, and what may be a cheat."""
    trained = [step for step in steps if number(step.figures, REWARD) is not None]
    found: dict[str, int] = {}
    for step in trained:
        for problem in step_problems(step.figures):
            found[problem] = found.get(problem, 0) + 1
    said = [
        f"In {part_of(count, len(trained), 'step')}, {problem}." for problem, count in found.items()
    ]
    alarms = find_alarms([step.figures for step in steps], penalties)
    return [*said, *(f"{alarm[0].upper()}{alarm[1:]}." for alarm in alarms)]


# figures at the top


def _tiles(steps: Sequence[Step]) -> str:
    rewards, tests, shares, seconds, graded, failed = (
        [value for step in steps if (value := number(step.figures, name)) is not None]
        for name in (REWARD, TEST + REWARD, WITH_SIGNAL, SECONDS, GRADED, FAILED)
    )
    tiles = [("steps", str(len(rewards)), "")]
    if rewards:
        quarter = max(1, len(rewards) // 4)
        change = _change(fmean(rewards[:quarter]), fmean(rewards[-quarter:]))
        tiles.append(("reward, first and last quarter", *change))
    if tests:
        tiles.append(("test reward, first and last", *_change(tests[0], tests[-1])))
    if shares:
        kind = "" if any(shares) else "down"
        tiles.append(("groups with a signal", f"{fmean(shares):.0%}", kind))
    tiles += [
        ("rollouts trained on", f"{sum(graded):.0f}", ""),
        ("failed rollouts", f"{sum(failed):.0f}", ""),
        ("in training steps", _duration(sum(seconds)), ""),
    ]
    cells = (
        f'<div class="tile"><b class="{kind}">{escape(value)}</b><span>{escape(name)}</span></div>'
        for name, value, kind in tiles
    )
    return f'<div class="tiles">{"".join(cells)}</div>'


def _change(first: float, last: float) -> tuple[str, str]:
    return f"{first:.3f} → {last:.3f}", "up" if last > first else "down" if last < first else ""


def _duration(seconds: float) -> str:
    if seconds < 100:
        return f"{seconds:.0f} s"
    return f"{seconds / 60:.0f} min" if seconds < 6000 else f"{seconds / 3600:.1f} h"


# charts


@dataclass(frozen=True)
class Chart:
    """Lines of figures by step, over areas in the colour of the first line."""

    title: str
    note: str
    lines: Mapping[str, str] = field(default_factory=dict)
    """Figures by the names of their lines."""
    every: str = ""
    """A pattern of figures with a line each, named by its group."""
    areas: Sequence[tuple[str, str]] = ()
    """Figures between which areas lie."""
    from_zero: bool = True
    """Whether the scale includes zero."""
    unit: str = ""
    """Unit of the values, for the tooltips."""


IMITATION_CHART = Chart(
    "Imitation",
    "Before the training: nats per token that was learned, by step.",
    {"loss": LOSS},
)

CHARTS = (
    Chart(
        "Reward",
        "Mean over the rollouts of a step; the areas hold the middle 50% and 80% of them.",
        {"training": REWARD, "test": TEST + REWARD},
        every=TASK_REWARD,
        areas=[
            ("rollouts/reward/p10", "rollouts/reward/p90"),
            ("rollouts/reward/p25", "rollouts/reward/p75"),
        ],
        from_zero=False,
    ),
    Chart("Scans", "Mean result of each scanner; see docs/monitoring.md.", every=SCANNERS),
    Chart("Monitors", "Highest suspicion of a rollout, mean.", every=MONITORS),
    Chart(
        "Blocked and flagged",
        "Share of the rollouts in which a monitor or protocol did so.",
        every=r"env/all/monitor/(.+/(?:blocked|flagged))",
    ),
    Chart("Scores", "Mean of each scorer.", every=r"rollouts/score/(.+)", from_zero=False),
    Chart(
        "Groups with a signal",
        "Share of the groups whose rewards differ; the others teach nothing.",
        every=r"env/(.+)/by_group/frac_mixed",
    ),
    Chart(
        "KL",
        "Per token: between the sampling and the trained policy (two estimates), and of the policy "
        "to its reference or teacher.",
        {"reference": "kl_policy_base"},
        every=r"optim/kl_sample_train_(v\d)",
        from_zero=False,
    ),
    Chart(
        "Loss and entropy",
        "As far as the cookbook's loop records them.",
        {"entropy": "optim/entropy", "loss": "optim/loss"},
        from_zero=False,
    ),
    Chart(
        "Length",
        "Sampled tokens of a rollout: mean, and the middle 80%.",
        {"tokens": "rollouts/tokens"},
        areas=[("rollouts/tokens/p10", "rollouts/tokens/p90")],
    ),
    Chart("Turns", "Model calls of a rollout.", {"turns": "rollouts/turns"}),
    Chart(
        "Stop reasons",
        "Why rollouts ended, as shares of a step.",
        every=r"rollouts/stop/(.+)",
        unit="%",
    ),
    Chart(
        "Errors by cause",
        "Failed rollouts per step, including those that were tried again.",
        every=r"rollouts/error/(.+)",
    ),
    Chart(
        "Time of a rollout",
        "Seconds, mean; sampling is the wait for the policy.",
        every=r"rollouts/time/(.+)",
        unit=" s",
    ),
    Chart(
        "Time of a step",
        "Seconds of wall clock.",
        {
            "whole step": SECONDS,
            "rollouts": "time/sampling",
            "training": "time/train_step",
            "test set": "time/run_evaluations_parallel",
        },
        unit=" s",
    ),
    Chart(
        "Evaluations",
        "Figures of --eval-task and of evaluator_builders.",
        every=rf"{EVALUATION}(.+)",
        from_zero=False,
    ),
)

WIDTH, HEIGHT = 560, 230
LEFT, RIGHT, TOP, BOTTOM = 50, 16, 10, 30

COLOURS = 8
"""Colours of the style sheet, classes ``c0`` to ``c7``."""


def draw_chart(chart: Chart, steps: Sequence[Step]) -> str:
    """Draw a chart with its legend; nothing if no step has its figures."""
    names = dict(chart.lines)
    if chart.every:
        matches = (re.fullmatch(chart.every, name) for step in steps for name in step.figures)
        names |= {match[1]: match[0] for match in matches if match}
    lines = {name: points for name, metric in names.items() if (points := _points(steps, metric))}
    if not lines:
        return ""
    areas = [(_points(steps, high), _points(steps, low)) for low, high in chart.areas]
    paper = _Paper(
        [*lines.values(), *(edge for area in areas for edge in area)], from_zero=chart.from_zero
    )
    parts = paper.axes()
    for high, low in areas:
        outline = paper.path([*high, *reversed(low)])
        parts.append(f'<polygon class="band c0" points="{outline}"/>')
    keys = []
    for i, (name, points) in enumerate(lines.items()):
        colour = f"c{i % COLOURS}"
        parts.append(f'<polyline class="line {colour}" points="{paper.path(points)}"/>')
        # the points of a long line are invisible, but have tooltips
        kind, size = ("dot", 2.6) if len(points) <= 40 else ("dot hidden", 4)
        for x, y in points:
            tip = escape(f"step {x:g}: {name} {_short(y)}{chart.unit}")
            parts.append(
                f'<circle class="{kind} {colour}" cx="{paper.x(x):.1f}" '
                f'cy="{paper.y(y):.1f}" r="{size}"><title>{tip}</title></circle>'
            )
        keys.append(f'<span><i class="key {colour}"></i>{escape(name)}</span>')
    return (
        f'<section class="card"><h2>{escape(chart.title)}</h2>'
        f'<p class="note">{escape(chart.note)}</p>'
        f'<svg viewBox="0 0 {WIDTH} {HEIGHT}" role="img">{"".join(parts)}</svg>'
        f'<div class="legend">{"".join(keys)}</div></section>'
    )


Points = Sequence[tuple[float, float]]


def _points(steps: Sequence[Step], metric: str) -> Points:
    """Return a figure by step, counted from 1 as in the terminal."""
    values = ((step.index + 1, number(step.figures, metric)) for step in steps)
    return [(step, value) for step, value in values if value is not None]


class _Paper:
    """Maps points to places in a drawing, and draws its axes."""

    def __init__(self, lines: Sequence[Points], *, from_zero: bool) -> None:
        steps, values = zip(*(point for points in lines for point in points), strict=True)
        values += (0.0,) if from_zero else ()
        self._ticks = _round_ticks(min(values), max(values))
        self._low, self._high = self._ticks[0], self._ticks[-1]
        self._first, self._last = min(steps), max(steps)

    def x(self, step: float) -> float:
        span = self._last - self._first
        share = (step - self._first) / span if span else 0.5
        return LEFT + share * (WIDTH - LEFT - RIGHT)

    def y(self, value: float) -> float:
        share = (value - self._low) / (self._high - self._low)
        return HEIGHT - BOTTOM - share * (HEIGHT - TOP - BOTTOM)

    def path(self, points: Points) -> str:
        return " ".join(f"{self.x(x):.1f},{self.y(y):.1f}" for x, y in points)

    def axes(self) -> list[str]:
        parts = []
        for tick in self._ticks:
            y, end = self.y(tick), WIDTH - RIGHT
            parts.append(f'<line class="grid" x1="{LEFT}" x2="{end}" y1="{y:.1f}" y2="{y:.1f}"/>')
            text = f'<text x="{LEFT - 6}" y="{y + 3.5:.1f}" class="end">{_short(tick)}</text>'
            parts.append(text)
        size = max(1, math.ceil((self._last - self._first) / 7))
        for step in range(int(self._first), int(self._last) + 1, size):
            x = self.x(step)
            parts.append(f'<text x="{x:.1f}" y="{HEIGHT - 12}" class="middle">{step}</text>')
        return parts


def _round_ticks(low: float, high: float) -> list[float]:
    """Return round numbers that enclose a range."""
    rough = (high - low or abs(high) or 1.0) / 4
    magnitude = 10.0 ** math.floor(math.log10(rough))
    size = next(m * magnitude for m in (1, 2, 2.5, 5, 10) if m * magnitude >= rough)
    first = math.floor(low / size + 1e-9)
    last = max(first + 1, math.ceil(high / size - 1e-9))
    return [i * size for i in range(first, last + 1)]


def _short(value: float) -> str:
    if value and abs(value) < 0.001:
        return f"{value:.1e}"
    if abs(value) >= 10_000:
        return f"{value / 1000:.3g}k"
    return f"{value:.3g}"


# tables


def _step_table(steps: Sequence[Step]) -> str:
    columns = ((REWARD, 3), (TEST + REWARD, 3), (GRADED, 0), (FAILED, 0), (SECONDS, 1))
    rows = [
        [
            step_label(step.index, step.figures),
            *(_cell(step, *column) for column in columns),
            _links(step),
        ]
        for step in steps
    ]
    heads = ["step", "reward", "test", "rollouts", "failed", "seconds", "log"]
    note = "Open the logs with <code>inspect view --log-dir rollouts</code> in this folder."
    return _table("Steps", note, heads, rows)


def _evaluation_table(evaluations: Sequence[Step]) -> str:
    columns = (("rollouts/reward", 3), (GRADED, 0), (FAILED, 0))
    rows = [
        [
            str(each.index + 1),
            escape(each.task),
            *(_cell(each, *column) for column in columns),
            _links(each),
        ]
        for each in evaluations
    ]
    heads = ["evaluation", "task", "reward", "rollouts", "failed", "log"]
    note = "On the test set and, without figures, of other tasks; in the order in which they ran."
    return _table("Evaluations", note, heads, rows)


def _table(title: str, note: str, heads: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    if not rows:
        return ""
    head = "".join(f"<th>{escape(name)}</th>" for name in heads)
    body = "".join("<tr>" + "".join(f"<td>{cell}</td>" for cell in row) + "</tr>" for row in rows)
    return (
        f'<section class="card tables"><h2>{escape(title)}</h2><p class="note">{note}</p>'
        f'<div class="scroll"><table><thead><tr>{head}</tr></thead>'
        f"<tbody>{body}</tbody></table></div></section>"
    )


def _cell(step: Step, metric: str, digits: int) -> str:
    value = number(step.figures, metric)
    return "" if value is None else f"{value:.{digits}f}"


def _links(step: Step) -> str:
    return "<br>".join(
        f'<a href="{quote(path.as_posix())}">{escape(path.name)}</a>' for path in step.logs
    )
