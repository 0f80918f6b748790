"""Small charts as inline SVG, for a report that needs no network."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from html import escape

WIDTH = 560
HEIGHT = 230
LEFT, RIGHT, TOP, BOTTOM = 46, 12, 10, 30
COLUMNS = 120
"""Maximum number of stacked columns; with more steps, several share a column."""

COLOURS = 8
"""Colours of the style sheet: classes ``c0`` to ``c7``."""


@dataclass(frozen=True)
class Line:
    """Values by step."""

    name: str
    points: Sequence[tuple[float, float]]
    colour: int = 0
    dots: bool = False


@dataclass(frozen=True)
class Band:
    """An area between two values by step."""

    name: str
    points: Sequence[tuple[float, float, float]]
    colour: int = 0


@dataclass(frozen=True)
class _Frame:
    """Maps values to positions in the drawing."""

    low: float
    high: float
    first: float
    last: float
    inset: float = 0.0
    ticks: Sequence[float] = field(default_factory=tuple)

    def x(self, value: float) -> float:
        width = WIDTH - LEFT - RIGHT - 2 * self.inset
        span = self.last - self.first
        share = (value - self.first) / span if span else 0.5
        return LEFT + self.inset + share * width

    def y(self, value: float) -> float:
        share = (value - self.low) / (self.high - self.low)
        return HEIGHT - BOTTOM - share * (HEIGHT - TOP - BOTTOM)


def line_chart(
    lines: Sequence[Line], *, bands: Sequence[Band] = (), from_zero: bool = False
) -> str:
    """Draw lines over areas.

    Returns:
        A figure with a legend; a note when there is nothing to draw.
    """
    values = [y for line in lines for _, y in line.points]
    values += [y for band in bands for _, low, high in band.points for y in (low, high)]
    steps = [x for line in lines for x, _ in line.points]
    if not values:
        return empty("no figures yet")
    frame = _frame(values, steps, from_zero=from_zero)
    parts = _axes(frame)
    for band in bands:
        up = [f"{frame.x(x):.1f},{frame.y(high):.1f}" for x, _, high in band.points]
        down = [f"{frame.x(x):.1f},{frame.y(low):.1f}" for x, low, _ in reversed(band.points)]
        parts.append(f'<polygon class="band c{band.colour}" points="{" ".join(up + down)}"/>')
    for line in lines:
        path = " ".join(f"{frame.x(x):.1f},{frame.y(y):.1f}" for x, y in line.points)
        style = "line dashed" if line.dots else "line"
        parts.append(f'<polyline class="{style} c{line.colour}" points="{path}"/>')
        parts += _dots(line, frame)
    legend = [(line.name, line.colour) for line in lines]
    legend += [(band.name, band.colour) for band in bands if band.name]
    return _figure(parts, legend)


def stacked_chart(
    steps: Sequence[float], layers: Mapping[str, Sequence[float]], *, unit: str = ""
) -> str:
    """Draw one column per step, with the layers on top of each other.

    Args:
        steps: Positions.
        layers: By name, one value per step.
        unit: Unit of the values, for the tooltips.
    """
    steps, layers = _thinned(steps, layers)
    totals = [sum(values[i] for values in layers.values()) for i in range(len(steps))]
    if not totals or max(totals) <= 0:
        return empty("none")
    inner = (WIDTH - LEFT - RIGHT) / len(steps)
    frame = _frame([0.0, max(totals)], steps, from_zero=True, inset=inner / 2)
    parts = _axes(frame)
    width = max(1.0, inner * 0.78)
    for i, step in enumerate(steps):
        base = 0.0
        for number, (name, values) in enumerate(layers.items()):
            if values[i] <= 0:
                continue
            top = frame.y(base + values[i])
            tall = frame.y(base) - top
            base += values[i]
            tip = f"step {step:g}: {name} {_short(values[i])}{unit}"
            parts.append(
                f'<rect class="bar c{number % COLOURS}" x="{frame.x(step) - width / 2:.1f}" '
                f'y="{top:.1f}" width="{width:.1f}" height="{tall:.1f}">'
                f"<title>{escape(tip)}</title></rect>"
            )
    return _figure(parts, [(name, i % COLOURS) for i, name in enumerate(layers)])


def empty(note: str) -> str:
    """Say why there is no chart."""
    return f'<p class="none">{escape(note)}</p>'


def _thinned(
    steps: Sequence[float], layers: Mapping[str, Sequence[float]]
) -> tuple[Sequence[float], Mapping[str, Sequence[float]]]:
    """Average neighbouring steps when there are more than fit."""
    share = math.ceil(len(steps) / COLUMNS) if steps else 1
    if share == 1:
        return steps, layers
    starts = range(0, len(steps), share)
    return [steps[i] for i in starts], {
        name: [sum(v := values[i : i + share]) / len(v) for i in starts]
        for name, values in layers.items()
    }


def _frame(
    values: Sequence[float], steps: Sequence[float], *, from_zero: bool, inset: float = 4.0
) -> _Frame:
    low, high = min(values), max(values)
    if from_zero:
        low, high = min(0.0, low), max(0.0, high)
    ticks = _ticks(low, high)
    return _Frame(
        low=min(low, ticks[0]),
        high=max(high, ticks[-1]),
        first=min(steps),
        last=max(steps),
        inset=inset,
        ticks=ticks,
    )


def _ticks(low: float, high: float, wanted: int = 4) -> list[float]:
    """Return round numbers that enclose a range."""
    span = high - low or abs(high) or 1.0
    rough = span / wanted
    magnitude = 10.0 ** math.floor(math.log10(rough))
    size = next(m * magnitude for m in (1, 2, 2.5, 5, 10) if m * magnitude >= rough)
    first = math.floor(low / size + 1e-9)
    last = max(first + 1, math.ceil(high / size - 1e-9))
    return [i * size for i in range(first, last + 1)]


def _axes(frame: _Frame) -> list[str]:
    parts = []
    for tick in frame.ticks:
        y = frame.y(tick)
        parts.append(
            f'<line class="grid" x1="{LEFT}" x2="{WIDTH - RIGHT}" y1="{y:.1f}" y2="{y:.1f}"/>'
        )
        parts.append(f'<text x="{LEFT - 6}" y="{y + 3.5:.1f}" class="end">{_short(tick)}</text>')
    for step in _step_ticks(frame.first, frame.last):
        x = frame.x(step)
        parts.append(f'<text x="{x:.1f}" y="{HEIGHT - 12}" class="middle">{step:g}</text>')
    return parts


def _step_ticks(first: float, last: float) -> list[float]:
    size = max(1, round(_ticks(0, max(1.0, last - first), 7)[1]))
    inner = [float(x) for x in range(math.ceil(first), math.floor(last) + 1) if x % size == 0]
    return inner or [first]


def _dots(line: Line, frame: _Frame) -> list[str]:
    """Mark the points of a line: visible if it is short, else invisible but with tooltips."""
    shown = line.dots or len(line.points) <= 40
    size = 2.6 if shown else 4
    kind = "dot" if shown else "dot hidden"
    return [
        f'<circle class="{kind} c{line.colour}" cx="{frame.x(x):.1f}" cy="{frame.y(y):.1f}" '
        f'r="{size}"><title>{escape(f"step {x:g}: {line.name} {_short(y)}")}</title></circle>'
        for x, y in line.points
    ]


def _figure(parts: Sequence[str], legend: Sequence[tuple[str, int]]) -> str:
    keys = "".join(
        f'<span><i class="key c{colour}"></i>{escape(name)}</span>' for name, colour in legend
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
