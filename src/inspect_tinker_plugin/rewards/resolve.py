"""Turns an expression, an object or a function into the aggregator that scores episodes.

Also tells the least reward that an aggregator can give, which is the price of a broken sandbox.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, ClassVar, Self

from inspect_tinker_plugin.contracts.episodes import EpisodeResult
from inspect_tinker_plugin.contracts.errors import RewardError
from inspect_tinker_plugin.contracts.rewards import (
    AggregatorError,
    GroupMember,
    GroupRewardSpec,
    Reward,
    RewardSpec,
    UnscoredError,
    checked_reward,
)
from inspect_tinker_plugin.contracts.wording import counted
from inspect_tinker_plugin.plugins.expressions import ExpressionError, build, origins
from inspect_tinker_plugin.plugins.manager import Plugins, default_plugins
from inspect_tinker_plugin.rewards.builtin import (
    Maximum,
    Mean,
    Minimum,
    Penalty,
    Product,
    Term,
    Weighted,
    only_reads_scores,
)
from inspect_tinker_plugin.rewards.calling import (
    DEFAULT_GROUP_TIMEOUT,
    DEFAULT_TIMEOUT,
    OutOfTimeError,
    call_function,
    object_name,
    require_one_argument,
)
from inspect_tinker_plugin.rewards.scores import ScoreReward


class RewardExpressionError(ExpressionError, RewardError):
    """A reward expression has a fault; the message and the attributes say where."""

    subject = "reward expression"


@dataclass(frozen=True)
class _Resolved:
    """An aggregator that is called in bounded time and whose errors have one of two types."""

    spec: Any
    """The caller's value; a string is resolved again in a worker process."""

    aggregator: Callable[..., Any]
    """The aggregator or function that it was resolved to."""

    timeout: float | None
    """Seconds for one call, ``None`` for no bound."""

    origin: str = ""
    """Plugins that it comes from, for messages; empty for built-ins and for own objects."""

    role: ClassVar[str]
    noun: ClassVar[str]
    """What it is, and what a name in an expression is, in messages."""

    hook: ClassVar[str]
    """The hook under which plugins provide it."""

    terms: ClassVar[Mapping[str, Any]] = {}
    """What its expressions have beside calls: scores and weights."""

    @property
    def name(self) -> str:
        """The expression, or the name of the object or function."""
        return self.spec if isinstance(self.spec, str) else object_name(self.spec)

    @property
    def at_once(self) -> bool:
        """Whether it answers without waiting for anything, and so needs no bound."""
        return only_reads_scores(self.aggregator)

    @classmethod
    def of(cls, spec: Any, timeout: float | None, plugins: Plugins | None = None) -> Self:
        """Resolve an expression, an object or a function."""
        if isinstance(spec, cls):
            return spec
        if not isinstance(spec, str):
            require_one_argument(spec, cls.role)
            return cls(spec, spec, timeout)
        catalogue = (plugins or default_plugins()).catalogue(cls.hook)
        language = catalogue.language(cls.noun, RewardExpressionError, **cls.terms)
        built = build(spec, language)
        origin = origins(spec, language)
        try:  # plugins are not typed at run time
            require_one_argument(built, cls.role)
        except RewardError as ex:
            raise RewardError(f"{ex} (made by {spec!r}{origin})") from ex
        return cls(spec, built, timeout, origin)

    def __reduce__(self) -> tuple[Any, ...]:
        return type(self).of, (self.spec, self.timeout)

    async def _call(self, argument: Any) -> Any:
        """Call the aggregator; its exceptions become one of the two typed errors."""
        try:
            if self.at_once:
                return await self.aggregator(argument)
            return await call_function(self.aggregator, argument, timeout=self.timeout)
        except (UnscoredError, AggregatorError):
            raise
        except OutOfTimeError as ex:
            raise self._error(str(ex)) from ex
        except Exception as ex:
            raise self._error(f"raised {_first(ex)!r}") from ex

    def _checked(self, answer: object) -> Reward:
        return checked_reward(answer, self.name, f"reward {self.name!r}{self.origin}")

    def _error(self, problem: str) -> AggregatorError:
        return AggregatorError(f"reward {self.name!r}{self.origin} {problem}", aggregator=self.name)


class ResolvedReward(_Resolved):
    """An aggregator that gives a finite number or one of two typed errors, in bounded time."""

    role = "reward"
    noun = "aggregator"
    hook = "inspect_rl_reward_aggregators"
    terms: ClassVar[Mapping[str, Any]] = {"score": ScoreReward, "term": Term}

    async def __call__(self, result: EpisodeResult) -> Reward:
        """Return the reward of a finished episode.

        Raises:
            UnscoredError: a score that it needs is missing, unscored or not a number.
            AggregatorError: it raised, timed out, or its reward is not a finite number.
        """
        return self._checked(await self._call(result))


class ResolvedGroupReward(_Resolved):
    """A group aggregator whose result is checked, in bounded time."""

    role = "group reward"
    noun = "group aggregator"
    hook = "inspect_rl_group_aggregators"

    async def __call__(self, members: Sequence[GroupMember]) -> list[Reward | None]:
        """Return the final reward of each member, ``None`` where its own one is kept.

        Raises:
            AggregatorError: it raised, timed out, or returned a wrong number of rewards, a reward
                that is not finite, or one for a member that failed.
        """
        answer = await self._call(tuple(members))
        listed = isinstance(answer, Sequence) and not isinstance(answer, str | bytes)
        if not listed or len(answer) != len(members):
            what = counted(len(answer), "reward") if listed else f"{answer!r:.80}"
            of = counted(len(members), "member")
            raise self._error(f"gave {what} for {of}, not a reward each")
        rewards = [None if each is None else self._checked(each) for each in answer]
        for index, (member, reward) in enumerate(zip(members, rewards, strict=True)):
            if member.failed and reward is not None:
                raise self._error(f"gave a reward to failed member {index}")
        return rewards


def resolve_reward(
    spec: RewardSpec,
    *,
    timeout: float | None = DEFAULT_TIMEOUT,
    plugins: Plugins | None = None,
) -> ResolvedReward:
    """Turn what ``reward=`` takes into an aggregator.

    Args:
        spec: an expression (``"weighted(accuracy=0.8, format=0.2)"``), an aggregator object, or
            a plain or async function of an `EpisodeResult` that returns a number or a `Reward`.
        timeout: seconds that one episode's reward may take.
        plugins: where names are looked up; the installed plugins when not given.

    Raises:
        RewardError: an unknown name, a malformed expression, or an object that is no aggregator.
    """
    return ResolvedReward.of(spec, timeout, plugins)


def resolve_group_reward(
    spec: GroupRewardSpec,
    *,
    timeout: float | None = DEFAULT_GROUP_TIMEOUT,
    plugins: Plugins | None = None,
) -> ResolvedGroupReward:
    """Turn what ``group_reward=`` takes into a group aggregator.

    Args:
        spec: an expression (``"best_of(rest=-1)"``), an aggregator object, or a plain or async
            function of a sequence of `GroupMember` that returns a number, `Reward` or ``None``.
        timeout: seconds that one group's rewards may take.
        plugins: where names are looked up; the installed plugins when not given.

    Raises:
        RewardError: an unknown name, a malformed expression, or an object that is no aggregator.
    """
    return ResolvedGroupReward.of(spec, timeout, plugins)


def _first(ex: Exception) -> BaseException:
    """Return the first error inside an exception group, whose own text says nothing."""
    inner: BaseException = ex
    while isinstance(inner, BaseExceptionGroup):
        inner = inner.exceptions[0]
    return inner


_SCORE = (0.0, 1.0)
"""Worst and best value of a score, and of an aggregator that is not built in. For scores below 0
the other episodes see to it (``FailureCounts.shortfall``, and the group's least reward)."""


def least_reward(aggregator: object, result: EpisodeResult) -> float:
    """Return the price of an episode whose policy made its sandbox fail; at most 0.

    Its scores count as their worst, and the reward is shaped like any other: by the format of what
    was said, its length, its turns. So breaking the sandbox never pays more than a wrong answer.
    """
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
