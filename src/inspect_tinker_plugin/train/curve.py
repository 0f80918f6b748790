"""The reward of a run as a curve of characters, shown in the terminal when a run ends."""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from pathlib import Path

from inspect_tinker_plugin.train.metrics import REWARD, number, read_steps
from inspect_tinker_plugin.wording import counted

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
    rewards = [
        reward
        for row in read_steps(log_dir).values()
        if (reward := number(row, REWARD)) is not None
    ]
    if len(rewards) < 2:
        return ""
    quarter = max(1, len(rewards) // 4)
    first, last = (sum(part) / quarter for part in (rewards[:quarter], rewards[-quarter:]))
    caption = f"mean reward: first quarter {first:.3f}, last quarter {last:.3f}"
    return "\n".join([*_rows(rewards), caption])


def _rows(values: Sequence[float]) -> list[str]:
    """Draw one column per value, with a scale (several values per column if they do not fit)."""
    low, high = min(0.0, *values), max(values)
    span = (high - low) or 1.0
    columns = _columns(values)
    eighths = [round((value - low) / span * HEIGHT * 8) for value in columns]
    rows = []
    for row in reversed(range(HEIGHT)):
        label = f"{high:.2f}" if row == HEIGHT - 1 else f"{low:.2f}" if row == 0 else ""
        bars = "".join(_BARS[max(0, min(8, filled - row * 8))] for filled in eighths)
        rows.append(f"{label:>7} │{bars}")
    rows.append(f"{'':>7} └{'─' * len(columns)} {counted(len(values), 'step')}")
    return rows


def _columns(values: Sequence[float]) -> list[float]:
    if len(values) <= WIDTH:
        each = max(1, WIDTH // (2 * len(values)))
        return [value for value in values for _ in range(each)]
    bounds = [round(i * len(values) / WIDTH) for i in range(WIDTH + 1)]
    pairs = itertools.pairwise(bounds)
    return [sum(values[a:b]) / (b - a) for a, b in pairs]
