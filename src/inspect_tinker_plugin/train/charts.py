"""The charts of a run's report, as inline SVG that needs no network."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from html import escape

from inspect_tinker_plugin.train.history import (
    EVALUATION,
    LOSS,
    REWARD,
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
LEFT, RIGHT, TOP, BOTTOM = 46, 12, 10, 30
COLUMNS = 120
"""Maximum number of stacked columns; with more steps, several share a column."""

COLOURS = 8
"""Colours of the style sheet, classes ``c0`` to ``c7``, and lines in a chart of many."""

Points = Sequence[tuple[float, float]]
Chart = tuple[str, str, str]
"""Title, note and drawing."""


@dataclass(frozen=True)
class Line:
    """Values by step."""

    name: str
    points: Points
    colour: int = 0
    dashed: bool = False


@dataclass(frozen=True)
class Band:
    """An area between two values by step."""

    points: Sequence[tuple[float, float, float]]
    colour: int = 0


def draw_charts(steps: Sequence[Step]) -> list[Chart]:
    """Draw the charts of a training."""
    tasks = sorted({task for step in steps for task in tasks_of(step.figures)})
    by_task = {task: of_task(task, REWARD) for task in tasks}
    signal_by_task = {task: of_task(task, WITH_SIGNAL) for task in tasks}
    names = {name for step in steps for name in step.figures if name.startswith(EVALUATION)}
    evaluated = {name.removeprefix(EVALUATION): name for name in sorted(names)}
    estimates = {"v1": "optim/kl_sample_train_v1", "v2": "optim/kl_sample_train_v2"}
    stops = _count(steps, lambda one: one.stop if one.graded else None, shares=True)
    found = [
        (
            "Reward",
            "Mean over the rollouts of a step; the areas hold the middle 50% and 80% of them.",
            _draw_rewards(steps),
        ),
        ("Scores", "Mean of each scorer.", _draw_scores(steps)),
        (
            "Groups with a signal",
            "Share of the groups whose rewards differ; the others teach nothing.",
            _draw_figures(steps, {"groups": WITH_SIGNAL}, from_zero=True),
        ),
        (
            "KL",
            "Between the sampling and the trained policy, per token: two estimates.",
            _draw_figures(steps, estimates),
        ),
        (
            "Loss and entropy",
            "As far as the cookbook's loop records them.",
            _draw_figures(steps, {"entropy": "optim/entropy", "loss": "optim/loss"}),
        ),
        (
            "Length",
            "Sampled tokens of a rollout: mean, and the middle 80%.",
            _draw_means(steps, "tokens", lambda one: one.tokens, colour=2, band=True),
        ),
        (
            "Turns",
            "Model calls of a rollout.",
            _draw_means(steps, "turns", lambda one: one.turns, colour=4),
        ),
        ("Stop reasons", "Why rollouts ended, as shares of a step.", stops),
        (
            "Errors by cause",
            "Failed rollouts per step, including those that were tried again.",
            _count(steps, lambda one: one.cause),
        ),
        (
            "Time of a rollout",
            "Seconds, mean; sampling is the wait for the policy.",
            _draw_times(steps),
        ),
        ("Time of a step", "Seconds of wall clock.", _draw_wall_clock(steps)),
    ]
    if evaluated:
        note = "Figures of the further evaluations (evaluator_builders)."
        found.append(("Evaluations", note, _draw_figures(steps, evaluated)))
    if tasks:
        note = "Mean over the rollouts of a step."
        found.append(("Reward by task", note, _draw_figures(steps, by_task)))
        note = "Share of a task's groups whose rewards differ."
        drawing = _draw_figures(steps, signal_by_task, from_zero=True)
        found.append(("Groups with a signal by task", note, drawing))
    return found


def draw_imitation(steps: Mapping[int, Mapping[str, object]]) -> list[Chart]:
    """Draw the chart of an imitation; none if there was none."""
    points = [(i + 1, loss) for i, row in steps.items() if (loss := number(row, LOSS)) is not None]
    if not points:
        return []
    note = "Before the training: nats per token that was learned, by step."
    return [("Imitation", note, draw_lines([Line("loss", points)], from_zero=True))]


def _draw_rewards(steps: Sequence[Step]) -> str:
    lines = [Line("training", [(s.number, s.reward) for s in steps if s.reward is not None])]
    tests = [(s.number, s.test_reward) for s in steps if s.test_reward is not None]
    if tests:
        lines.append(Line("test", tests, colour=1, dashed=True))
    spread = [(s.number, s.rewards()) for s in steps if s.rewards()]
    return draw_lines(lines, bands=[_band(spread, low) for low in (0.1, 0.25) if spread])


def _draw_scores(steps: Sequence[Step]) -> str:
    counts = Counter(name for step in steps for one in step.graded for name in one.scores)
    lines = []
    for colour, (name, _) in enumerate(counts.most_common(COLOURS)):
        values = [(s.number, [o.scores[name] for o in s.graded if name in o.scores]) for s in steps]
        lines.append(Line(name, [(i, mean(v)) for i, v in values if v], colour=colour))
    return draw_lines(lines)


def _draw_figures(
    steps: Sequence[Step], names: Mapping[str, str], *, from_zero: bool = False
) -> str:
    """Draw metrics of the cookbook by their labels; absent metrics are left out."""
    lines = []
    for colour, (label, name) in enumerate(names.items()):
        points = [(s.number, v) for s in steps if (v := number(s.figures, name)) is not None]
        if points:
            lines.append(Line(label, points, colour=colour % COLOURS))
    return draw_lines(lines, from_zero=from_zero)


def _draw_means(
    steps: Sequence[Step],
    name: str,
    figure: Callable[[RolloutFigures], float | None],
    *,
    colour: int,
    band: bool = False,
) -> str:
    values = [(s.number, [v for o in s.graded if (v := figure(o)) is not None]) for s in steps]
    known = [(i, v) for i, v in values if v]
    line = Line(name, [(i, mean(v)) for i, v in known], colour=colour)
    bands = [_band(known, 0.1, colour)] if band and known else []
    return draw_lines([line], bands=bands, from_zero=True)


def _band(values: Sequence[tuple[int, Sequence[float]]], low: float, colour: int = 0) -> Band:
    return Band([(i, quantile(v, low), quantile(v, 1 - low)) for i, v in values], colour)


def _count(
    steps: Sequence[Step],
    label: Callable[[RolloutFigures], str | None],
    *,
    shares: bool = False,
) -> str:
    logged = [step for step in steps if step.logs]
    counts = [Counter(filter(None, map(label, step.rollouts))) for step in logged]
    layers = {
        name: [100 * c[name] / max(1, c.total()) if shares else float(c[name]) for c in counts]
        for name, _ in sum(counts, Counter()).most_common()
    }
    return draw_columns([step.number for step in logged], layers, unit="%" if shares else "")


def _draw_times(steps: Sequence[Step]) -> str:
    timed = [step for step in steps if step.graded]
    layers = {
        name: [mean([one.times.get(name, 0.0) for one in step.graded]) for step in timed]
        for name in TIMES
    }
    return draw_columns([step.number for step in timed], layers, unit=" s")


def _draw_wall_clock(steps: Sequence[Step]) -> str:
    timed = [step for step in steps if number(step.figures, "time/total")]
    named = {
        "rollouts": "sampling",
        "training": "train_step",
        "test set": "run_evaluations_parallel",
    }
    layers = {
        label: [number(step.figures, f"time/{name}") or 0.0 for step in timed]
        for label, name in named.items()
    }
    totals = [number(step.figures, "time/total") or 0.0 for step in timed]
    parts = zip(totals, *layers.values(), strict=True)
    layers["other"] = [max(0.0, total - sum(known)) for total, *known in parts]
    return draw_columns([step.number for step in timed], layers, unit=" s")


def quantile(values: Iterable[float], share: float) -> float:
    """Return a quantile, interpolated."""
    ordered = sorted(values)
    position = share * (len(ordered) - 1)
    below = int(position)
    above = min(below + 1, len(ordered) - 1)
    return ordered[below] + (position - below) * (ordered[above] - ordered[below])


def mean(values: Sequence[float]) -> float:
    """Return the average."""
    return sum(values) / len(values)


# drawing


class _Frame:
    """Maps values to positions in a drawing, and draws its axes."""

    def __init__(
        self, values: Sequence[float], steps: Sequence[float], *, from_zero: bool, inset: float = 4
    ) -> None:
        low, high = min(values), max(values)
        if from_zero:
            low, high = min(0.0, low), max(0.0, high)
        self._ticks = _round_ticks(low, high)
        self._low, self._high = min(low, self._ticks[0]), max(high, self._ticks[-1])
        self._first, self._last, self._inset = min(steps), max(steps), inset

    def x(self, step: float) -> float:
        span = self._last - self._first
        share = (step - self._first) / span if span else 0.5
        return LEFT + self._inset + share * (WIDTH - LEFT - RIGHT - 2 * self._inset)

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


def draw_lines(
    lines: Sequence[Line], *, bands: Sequence[Band] = (), from_zero: bool = False
) -> str:
    """Draw lines over areas, with a legend; a note when there is nothing to draw."""
    values = [y for line in lines for _, y in line.points]
    values += [y for band in bands for _, low, high in band.points for y in (low, high)]
    if not values:
        return '<p class="none">no figures yet</p>'
    frame = _Frame(values, [x for line in lines for x, _ in line.points], from_zero=from_zero)
    parts = frame.axes()
    for band in bands:
        up = [f"{frame.x(x):.1f},{frame.y(high):.1f}" for x, _, high in band.points]
        down = [f"{frame.x(x):.1f},{frame.y(low):.1f}" for x, low, _ in reversed(band.points)]
        parts.append(f'<polygon class="band c{band.colour}" points="{" ".join(up + down)}"/>')
    for line in lines:
        path = " ".join(f"{frame.x(x):.1f},{frame.y(y):.1f}" for x, y in line.points)
        style = "line dashed" if line.dashed else "line"
        parts.append(f'<polyline class="{style} c{line.colour}" points="{path}"/>')
        # the points of a long line are invisible, but have tooltips
        seen = line.dashed or len(line.points) <= 40
        kind, size = ("dot", 2.6) if seen else ("dot hidden", 4)
        for x, y in line.points:
            tip = escape(f"step {x:g}: {line.name} {_short(y)}")
            parts.append(
                f'<circle class="{kind} c{line.colour}" cx="{frame.x(x):.1f}" '
                f'cy="{frame.y(y):.1f}" r="{size}"><title>{tip}</title></circle>'
            )
    return _add_legend(parts, [(line.name, line.colour) for line in lines])


def draw_columns(
    steps: Sequence[float], layers: Mapping[str, Sequence[float]], *, unit: str = ""
) -> str:
    """Draw one column per step, with the layers on top of each other.

    Args:
        steps: Positions.
        layers: By name, one value per step.
        unit: Unit of the values, for the tooltips.
    """
    share = max(1, math.ceil(len(steps) / COLUMNS))
    starts = range(0, len(steps), share)
    steps = [steps[i] for i in starts]
    layers = {name: [mean(v[i : i + share]) for i in starts] for name, v in layers.items()}
    totals = [sum(values[i] for values in layers.values()) for i in range(len(steps))]
    if not totals or max(totals) <= 0:
        return '<p class="none">none</p>'
    inner = (WIDTH - LEFT - RIGHT) / len(steps)
    frame = _Frame([0.0, max(totals)], steps, from_zero=True, inset=inner / 2)
    parts = frame.axes()
    width = max(1.0, inner * 0.78)
    bases = [0.0] * len(steps)
    for colour, (name, values) in enumerate(layers.items()):
        for i, value in enumerate(values):
            if value <= 0:
                continue
            top, bottom = frame.y(bases[i] + value), frame.y(bases[i])
            bases[i] += value
            tip = escape(f"step {steps[i]:g}: {name} {_short(value)}{unit}")
            parts.append(
                f'<rect class="bar c{colour % COLOURS}" x="{frame.x(steps[i]) - width / 2:.1f}" '
                f'y="{top:.1f}" width="{width:.1f}" height="{bottom - top:.1f}">'
                f"<title>{tip}</title></rect>"
            )
    return _add_legend(parts, [(name, i % COLOURS) for i, name in enumerate(layers)])


def _add_legend(parts: Sequence[str], names: Sequence[tuple[str, int]]) -> str:
    keys = "".join(
        f'<span><i class="key c{colour}"></i>{escape(name)}</span>' for name, colour in names
    )
    return (
        f'<svg viewBox="0 0 {WIDTH} {HEIGHT}" role="img">{"".join(parts)}</svg>'
        f'<div class="legend">{keys}</div>'
    )


def _short(value: float) -> str:
    if value and abs(value) < 0.001:
        return f"{value:.1e}"
    if abs(value) >= 10_000:
        return f"{value / 1000:.3g}k"
    return f"{value:.3g}"
