"""The aggregators that ship with the package, by the names that expressions use."""

from __future__ import annotations

from collections.abc import Callable, Mapping

from inspect_tinker_plugin.rewards.combining import (
    First,
    Maximum,
    Mean,
    Minimum,
    Product,
    ScoreReward,
    Term,
    Weighted,
)
from inspect_tinker_plugin.rewards.contract import RewardAggregator
from inspect_tinker_plugin.rewards.shaping import (
    FormatPenalty,
    LengthPenalty,
    ToolErrorPenalty,
    TurnPenalty,
)

RewardFactory = Callable[..., RewardAggregator]
"""Makes an aggregator of the arguments in an expression: aggregators, numbers, strings, terms."""


def mean(*parts: RewardAggregator) -> Mean:
    """The mean of the parts, or of all scores."""
    return Mean(parts)


def minimum(*parts: RewardAggregator) -> Minimum:
    """The least of the parts, or of all scores."""
    return Minimum(parts)


def maximum(*parts: RewardAggregator) -> Maximum:
    """The greatest of the parts, or of all scores."""
    return Maximum(parts)


def product(*parts: RewardAggregator) -> Product:
    """The product of the parts, or of all scores."""
    return Product(parts)


def weighted(*terms: Term, **scores: float) -> Weighted:
    """The weighted sum of scores by name (``accuracy=0.8``) and of other terms."""
    named = tuple(Term(ScoreReward(path), weight) for path, weight in scores.items())
    return Weighted((*terms, *named))


REWARD_AGGREGATORS: Mapping[str, RewardFactory] = {
    "mean": mean,
    "weighted": weighted,
    "min": minimum,
    "max": maximum,
    "product": product,
    "first": First,
    "length": LengthPenalty,
    "turns": TurnPenalty,
    "format": FormatPenalty,
    "tool_errors": ToolErrorPenalty,
}
"""Built-in reward aggregators by name."""
