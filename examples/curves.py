"""Draws the rewards of runs by step, the expected ones dashed."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

WIDTH, HEIGHT, EDGE = 640, 300, 40
COLOURS = ("#3f51b5", "#c2410c")

Curves = Mapping[str, Sequence[float]]


def draw(expected: Curves, yours: Curves) -> str:
    """Return an SVG; rewards are from 0 to 1.

    Args:
        expected: Rewards by step, by the name of the run: dashed where there are yours.
        yours: The same of another try.
    """
    steps = max(len(curve) for curve in (*expected.values(), *yours.values()))
    parts = [
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {WIDTH} {HEIGHT}" '
        'font-family="sans-serif" font-size="12">',
        f'<rect width="{WIDTH}" height="{HEIGHT}" fill="white"/>',
    ]
    for tenths in range(0, 11, 2):
        y = _y(tenths / 10)
        parts.append(f'<path d="M{EDGE} {y:.1f}H{WIDTH - EDGE}" stroke="#ddd"/>')
        parts.append(f'<text x="{EDGE - 6}" y="{y + 4:.1f}" text-anchor="end">{tenths / 10}</text>')
    parts.append(f'<text x="{EDGE}" y="{HEIGHT - 10}">step 1</text>')
    parts.append(f'<text x="{WIDTH - EDGE}" y="{HEIGHT - 10}" text-anchor="end">{steps}</text>')
    for number, name in enumerate(expected):
        colour, label = COLOURS[number % len(COLOURS)], f"{name}: reward"
        dashed = ' stroke-dasharray="6 4"' if yours else ""
        parts.append(_line(expected[name], steps, f'stroke="{colour}"{dashed}'))
        if name in yours:
            parts.append(_line(yours[name], steps, f'stroke="{colour}" stroke-width="2.5"'))
            label += " (expected: dashed)"
        y = 18 + 16 * number
        parts.append(f'<text x="{EDGE + 8}" y="{y}" fill="{colour}">{label}</text>')
    return "\n".join([*parts, "</svg>", ""])


def _y(reward: float) -> float:
    return HEIGHT - EDGE - min(max(reward, 0.0), 1.0) * (HEIGHT - 2 * EDGE)


def _line(curve: Sequence[float], steps: int, style: str) -> str:
    apart = (WIDTH - 2 * EDGE) / max(steps - 1, 1)
    points = " ".join(f"{EDGE + i * apart:.1f},{_y(each):.1f}" for i, each in enumerate(curve))
    return f'<polyline points="{points}" fill="none" {style}/>'
