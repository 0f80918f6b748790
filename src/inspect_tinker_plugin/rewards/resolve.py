"""Turns an expression, an object or a function into the aggregator that scores episodes.

What users provide is called in bounded time, and its failures become one of two typed errors.
"""

from __future__ import annotations

import asyncio
import inspect
import threading
from collections.abc import Awaitable, Callable, Mapping, Sequence
from contextvars import copy_context
from dataclasses import dataclass
from typing import Any, ClassVar, Self
from weakref import WeakKeyDictionary

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
from inspect_tinker_plugin.contracts.wording import counted, first_error, object_name
from inspect_tinker_plugin.plugins.manager import build_from
from inspect_tinker_plugin.processes.loops import (
    contain,
    is_being_cancelled,
    raised_by,
    run_bounded,
    settle,
    wrap_cancelled,
)
from inspect_tinker_plugin.rewards.scores import ScoreReward, Term

DEFAULT_TIMEOUT = 60.0
"""Seconds that an aggregator may take for one episode."""

DEFAULT_GROUP_TIMEOUT = 600.0
"""Seconds that a group aggregator may take for one group; a judge may ask a model many times."""

_THREADS = 32
"""Maximum number of plain functions that run at once in one event loop."""

_places: WeakKeyDictionary[asyncio.AbstractEventLoop, asyncio.Semaphore] = WeakKeyDictionary()


class OutOfTimeError(Exception):
    """A function did not return in time."""


async def call_function(
    function: Callable[..., Any], *arguments: Any, timeout: float | None = None
) -> Any:
    """Call a plain or async function.

    A plain one runs in its own thread, so that it cannot block the loop. The thread of a function
    that never returns is left behind, and does not keep the process from ending. An async one runs
    in the loop, where it may use objects that belong to the loop.

    Raises:
        OutOfTimeError: it did not return in time.
        RuntimeError: it raised something that would end more than itself (``SystemExit``, a
            cancellation that nobody asked for).
    """
    method = getattr(function, "__call__", None)  # noqa: B004 - the method itself, to look at
    if inspect.iscoroutinefunction(function) or inspect.iscoroutinefunction(method):
        answer = function(*arguments)
    else:
        places = _places.setdefault(asyncio.get_running_loop(), asyncio.Semaphore(_THREADS))
        async with places:
            answer = await _limit(_in_thread(function, arguments), timeout)
    if isinstance(answer, Awaitable):
        # In a separate task, so that a cancellation in it cancels nothing else.
        return await _limit(run_bounded(contain("it", answer), None), timeout)
    return answer


async def _limit(work: Awaitable[Any], timeout: float | None) -> Any:
    try:
        async with asyncio.timeout(timeout) as scope:
            return await work
    except TimeoutError as ex:
        if scope.expired():
            raise OutOfTimeError(f"gave nothing within {timeout:g} seconds") from ex
        raise
    except asyncio.CancelledError as ex:
        if is_being_cancelled():
            raise
        raise wrap_cancelled("it", ex) from ex


async def _in_thread(function: Callable[..., Any], arguments: tuple[Any, ...]) -> Any:
    """Run a plain function in a daemon thread: those of executors are waited for at exit."""
    answered: asyncio.Future[Any] = asyncio.get_running_loop().create_future()
    context = copy_context()

    def run() -> None:
        try:
            settle(answered, context.run(function, *arguments))
        except BaseException as ex:
            plain = isinstance(ex, Exception) and not isinstance(ex, StopIteration)
            settle(answered, error=ex if plain else raised_by("it", ex))

    threading.Thread(target=run, name=f"reward {object_name(function)}", daemon=True).start()
    return await answered


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
    """What it is, in messages."""

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
        return getattr(self.aggregator, "at_once", False) is True

    @classmethod
    def of(cls, spec: Any, timeout: float | None) -> Self:
        """Resolve an expression, an object or a function."""
        if isinstance(spec, cls):
            return spec
        if not isinstance(spec, str):
            _require_one_argument(spec, cls.role)
            return cls(spec, spec, timeout)
        built = build_from(cls.hook, spec, **cls.terms)
        try:  # plugins are not typed at run time
            _require_one_argument(built.value, cls.role)
        except RewardError as ex:
            raise RewardError(f"{ex} (made by {spec!r}{built.origin})") from ex
        return cls(spec, built.value, timeout, built.origin)

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
            raise self._error(f"raised {first_error(ex)!r}") from ex

    def _check(self, answer: object) -> Reward:
        return checked_reward(answer, self.name, f"{self.role} {self.name!r}{self.origin}")

    def _error(self, problem: str) -> AggregatorError:
        text = f"{self.role} {self.name!r}{self.origin} {problem}"
        return AggregatorError(text, aggregator=self.name)


class ResolvedReward(_Resolved):
    """An aggregator that gives a finite number or one of two typed errors, in bounded time."""

    role = "reward"
    hook = "inspect_rl_reward_aggregators"
    terms: ClassVar[Mapping[str, Any]] = {"score": ScoreReward, "term": Term}

    async def __call__(self, result: EpisodeResult) -> Reward:
        """Return the reward of a finished episode.

        Raises:
            UnscoredError: a score that it needs is missing, unscored or not a number.
            AggregatorError: it raised, timed out, or its reward is not a finite number.
        """
        return self._check(await self._call(result))


class ResolvedGroupReward(_Resolved):
    """A group aggregator whose result is checked, in bounded time."""

    role = "group reward"
    hook = "inspect_rl_group_aggregators"

    @property
    def least(self) -> float:
        """The least reward that it says it gives; 0 where it says nothing."""
        return float(getattr(self.aggregator, "least", 0.0))

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
        rewards = [None if each is None else self._check(each) for each in answer]
        for index, (member, reward) in enumerate(zip(members, rewards, strict=True)):
            if member.failed and reward is not None:
                raise self._error(f"gave a reward to failed member {index}")
        return rewards


def resolve_reward(spec: RewardSpec, *, timeout: float | None = DEFAULT_TIMEOUT) -> ResolvedReward:
    """Turn what ``reward=`` takes into an aggregator.

    Args:
        spec: an expression (``"weighted(accuracy=0.8, format=0.2)"``), an aggregator object, or
            a plain or async function of an `EpisodeResult` that returns a number or a `Reward`.
        timeout: seconds that one episode's reward may take.

    Raises:
        ConfigError: an unknown name, a malformed expression, or an object that is no aggregator.
    """
    return ResolvedReward.of(spec, timeout)


def resolve_group_reward(
    spec: GroupRewardSpec, *, timeout: float | None = DEFAULT_GROUP_TIMEOUT
) -> ResolvedGroupReward:
    """Turn what ``group_reward=`` takes into a group aggregator.

    Args:
        spec: an expression (``"best_of(rest=-1)"``), an aggregator object, or a plain or async
            function of a sequence of `GroupMember` that returns a number, `Reward` or ``None``.
        timeout: seconds that one group's rewards may take.

    Raises:
        ConfigError: an unknown name, a malformed expression, or an object that is no aggregator.
    """
    return ResolvedGroupReward.of(spec, timeout)


def _require_one_argument(spec: object, role: str) -> None:
    """Refuse an object that cannot be called with one argument."""
    if not callable(spec) or isinstance(spec, type):
        raise RewardError(
            f"{role}: {spec!r:.80} is neither an expression, an aggregator nor a function"
        )
    try:
        inspect.signature(spec).bind(None)
    except ValueError:
        return  # a builtin without a signature
    except TypeError as ex:
        raise RewardError(f"{role}: {object_name(spec)} must take one argument: {ex}") from ex
