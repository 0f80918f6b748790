"""Turns an expression, an object or a function into the aggregator that an episode's end calls."""

from __future__ import annotations

import asyncio
import difflib
import inspect
import math
from collections.abc import Awaitable, Callable, Mapping
from dataclasses import dataclass
from typing import Any

from inspect_tinker_plugin.episode.types import EpisodeResult
from inspect_tinker_plugin.errors import RewardError
from inspect_tinker_plugin.rewards.builtin import REWARD_AGGREGATORS, RewardFactory
from inspect_tinker_plugin.rewards.combining import ScoreReward, Term
from inspect_tinker_plugin.rewards.contract import (
    AggregatorError,
    Reward,
    RewardAggregator,
    RewardFunction,
    UnscoredError,
)
from inspect_tinker_plugin.rewards.expression import (
    Argument,
    Call,
    Literal,
    Node,
    RewardExpressionError,
    ScoreRef,
    parse,
)

RewardSpec = str | RewardAggregator | RewardFunction
"""What ``reward=`` takes: an expression, an aggregator, or a plain (async) function."""

DEFAULT_TIMEOUT = 60.0
"""Seconds that an aggregator may take for one episode."""


@dataclass(frozen=True)
class ResolvedReward:
    """An aggregator that gives a finite number or one of two typed errors, in bounded time."""

    spec: RewardSpec
    """What was asked for; a string is resolved again in a worker process."""

    aggregator: RewardAggregator | RewardFunction
    """What it resolved to."""

    timeout: float | None = DEFAULT_TIMEOUT
    """Seconds for one episode, ``None`` for no bound."""

    @property
    def name(self) -> str:
        """The expression, or the name of the object or function."""
        return self.spec if isinstance(self.spec, str) else object_name(self.spec)

    async def __call__(self, result: EpisodeResult) -> Reward:
        """Give the reward of a finished episode.

        Raises:
            UnscoredError: a score that it needs is absent, unscored or not a number.
            AggregatorError: it raised, timed out, or its reward is not a finite number.
        """
        try:
            async with asyncio.timeout(self.timeout) as scope:
                answer = await call_plain(self.aggregator, result)
        except UnscoredError:
            raise
        except TimeoutError as ex:
            if scope.expired():
                raise self._error(f"gave no reward within {self.timeout:g} seconds") from ex
            raise self._error(f"raised {ex!r}") from ex
        except Exception as ex:
            raise self._error(f"raised {ex!r}") from ex
        return self._checked(answer)

    def _checked(self, answer: object) -> Reward:
        reward = answer if isinstance(answer, Reward) else None
        if isinstance(answer, int | float):
            reward = Reward(float(answer))
        if reward is None:
            raise self._error(f"gave {answer!r:.80}, not a number or a Reward")
        if not isinstance(reward.value, int | float) or not math.isfinite(reward.value):
            raise self._error(f"gave {reward.value!r:.80}, not a finite number")
        return reward

    def _error(self, problem: str) -> AggregatorError:
        return AggregatorError(f"reward {self.name!r} {problem}", aggregator=self.name)

    def __reduce__(self) -> tuple[Any, ...]:
        return _resolve_with_timeout, (self.spec, self.timeout)


def _resolve_with_timeout(spec: RewardSpec, timeout: float | None) -> ResolvedReward:
    return resolve_reward(spec, timeout=timeout)


def resolve_reward(
    spec: RewardSpec,
    *,
    timeout: float | None = DEFAULT_TIMEOUT,
    aggregators: Mapping[str, RewardFactory] | None = None,
) -> ResolvedReward:
    """Turn what ``reward=`` takes into an aggregator.

    Args:
        spec: an expression (``"weighted(accuracy=0.8, format=0.2)"``), an aggregator object, or
            a plain or async function of an `EpisodeResult` that gives a number or a `Reward`.
        timeout: seconds that one episode's reward may take.
        aggregators: factories by name; the built-in and installed ones when not given.

    Raises:
        RewardError: an unknown name, a malformed expression, or an object that is no aggregator.
    """
    if isinstance(spec, ResolvedReward):
        return spec
    if isinstance(spec, str):
        known = installed_aggregators() if aggregators is None else aggregators
        return ResolvedReward(spec, build(spec, known), timeout)
    require_one_argument(spec, "reward")
    return ResolvedReward(spec, spec, timeout)


def installed_aggregators() -> Mapping[str, RewardFactory]:
    """Every reward aggregator by name, those of installed packages included."""
    return REWARD_AGGREGATORS


def build(expression: str, aggregators: Mapping[str, Callable[..., Any]]) -> Any:
    """Build what an expression describes from factories by name.

    Raises:
        RewardError: the expression is malformed, or does not fit a factory.
    """
    return _Builder(expression, aggregators).node(parse(expression))


class _Builder:
    """Turns the tree of one expression into objects."""

    def __init__(self, expression: str, factories: Mapping[str, Callable[..., Any]]) -> None:
        self._expression = expression
        self._factories = factories

    def node(self, node: Node) -> Any:
        if isinstance(node, Literal):
            return node.value
        if isinstance(node, ScoreRef):
            return ScoreReward(node.path)
        return self._call(node)

    def _call(self, call: Call) -> Any:
        factory = self._factories.get(call.name)
        if factory is None:
            raise self._fault(self._unknown(call.name), call.start, call.start + len(call.name))
        positional = [self._positional(a) for a in call.arguments if a.key is None]
        named: dict[str, Any] = {}
        for argument in call.arguments:
            if argument.key is None:
                continue
            if argument.key in named:
                at = argument.value
                raise self._fault(f"{argument.key!r} is given twice", at.start, at.end)
            named[argument.key] = self.node(argument.value)
        try:
            inspect.signature(factory).bind(*positional, **named)
            return factory(*positional, **named)
        except RewardExpressionError:
            raise
        except (TypeError, ValueError) as ex:
            raise self._fault(f"{call.name}: {ex}", call.start, call.end) from ex

    def _positional(self, argument: Argument) -> Any:
        value = self.node(argument.value)
        return value if argument.weight is None else Term(value, float(argument.weight.value))

    def _unknown(self, name: str) -> str:
        close = difflib.get_close_matches(name, self._factories, n=1)
        hint = f"did you mean {close[0]!r}? " if close else ""
        return (
            f"unknown aggregator {name!r} ({hint}known: {', '.join(sorted(self._factories))}; "
            f"a scorer is written score:{name})"
        )

    def _fault(self, problem: str, start: int, end: int) -> RewardExpressionError:
        return RewardExpressionError(problem, expression=self._expression, start=start, end=end)


async def call_plain(function: Callable[..., Any], *arguments: Any) -> Any:
    """Call a plain or async function; a plain one in a thread, so that it cannot stall the loop."""
    if _is_async(function):
        return await function(*arguments)
    answer = await asyncio.to_thread(function, *arguments)
    return await answer if isinstance(answer, Awaitable) else answer


def require_one_argument(spec: object, role: str) -> None:
    """Refuse what cannot be called with one argument.

    Raises:
        RewardError: it is not callable, or takes other arguments.
    """
    if not callable(spec) or isinstance(spec, type):
        raise RewardError(
            f"{role}: {spec!r:.80} is neither an expression, an aggregator nor a function"
        )
    try:
        inspect.signature(spec).bind(None)
    except TypeError as ex:
        raise RewardError(f"{role}: {object_name(spec)} must take one argument: {ex}") from ex
    except ValueError:
        pass  # a builtin without a signature


def object_name(spec: object) -> str:
    """Name a function or an object for messages."""
    return getattr(spec, "__qualname__", None) or type(spec).__qualname__


def _is_async(function: Callable[..., Any]) -> bool:
    return inspect.iscoroutinefunction(function) or inspect.iscoroutinefunction(
        getattr(function, "__call__", None)  # noqa: B004 - the method itself, to look at
    )
