"""The aggregators that ship with the package, by the names that expressions use.

Some read scores and combine rewards, such as ``mean`` and ``weighted``; others subtract penalties
from a reward (length, turns, format, tool errors). A penalty never hides a failure: when the inner
reward cannot be computed, neither can this one.
"""

from __future__ import annotations

import math
import re
from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, ClassVar

from inspect_ai.model import ChatMessageTool

from inspect_tinker_plugin.contracts.episodes import EpisodeResult, Metrics
from inspect_tinker_plugin.contracts.errors import RewardError
from inspect_tinker_plugin.contracts.rewards import Reward, RewardAggregator, checked_reward
from inspect_tinker_plugin.rewards.calling import call_function, object_name
from inspect_tinker_plugin.rewards.scores import ScoreReward, all_scores, score_names


@dataclass(frozen=True)
class _OfParts(ABC):
    """One number for all of its parts."""

    parts: tuple[RewardAggregator, ...] = ()
    """Rewards to combine; empty for all scores of the episode."""

    def __post_init__(self) -> None:
        require_parts(*self.parts)

    async def __call__(self, result: EpisodeResult) -> Reward:
        rewards = await _rewards(self.parts, result)
        return Reward(self._value([reward.value for reward in rewards]), _merged(rewards))

    @abstractmethod
    def _value(self, values: Sequence[float]) -> float: ...


@dataclass(frozen=True)
class Mean(_OfParts):
    """The mean of its parts; without parts, of all scores."""

    def _value(self, values: Sequence[float]) -> float:
        return math.fsum(values) / len(values)


@dataclass(frozen=True)
class Minimum(_OfParts):
    """The least of its parts; without parts, of all scores."""

    def _value(self, values: Sequence[float]) -> float:
        return min(values)


@dataclass(frozen=True)
class Maximum(_OfParts):
    """The greatest of its parts; without parts, of all scores."""

    def _value(self, values: Sequence[float]) -> float:
        return max(values)


@dataclass(frozen=True)
class Product(_OfParts):
    """The product of its parts; without parts, of all scores."""

    def _value(self, values: Sequence[float]) -> float:
        return math.prod(values)


def only_reads_scores(aggregator: object) -> bool:
    """Whether an aggregator runs nothing that somebody else has written."""
    return type(aggregator) is ScoreReward or (
        type(aggregator) in (Mean, Minimum, Maximum, Product)
        and not getattr(aggregator, "parts", ())
    )


@dataclass(frozen=True)
class First:
    """The first score, in the order of the task's scorers; the others are not looked at."""

    async def __call__(self, result: EpisodeResult) -> Reward:
        first = next(iter(score_names(result)), None)
        if first is None:
            return all_scores(result)[0]  # raises if there is none
        return ScoreReward(first).read(result)


@dataclass(frozen=True)
class Term:
    """A part of a weighted sum."""

    part: RewardAggregator
    """The reward that is weighted."""

    weight: float
    """Its factor; may be negative. Weights are used as they are, not normalised."""


@dataclass(frozen=True)
class Weighted:
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
        rewards = await _rewards(tuple(term.part for term in self.terms), result)
        value = math.fsum(
            term.weight * reward.value for term, reward in zip(self.terms, rewards, strict=True)
        )
        return Reward(value, _merged(rewards))


async def part_reward(part: RewardAggregator, result: EpisodeResult) -> Reward:
    """Return the reward of a part, which may be any aggregator or plain function.

    Raises:
        AggregatorError: it returned no finite number.
    """
    answer = await call_function(part, result)
    name = object_name(part)
    return checked_reward(answer, name, f"aggregator {name!r}")


def require_parts(*parts: object) -> None:
    """Refuse objects that are not aggregators.

    Raises:
        RewardError: one of ``parts`` cannot be called.
    """
    for part in parts:
        if not callable(part):
            raise RewardError(f"an aggregator was expected, not {part!r}")


def require_number(name: str, value: Any, *, above: float | None = None) -> None:
    """Refuse values that are not finite numbers (above a bound).

    Raises:
        RewardError: ``value`` is something else.
    """
    number = isinstance(value, int | float) and not isinstance(value, bool)
    if not number or not math.isfinite(value) or (above is not None and value <= above):
        bound = "" if above is None else f" above {above:g}"
        raise RewardError(f"{name} is a number{bound}, not {value!r}")


async def _rewards(parts: Sequence[RewardAggregator], result: EpisodeResult) -> list[Reward]:
    if not parts:
        return all_scores(result)
    return [await part_reward(part, result) for part in parts]


def _merged(rewards: Sequence[Reward]) -> Metrics:
    return {name: value for reward in rewards for name, value in reward.metrics.items()}


@dataclass(frozen=True)
class Penalty(ABC):
    """Subtracts something from a reward for how an episode went."""

    metric: ClassVar[str]

    reward: RewardAggregator = field(default_factory=Mean)
    """The reward to shape."""

    def __post_init__(self) -> None:
        require_parts(self.reward)

    async def __call__(self, result: EpisodeResult) -> Reward:
        penalty = self.penalty(result)
        reward = await part_reward(self.reward, result)
        metrics = {**reward.metrics, f"reward/{self.metric}_penalty": penalty}
        return Reward(reward.value - penalty, metrics)

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
        require_number("weight", self.weight)

    def penalty(self, result: EpisodeResult) -> float:
        """Return the penalty for what was spent."""
        return self.weight * _overrun(self._spent(result), self.target)

    @abstractmethod
    def _spent(self, result: EpisodeResult) -> int: ...


@dataclass(frozen=True)
class LengthPenalty(_OverrunPenalty):
    """Subtracts up to ``weight`` for tokens sampled beyond ``target``.

    Nothing up to the target, all of ``weight`` from twice the target on, linear between.
    """

    metric = "length"

    def _spent(self, result: EpisodeResult) -> int:
        return result.usage.output_tokens


@dataclass(frozen=True)
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
        require_number("weight", self.weight)
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

    def __post_init__(self) -> None:
        super().__post_init__()
        require_number("weight", self.weight)
        require_number("cap", self.cap)

    def penalty(self, result: EpisodeResult) -> float:
        """Return the penalty for the failed calls."""
        errors = sum(
            isinstance(message, ChatMessageTool) and message.error is not None
            for message in result.state.messages
        )
        return min(self.cap, self.weight * errors)


def _overrun(amount: float, target: float) -> float:
    return min(1.0, max(0.0, amount / target - 1.0))


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
