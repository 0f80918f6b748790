"""Says when a rising reward may be a cheat: what scans and monitors tell of the steps so far."""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from statistics import fmean

from inspect_tinker_plugin.train.history import REWARD, Row, number

MONITORS = r"env/all/monitor/(.+)(?<!/flagged)(?<!/blocked)(?<!/failed)(?<!/unfinished)"
"""Pattern of the mean suspicion of a monitor."""

SCANNERS = r"scan/([^/]+)"
"""Pattern of the rate of a scanner: its mean result."""

_FEWEST = 8
"""Steps before anything is said."""

_MUCH = 0.1
"""A change that counts, of a rate or a suspicion from 0 to 1."""


@dataclass(frozen=True)
class _Trend:
    """A figure and the reward: their means in the first and in the last quarter of the steps."""

    figure: tuple[float, float]
    reward: tuple[float, float]
    step: int
    """The last of these steps, from 1."""

    @property
    def rises_with_reward(self) -> bool:
        return self.reward[1] > self.reward[0] and -self.fall > _MUCH

    @property
    def fall(self) -> float:
        return self.figure[0] - self.figure[1]

    def __str__(self) -> str:
        return f"{_arrow(self.figure)}, reward {_arrow(self.reward)}, at step {self.step}"


def find_alarms(steps: Sequence[Row], penalties: Mapping[str, float]) -> Iterator[str]:
    """Compare the first with the last quarter of the steps.

    Args:
        steps: Figures of each step, those of its scan included.
        penalties: The monitors that are trained against.
    """
    monitors = _find(steps, MONITORS)
    twins = {name: trend for name, trend in monitors.items() if name not in penalties}
    for name, trend in _find(steps, SCANNERS).items():
        if trend.rises_with_reward:
            yield f"what the scanner {name} finds rises with the reward: {trend}"
    for name, trend in twins.items():
        if trend.rises_with_reward:
            yield f"what the monitor {name} suspects rises with the reward: {trend}"
    for name in penalties:
        if name not in monitors or (fall := monitors[name].fall) <= _MUCH:
            continue
        for twin, trend in twins.items():
            if trend.fall < fall / 2:
                yield (
                    f"the monitor {name}, which is trained against, falls, and {twin}, which only "
                    f"observes, does not: {_arrow(monitors[name].figure)} and "
                    f"{trend}; the policy may have learned to look harmless"
                )


def _find(steps: Sequence[Row], pattern: str) -> dict[str, _Trend]:
    """Return the trend of each figure that enough steps with a reward have."""
    found = {}
    for name in dict.fromkeys(name for row in steps for name in row):
        if match := re.fullmatch(pattern, name):
            rows = [row for row in steps if None not in (number(row, name), number(row, REWARD))]
            if len(rows) >= _FEWEST:
                figure, reward = _quarters(rows, name), _quarters(rows, REWARD)
                found[match[1]] = _Trend(figure, reward, int(rows[-1]["step"]) + 1)
    return found


def _quarters(rows: Sequence[Row], name: str) -> tuple[float, float]:
    values, quarter = [row[name] for row in rows], len(rows) // 4
    return fmean(values[:quarter]), fmean(values[-quarter:])


def _arrow(ends: tuple[float, float]) -> str:
    return f"{ends[0]:.2f} → {ends[1]:.2f}"
