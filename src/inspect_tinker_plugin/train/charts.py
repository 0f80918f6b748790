"""The charts of a run's report, as inline SVG that needs no network."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from html import escape
from statistics import fmean

from inspect_tinker_plugin.train.history import (
    EVALUATION,
    LOSS,
    REWARD,
    TEST,
    TIMES,
    WITH_SIGNAL,
    RolloutFigures,
    Step,
    number,
    of_task,
    tasks_of,
)

WIDTH = 560
HEIGHT = 230
LEFT, RIGHT, TOP, BOTTOM = 50, 16, 10, 30

COLOURS = 8
"""Colours of the style sheet, classes ``c0`` to ``c7``."""

Points = Sequence[tuple[float, float]]
Band = Sequence[tuple[float, float, float]]
"""An area between two values by step."""
Values = Sequence[tuple[int, Sequence[float]]]
"""The figures of a step's rollouts, by step; steps without any are left out."""


@dataclass(frozen=True)
class Chart:
    """Lines by their names, over areas in the colour of the first line."""

    title: str
    note: str
    lines: Mapping[str, Points]
    bands: Sequence[Band] = ()
    from_zero: bool = True
    """Whether the scale includes zero."""
    unit: str = ""
    """Unit of the values, for the tooltips."""


def chart_training(steps: Sequence[Step]) -> list[Chart]:
    """Return the charts of a training."""
    rewards = [(step.number, step.rewards()) for step in steps if step.rewards()]
    tokens = _values(steps, lambda one: one.tokens)
    charts = [
        Chart(
            "Reward",
            "Mean over the rollouts of a step; the areas hold the middle 50% and 80% of them.",
            {
                "training": [(s.number, s.reward) for s in steps if s.reward is not None],
                **_metrics(steps, {"test": TEST + REWARD}),
            },
            [_spread(rewards, low) for low in (0.1, 0.25)],
            from_zero=False,
        ),
        Chart("Scores", "Mean of each scorer.", _scores(steps), from_zero=False),
        Chart(
            "Groups with a signal",
            "Share of the groups whose rewards differ; the others teach nothing.",
            _metrics(steps, {"groups": WITH_SIGNAL}),
        ),
        Chart(
            "KL",
            "Between the sampling and the trained policy, per token: two estimates.",
            _metrics(steps, {"v1": "optim/kl_sample_train_v1", "v2": "optim/kl_sample_train_v2"}),
            from_zero=False,
        ),
        Chart(
            "Loss and entropy",
            "As far as the cookbook's loop records them.",
            _metrics(steps, {"entropy": "optim/entropy", "loss": "optim/loss"}),
            from_zero=False,
        ),
        Chart(
            "Length",
            "Sampled tokens of a rollout: mean, and the middle 80%.",
            {"tokens": _means(tokens)},
            [_spread(tokens, 0.1)],
        ),
        Chart(
            "Turns",
            "Model calls of a rollout.",
            {"turns": _means(_values(steps, lambda one: one.turns))},
        ),
        Chart(
            "Stop reasons",
            "Why rollouts ended, as shares of a step.",
            _counts(steps, lambda one: one.stop if one.graded else None, shares=True),
            unit="%",
        ),
        Chart(
            "Errors by cause",
            "Failed rollouts per step, including those that were tried again.",
            _counts(steps, lambda one: one.cause),
        ),
        Chart(
            "Time of a rollout",
            "Seconds, mean; sampling is the wait for the policy.",
            {name: _means(_values(steps, partial(_time, name))) for name in TIMES},
            unit=" s",
        ),
        Chart(
            "Time of a step",
            "Seconds of wall clock.",
            _metrics(
                steps,
                {
                    "whole step": "time/total",
                    "rollouts": "time/sampling",
                    "training": "time/train_step",
                    "test set": "time/run_evaluations_parallel",
                },
            ),
            unit=" s",
        ),
        Chart(
            "Evaluations",
            "Figures of the further evaluations (evaluator_builders).",
            _metrics(steps, _evaluations(steps)),
            from_zero=False,
        ),
    ]
    tasks = sorted({task for step in steps for task in tasks_of(step.figures)})
    for title, note, name in (
        ("Reward by task", "Mean over the rollouts of a step.", REWARD),
        (
            "Groups with a signal by task",
            "Share of a task's groups whose rewards differ.",
            WITH_SIGNAL,
        ),
    ):
        lines = _metrics(steps, {task: of_task(task, name) for task in tasks})
        charts.append(Chart(title, note, lines, from_zero=name == WITH_SIGNAL))
    of_some = {"Evaluations", "Reward by task", "Groups with a signal by task"}
    return [chart for chart in charts if chart.title not in of_some or any(chart.lines.values())]


def chart_imitation(steps: Mapping[int, Mapping[str, object]]) -> list[Chart]:
    """Return the chart of an imitation; none if there was none."""
    points = [(i + 1, loss) for i, row in steps.items() if (loss := number(row, LOSS)) is not None]
    note = "Before the training: nats per token that was learned, by step."
    return [Chart("Imitation", note, {"loss": points})] if points else []


def _metrics(steps: Sequence[Step], names: Mapping[str, str]) -> dict[str, Points]:
    """Return metrics of the cookbook by their labels."""
    return {
        label: [(s.number, v) for s in steps if (v := number(s.figures, name)) is not None]
        for label, name in names.items()
    }


def _evaluations(steps: Sequence[Step]) -> dict[str, str]:
    names = {name for step in steps for name in step.figures if name.startswith(EVALUATION)}
    return {name.removeprefix(EVALUATION): name for name in sorted(names)}


def _values(steps: Sequence[Step], figure: Callable[[RolloutFigures], float | None]) -> Values:
    values = [(s.number, [v for o in s.graded if (v := figure(o)) is not None]) for s in steps]
    return [(step, found) for step, found in values if found]


def _time(part: str, rollout: RolloutFigures) -> float | None:
    return rollout.times.get(part)


def _means(values: Values) -> Points:
    return [(step, fmean(found)) for step, found in values]


def _spread(values: Values, low: float) -> Band:
    return [(step, quantile(found, low), quantile(found, 1 - low)) for step, found in values]


def _scores(steps: Sequence[Step]) -> dict[str, Points]:
    counts = Counter(name for step in steps for one in step.graded for name in one.scores)
    return {
        name: [
            (s.number, fmean(found))
            for s in steps
            if (found := [o.scores[name] for o in s.graded if name in o.scores])
        ]
        for name, _ in counts.most_common(COLOURS)
    }


def _counts(
    steps: Sequence[Step],
    label: Callable[[RolloutFigures], str | None],
    *,
    shares: bool = False,
) -> dict[str, Points]:
    logged = [step for step in steps if step.logs]
    counts = [Counter(filter(None, map(label, step.rollouts))) for step in logged]
    return {
        name: [
            (step.number, 100 * c[name] / max(1, c.total()) if shares else c[name])
            for step, c in zip(logged, counts, strict=True)
        ]
        for name, _ in sum(counts, Counter()).most_common()
    }


def quantile(values: Iterable[float], share: float) -> float:
    """Return a quantile, interpolated."""
    ordered = sorted(values)
    position = share * (len(ordered) - 1)
    below = int(position)
    above = min(below + 1, len(ordered) - 1)
    return ordered[below] + (position - below) * (ordered[above] - ordered[below])


# drawing


class _Frame:
    """Maps values to positions in a drawing, and draws its axes."""

    def __init__(self, values: Sequence[float], steps: Sequence[float], *, from_zero: bool) -> None:
        low, high = min(values), max(values)
        if from_zero:
            low, high = min(0.0, low), max(0.0, high)
        self._ticks = _round_ticks(low, high)
        self._low, self._high = min(low, self._ticks[0]), max(high, self._ticks[-1])
        self._first, self._last = min(steps), max(steps)

    def x(self, step: float) -> float:
        span = self._last - self._first
        share = (step - self._first) / span if span else 0.5
        return LEFT + share * (WIDTH - LEFT - RIGHT)

    def y(self, value: float) -> float:
        share = (value - self._low) / (self._high - self._low)
        return HEIGHT - BOTTOM - share * (HEIGHT - TOP - BOTTOM)

    def axes(self) -> list[str]:
        parts = []
        for tick in self._ticks:
            y, end = self.y(tick), WIDTH - RIGHT
            parts.append(f'<line class="grid" x1="{LEFT}" x2="{end}" y1="{y:.1f}" y2="{y:.1f}"/>')
            text = f'<text x="{LEFT - 6}" y="{y + 3.5:.1f}" class="end">{_short(tick)}</text>'
            parts.append(text)
        size = max(1, round(_round_ticks(0, max(1.0, self._last - self._first), 7)[1]))
        whole = range(math.ceil(self._first), math.floor(self._last) + 1)
        marked = [float(x) for x in whole if x % size == 0]
        for step in marked or [self._first]:
            x = self.x(step)
            parts.append(f'<text x="{x:.1f}" y="{HEIGHT - 12}" class="middle">{step:g}</text>')
        return parts


def _round_ticks(low: float, high: float, wanted: int = 4) -> list[float]:
    """Return round numbers that enclose a range."""
    rough = (high - low or abs(high) or 1.0) / wanted
    magnitude = 10.0 ** math.floor(math.log10(rough))
    size = next(m * magnitude for m in (1, 2, 2.5, 5, 10) if m * magnitude >= rough)
    first = math.floor(low / size + 1e-9)
    last = max(first + 1, math.ceil(high / size - 1e-9))
    return [i * size for i in range(first, last + 1)]


def draw_chart(chart: Chart) -> str:
    """Draw a chart with its legend; a note when there is nothing to draw."""
    lines = {name: points for name, points in chart.lines.items() if points}
    if not lines:
        return '<p class="none">no figures yet</p>'
    values = [y for points in lines.values() for _, y in points]
    values += [y for band in chart.bands for _, low, high in band for y in (low, high)]
    steps = [x for points in lines.values() for x, _ in points]
    frame = _Frame(values, steps, from_zero=chart.from_zero)
    parts = frame.axes()
    for band in chart.bands:
        up = [f"{frame.x(x):.1f},{frame.y(high):.1f}" for x, _, high in band]
        down = [f"{frame.x(x):.1f},{frame.y(low):.1f}" for x, low, _ in reversed(band)]
        parts.append(f'<polygon class="band c0" points="{" ".join(up + down)}"/>')
    keys = []
    for i, (name, points) in enumerate(lines.items()):
        colour = f"c{i % COLOURS}"
        path = " ".join(f"{frame.x(x):.1f},{frame.y(y):.1f}" for x, y in points)
        parts.append(f'<polyline class="line {colour}" points="{path}"/>')
        # the points of a long line are invisible, but have tooltips
        kind, size = ("dot", 2.6) if len(points) <= 40 else ("dot hidden", 4)
        for x, y in points:
            tip = escape(f"step {x:g}: {name} {_short(y)}{chart.unit}")
            parts.append(
                f'<circle class="{kind} {colour}" cx="{frame.x(x):.1f}" '
                f'cy="{frame.y(y):.1f}" r="{size}"><title>{tip}</title></circle>'
            )
        keys.append(f'<span><i class="key {colour}"></i>{escape(name)}</span>')
    return (
        f'<svg viewBox="0 0 {WIDTH} {HEIGHT}" role="img">{"".join(parts)}</svg>'
        f'<div class="legend">{"".join(keys)}</div>'
    )


def _short(value: float) -> str:
    if value and abs(value) < 0.001:
        return f"{value:.1e}"
    if abs(value) >= 10_000:
        return f"{value / 1000:.3g}k"
    return f"{value:.3g}"
