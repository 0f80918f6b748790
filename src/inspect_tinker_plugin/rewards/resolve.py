"""Turns an expression, an object or a function into the aggregator that scores episodes."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

from inspect_tinker_plugin.episode.types import EpisodeResult
from inspect_tinker_plugin.errors import RewardError
from inspect_tinker_plugin.expressions import ExpressionError, Language, build, origins
from inspect_tinker_plugin.plugins.manager import Plugins, default_plugins
from inspect_tinker_plugin.rewards.calling import (
    DEFAULT_GROUP_TIMEOUT,
    DEFAULT_TIMEOUT,
    OutOfTimeError,
    call_function,
    object_name,
    require_one_argument,
)
from inspect_tinker_plugin.rewards.combining import ScoreReward, Term
from inspect_tinker_plugin.rewards.contract import (
    AggregatorError,
    GroupAggregator,
    GroupFunction,
    GroupMember,
    GroupRewardSpec,
    Reward,
    RewardAggregator,
    RewardFunction,
    RewardSpec,
    UnscoredError,
    checked_reward,
)


class RewardExpressionError(ExpressionError, RewardError):
    """A reward expression has a fault; the message and the attributes say where."""

    subject = "reward expression"


@dataclass(frozen=True)
class ResolvedReward:
    """An aggregator that gives a finite number or one of two typed errors, in bounded time."""

    spec: RewardSpec
    """What was asked for; a string is resolved again in a worker process."""

    aggregator: RewardAggregator | RewardFunction
    """What it resolved to."""

    timeout: float | None = DEFAULT_TIMEOUT
    """Seconds for one episode, ``None`` for no bound."""

    origin: str = ""
    """Plugins that it comes from, for messages; empty for built-ins and for own objects."""

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
        return checked_reward(await _bounded(self, result), self.name, _described(self))

    def __reduce__(self) -> tuple[Any, ...]:
        return _resolve_again, (resolve_reward, self.spec, self.timeout)


@dataclass(frozen=True)
class ResolvedGroupReward:
    """A group aggregator whose answer is checked, in bounded time."""

    spec: GroupRewardSpec
    """What was asked for; a string is resolved again in a worker process."""

    aggregator: GroupAggregator | GroupFunction
    """What it resolved to."""

    timeout: float | None = DEFAULT_GROUP_TIMEOUT
    """Seconds for one group, ``None`` for no bound."""

    origin: str = ""
    """Plugins that it comes from, for messages; empty for built-ins and for own objects."""

    @property
    def name(self) -> str:
        """The expression, or the name of the object or function."""
        return self.spec if isinstance(self.spec, str) else object_name(self.spec)

    async def __call__(self, members: Sequence[GroupMember]) -> list[Reward | None]:
        """Give the final reward of each member, ``None`` where its own one stands.

        Raises:
            AggregatorError: it raised, timed out, gave another number of rewards, a reward
                that is not finite, or one for a member that failed.
        """
        answer = await _bounded(self, tuple(members))
        listed = isinstance(answer, Sequence) and not isinstance(answer, str | bytes)
        if not listed or len(answer) != len(members):
            what = f"{len(answer)} rewards" if listed else f"{answer!r:.80}"
            raise _error(self, f"gave {what} for {len(members)} members, not a reward each")
        rewards = [
            None if a is None else checked_reward(a, self.name, _described(self)) for a in answer
        ]
        for index, (member, reward) in enumerate(zip(members, rewards, strict=True)):
            if member.failed and reward is not None:
                raise _error(self, f"gave a reward to failed member {index}")
        return rewards

    def __reduce__(self) -> tuple[Any, ...]:
        return _resolve_again, (resolve_group_reward, self.spec, self.timeout)


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
    if isinstance(spec, ResolvedReward):
        return spec
    if isinstance(spec, str):
        language = _reward_language(plugins or default_plugins())
        built = build(spec, language)
        origin = origins(spec, language)
        _require_aggregator(built, "reward", spec, origin)
        return ResolvedReward(spec, built, timeout, origin)
    require_one_argument(spec, "reward")
    return ResolvedReward(spec, spec, timeout)


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
    if isinstance(spec, ResolvedGroupReward):
        return spec
    if isinstance(spec, str):
        language = _group_language(plugins or default_plugins())
        built = build(spec, language)
        origin = origins(spec, language)
        _require_aggregator(built, "group reward", spec, origin)
        return ResolvedGroupReward(spec, built, timeout, origin)
    require_one_argument(spec, "group reward")
    return ResolvedGroupReward(spec, spec, timeout)


def _reward_language(plugins: Plugins) -> Language:
    catalogue = plugins.catalogue("inspect_rl_reward_aggregators")
    return Language(
        catalogue.entries,
        noun="aggregator",
        error=RewardExpressionError,
        score=ScoreReward,
        term=Term,
        clashes=catalogue.clashes,
        broken=catalogue.broken,
        origins=catalogue.origins,
    )


def _group_language(plugins: Plugins) -> Language:
    catalogue = plugins.catalogue("inspect_rl_group_aggregators")
    return Language(
        catalogue.entries,
        noun="group aggregator",
        error=RewardExpressionError,
        clashes=catalogue.clashes,
        broken=catalogue.broken,
        origins=catalogue.origins,
    )


def _require_aggregator(built: object, role: str, expression: str, origin: str) -> None:
    """Refuse a factory's product that cannot be called; plugins are not typed at run time."""
    try:
        require_one_argument(built, role)
    except RewardError as ex:
        raise RewardError(f"{ex} (made by {expression!r}{origin})") from ex


async def _bounded(resolved: ResolvedReward | ResolvedGroupReward, argument: Any) -> Any:
    """Call the aggregator; whatever it raises becomes one of the two typed errors."""
    try:
        return await call_function(resolved.aggregator, argument, timeout=resolved.timeout)
    except (UnscoredError, AggregatorError):
        raise
    except OutOfTimeError as ex:
        raise _error(resolved, str(ex)) from ex
    except Exception as ex:
        raise _error(resolved, f"raised {_first(ex)!r}") from ex


def _first(ex: Exception) -> BaseException:
    """The first error inside an exception group, whose own text says nothing."""
    inner: BaseException = ex
    while isinstance(inner, BaseExceptionGroup):
        inner = inner.exceptions[0]
    return inner


def _described(resolved: ResolvedReward | ResolvedGroupReward) -> str:
    return f"reward {resolved.name!r}{resolved.origin}"


def _error(resolved: ResolvedReward | ResolvedGroupReward, problem: str) -> AggregatorError:
    return AggregatorError(f"{_described(resolved)} {problem}", aggregator=resolved.name)


def _resolve_again(resolve: Callable[..., Any], spec: Any, timeout: float | None) -> Any:
    return resolve(spec, timeout=timeout)
