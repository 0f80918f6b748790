"""The aggregators that ship with the package, by the names that expressions use.

Some read scores and combine rewards, such as ``mean`` and ``weighted``; others subtract penalties
from a reward (length, turns, format, tool errors). A penalty never hides a failure: when the inner
reward cannot be computed, neither can this one. All of them know the least reward that an episode
can have, which is the price of a broken sandbox.
"""

from __future__ import annotations

import math
import re
from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import product
from statistics import fmean
from typing import Any, ClassVar

from inspect_ai.model import ChatMessageTool

from inspect_tinker_plugin.contracts.episodes import MONITOR, EpisodeResult, Metrics
from inspect_tinker_plugin.contracts.errors import RewardError
from inspect_tinker_plugin.contracts.rewards import (
    Reward,
    RewardAggregator,
    UnscoredError,
    checked_reward,
)
from inspect_tinker_plugin.contracts.wording import object_name
from inspect_tinker_plugin.rewards.resolve import call_function
from inspect_tinker_plugin.rewards.scores import ScoreReward, Term, all_scores, score_names

_Bounds = tuple[float, float]
"""Least and greatest reward of an episode, whatever its scores are."""

_SCORE: _Bounds = (0.0, 1.0)
"""Those of a score, and of an aggregator that is not built in. For scores below 0 the other
episodes see to it (``FailureCounts.shortfall``, and the group's least reward)."""


def least_reward(aggregator: object, result: EpisodeResult) -> float:
    """Return the price of an episode whose policy made its sandbox fail; at most 0.

    Its scores count as their worst, and the reward is shaped like any other: by the format of what
    was said, its length, its turns. So breaking the sandbox never pays more than a wrong answer.
    """
    return min(0.0, _bounds(aggregator, result)[0])


def _bounds(aggregator: object, result: EpisodeResult) -> _Bounds:
    return aggregator.bounds(result) if isinstance(aggregator, _Bounded) else _SCORE


class _Bounded(ABC):
    @abstractmethod
    def bounds(self, result: EpisodeResult) -> _Bounds:
        """Return the least and greatest reward of an episode, whatever its scores are."""


@dataclass(frozen=True)
class _OfParts(_Bounded):
    """One number for all of its parts."""

    parts: tuple[RewardAggregator, ...] = ()
    """Rewards to combine; empty for all scores of the episode."""

    def __post_init__(self) -> None:
        require_parts(*self.parts)

    @property
    def at_once(self) -> bool:
        """Whether it only reads scores, so that it runs nothing that somebody else has written."""
        return not self.parts

    async def __call__(self, result: EpisodeResult) -> Reward:
        rewards = await _rewards(self.parts, result)
        value = self._combine([reward.value for reward in rewards])
        return Reward(value, _merge_metrics(rewards))

    def bounds(self, result: EpisodeResult) -> _Bounds:
        """Return the bounds: the function grows with each part."""
        lows, highs = zip(*(_bounds(part, result) for part in self.parts or (None,)), strict=True)
        return self._combine(lows), self._combine(highs)

    @abstractmethod
    def _combine(self, values: Sequence[float]) -> float: ...


class Mean(_OfParts):
    """The mean of its parts; without parts, of all scores."""

    def _combine(self, values: Sequence[float]) -> float:
        return fmean(values)


class Minimum(_OfParts):
    """The least of its parts; without parts, of all scores."""

    def _combine(self, values: Sequence[float]) -> float:
        return min(values)


class Maximum(_OfParts):
    """The greatest of its parts; without parts, of all scores."""

    def _combine(self, values: Sequence[float]) -> float:
        return max(values)


class Product(_OfParts):
    """The product of its parts; without parts, of all scores."""

    def _combine(self, values: Sequence[float]) -> float:
        return math.prod(values)

    def bounds(self, result: EpisodeResult) -> _Bounds:
        """Return the bounds, of parts that may be negative."""
        total = (1.0, 1.0)
        for part in self.parts or (None,):
            ends = [a * b for a, b in product(total, _bounds(part, result))]
            total = min(ends), max(ends)
        return total


@dataclass(frozen=True)
class First:
    """The first score, in the order of the task's scorers; the others are not looked at."""

    async def __call__(self, result: EpisodeResult) -> Reward:
        first = next(iter(score_names(result)), None)
        if first is None:
            return all_scores(result)[0]  # raises if there is none
        return ScoreReward(first).read(result)


@dataclass(frozen=True)
class Weighted(_Bounded):
    """The sum of its parts, each times its weight."""

    terms: tuple[Term, ...]
    """Parts with their weights; at least one."""

    def __post_init__(self) -> None:
        if not self.terms:
            raise RewardError("it needs at least one part, such as accuracy=1.0")
        for term in self.terms:
            if not isinstance(term, Term):
                raise RewardError(f"{term!r} has no weight; write accuracy=0.5 or mean()=0.5")
            require_parts(term.part)
            require_number("weight", term.weight)

    async def __call__(self, result: EpisodeResult) -> Reward:
        rewards = await _rewards([term.part for term in self.terms], result)
        value = math.fsum(
            term.weight * reward.value for term, reward in zip(self.terms, rewards, strict=True)
        )
        return Reward(value, _merge_metrics(rewards))

    def bounds(self, result: EpisodeResult) -> _Bounds:
        """Return the bounds; a part with a negative weight has its own exchanged."""
        ends = [[term.weight * end for end in _bounds(term.part, result)] for term in self.terms]
        return math.fsum(map(min, ends)), math.fsum(map(max, ends))


def require_parts(*parts: object) -> None:
    """Refuse objects that are not aggregators."""
    for part in parts:
        if not callable(part):
            raise RewardError(f"an aggregator was expected, not {part!r}")


def require_number(name: str, value: Any, *, above: float | None = None) -> None:
    """Refuse values that are not finite numbers (above a bound)."""
    number = isinstance(value, int | float) and not isinstance(value, bool)
    if not number or not math.isfinite(value) or (above is not None and value <= above):
        bound = "" if above is None else f" above {above:g}"
        raise RewardError(f"{name} is a number{bound}, not {value!r}")


async def _rewards(parts: Sequence[RewardAggregator], result: EpisodeResult) -> list[Reward]:
    return [await _reward(part, result) for part in parts] if parts else all_scores(result)


async def _reward(part: RewardAggregator, result: EpisodeResult) -> Reward:
    """Return the reward of a part, which may be any aggregator or plain function."""
    name = object_name(part)
    return checked_reward(await call_function(part, result), name, f"aggregator {name!r}")


def _merge_metrics(rewards: Sequence[Reward]) -> Metrics:
    return {name: value for reward in rewards for name, value in reward.metrics.items()}


@dataclass(frozen=True)
class Penalty(_Bounded):
    """Subtracts something from a reward for how an episode went."""

    metric: ClassVar[str]

    reward: RewardAggregator = field(default_factory=Mean)
    """The reward to shape."""

    def __post_init__(self) -> None:
        require_parts(self.reward)
        for name in ("weight", "cap"):
            require_number(name, getattr(self, name, 0))

    async def __call__(self, result: EpisodeResult) -> Reward:
        penalty = self.penalty(result)
        reward = await _reward(self.reward, result)
        metrics = {**reward.metrics, f"reward/{self.metric}_penalty": penalty}
        return Reward(reward.value - penalty, metrics)

    def bounds(self, result: EpisodeResult) -> _Bounds:
        """Return the bounds of the inner reward, less what is subtracted."""
        low, high = _bounds(self.reward, result)
        penalty = self.penalty(result)
        return low - penalty, high - penalty

    @abstractmethod
    def penalty(self, result: EpisodeResult) -> float:
        """Return what is subtracted."""


@dataclass(frozen=True)
class _OverrunPenalty(Penalty):
    """Subtracts up to ``weight`` for what an episode spends beyond ``target``.

    Nothing up to the target, all of ``weight`` from twice the target on, linear between.
    """

    target: float = field(kw_only=True)
    """What an episode may spend at no cost."""

    weight: float = field(default=1.0, kw_only=True)
    """The maximum penalty."""

    def __post_init__(self) -> None:
        super().__post_init__()
        require_number("target", self.target, above=0)

    def penalty(self, result: EpisodeResult) -> float:
        """Return the penalty for what was spent."""
        return self.weight * min(1.0, max(0.0, self._spent(result) / self.target - 1.0))

    @abstractmethod
    def _spent(self, result: EpisodeResult) -> int: ...


class LengthPenalty(_OverrunPenalty):
    """Subtracts up to ``weight`` for tokens sampled beyond ``target``.

    Nothing up to the target, all of ``weight`` from twice the target on, linear between.
    """

    metric = "length"

    def _spent(self, result: EpisodeResult) -> int:
        return result.usage.output_tokens


class TurnPenalty(_OverrunPenalty):
    """Subtracts up to ``weight`` for turns (model calls) beyond ``target``, as `LengthPenalty`."""

    metric = "turns"

    def _spent(self, result: EpisodeResult) -> int:
        return result.turns


@dataclass(frozen=True)
class FormatPenalty(Penalty):
    """Subtracts ``weight`` when the final completion does not contain ``pattern``."""

    metric = "format"

    pattern: str = field(kw_only=True)
    r"""A Python regular expression to search for; ``.`` matches line ends, ``\A`` anchors."""

    weight: float = field(default=1.0, kw_only=True)
    """The penalty."""

    def __post_init__(self) -> None:
        super().__post_init__()
        try:
            re.compile(self.pattern, re.DOTALL)
        except (re.error, TypeError) as ex:
            raise RewardError(f"{self.pattern!r} is not a regular expression: {ex}") from ex

    def penalty(self, result: EpisodeResult) -> float:
        """Return the weight, or nothing if the pattern is there."""
        found = re.search(self.pattern, result.state.output.completion, re.DOTALL)
        return 0.0 if found else self.weight


@dataclass(frozen=True)
class ToolErrorPenalty(Penalty):
    """Subtracts ``weight`` per tool call that was answered with an error, at most ``cap``."""

    metric = "tool_errors"

    weight: float = field(default=0.1, kw_only=True)
    """Penalty per failed call."""

    cap: float = field(default=1.0, kw_only=True)
    """The maximum penalty."""

    def penalty(self, result: EpisodeResult) -> float:
        """Return the penalty for the failed calls."""
        errors = sum(
            isinstance(message, ChatMessageTool) and message.error is not None
            for message in result.state.messages
        )
        return min(self.cap, self.weight * errors)


@dataclass(frozen=True)
class MonitorPenalty(Penalty):
    """Adds a negative weight times the highest suspicion of each named monitor, from 0 to 1.

    A monitor that failed at any step leaves the episode without a reward; one that a limit cut off
    counts as certain, so that neither is a way around it.
    """

    metric = "monitors"

    weights: Mapping[str, float] = field(kw_only=True)
    """Weights by the name of a monitor, as in its metric ``monitor/NAME``."""

    def __post_init__(self) -> None:
        super().__post_init__()
        for name, weight in self.weights.items():
            require_number(f"monitor_penalty of {name!r}", weight)
            if weight > 0:
                raise RewardError(f"monitor_penalty of {name!r} is {weight}; it must be negative")

    async def __call__(self, result: EpisodeResult) -> Reward:
        for name in self.weights:
            if f"{MONITOR}{name}/flagged" not in result.metrics:  # which each monitor has
                raise UnscoredError(f"no monitor {name!r} watched the episode")
            if self._suspicion(result, name) is None:
                raise UnscoredError(f"the monitor {name!r} failed, so its penalty is not known")
        return await super().__call__(result)

    def penalty(self, result: EpisodeResult) -> float:
        """Return what is subtracted; all of it for a monitor that failed."""
        suspicions = {name: self._suspicion(result, name) for name in self.weights}
        return -math.fsum(
            weight * (1.0 if (suspicion := suspicions[name]) is None else suspicion)
            for name, weight in self.weights.items()
        )

    @staticmethod
    def _suspicion(result: EpisodeResult, name: str) -> float | None:
        """Return the suspicion of a monitor, from 0 to 1; ``None`` if the monitor has failed."""
        found = result.metrics.get(f"{MONITOR}{name}")
        if found is None or result.metrics.get(f"{MONITOR}{name}/failed"):
            return None
        if result.metrics.get(f"{MONITOR}{name}/unfinished"):
            return 1.0
        return min(1.0, max(0.0, found))


def weighted(*terms: Term, **scores: float) -> Weighted:
    """The weighted sum of scores by name (``accuracy=0.8``) and of other terms."""
    named = tuple(Term(ScoreReward(path), weight) for path, weight in scores.items())
    return Weighted((*terms, *named))


REWARD_AGGREGATORS: Mapping[str, Callable[..., RewardAggregator]] = {
    "mean": lambda *parts: Mean(parts),
    "weighted": weighted,
    "min": lambda *parts: Minimum(parts),
    "max": lambda *parts: Maximum(parts),
    "product": lambda *parts: Product(parts),
    "first": First,
    "length": LengthPenalty,
    "turns": TurnPenalty,
    "format": FormatPenalty,
    "tool_errors": ToolErrorPenalty,
    "monitored": lambda *reward, **weights: MonitorPenalty(*reward, weights=weights),
}
"""Built-in reward aggregators by name, each made of the arguments in an expression."""
