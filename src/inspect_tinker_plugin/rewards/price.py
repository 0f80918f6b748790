"""The price of an episode whose policy made its sandbox fail: no honest episode gets less.

Its scores count as their worst, and the reward is shaped like any other: by the format of what was
said, its length, its turns. So breaking the sandbox never pays more than a wrong answer.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Sequence

from inspect_tinker_plugin.contracts.episodes import EpisodeResult
from inspect_tinker_plugin.rewards.builtin import (
    Maximum,
    Mean,
    Minimum,
    Penalty,
    Product,
    Weighted,
)
from inspect_tinker_plugin.rewards.resolve import ResolvedReward

_SCORE = (0.0, 1.0)
"""Worst and best value of a score, and of an aggregator that is not built in. For scores below 0
the group sees to it: its least own reward counts if that is lower (``rl/group.py``)."""


def least_reward(aggregator: object, result: EpisodeResult) -> float:
    """Return the reward of an episode with the worst scores; at most 0."""
    return min(0.0, _bounds(aggregator, result)[0])


def _bounds(aggregator: object, result: EpisodeResult) -> tuple[float, float]:
    """Return the least and greatest reward of an episode, whatever its scores are."""
    match aggregator:
        case ResolvedReward():
            return _bounds(aggregator.aggregator, result)
        case Penalty():
            low, high = _bounds(aggregator.reward, result)
            penalty = aggregator.penalty(result)
            return low - penalty, high - penalty
        case Weighted(terms=terms):
            parts = [_scaled(term.weight, _bounds(term.part, result)) for term in terms]
            return _each(math.fsum, parts)
        case Mean(parts=[_, *_] as given):
            low, high = _each(math.fsum, [_bounds(part, result) for part in given])
            return low / len(given), high / len(given)
        case Minimum(parts=[_, *_] as given):
            return _each(min, [_bounds(part, result) for part in given])
        case Maximum(parts=[_, *_] as given):
            return _each(max, [_bounds(part, result) for part in given])
        case Product(parts=[_, *_] as given):
            total = (1.0, 1.0)
            for part in given:
                ends = [a * b for a in total for b in _bounds(part, result)]
                total = min(ends), max(ends)
            return total
    return _SCORE


def _scaled(weight: float, bounds: tuple[float, float]) -> tuple[float, float]:
    ends = [weight * bound for bound in bounds]
    return min(ends), max(ends)


def _each(
    combine: Callable[[Iterable[float]], float], parts: Sequence[tuple[float, float]]
) -> tuple[float, float]:
    return combine([low for low, _ in parts]), combine([high for _, high in parts])
