"""The contract of reward aggregators: what turns a finished episode into a reward, and its errors.

The errors that an aggregator may raise::

    InspectRLError
    ├── UnscoredError        a score that it needs is absent, NaN, unscored or no number
    └── AggregatorError      it raised, timed out or gave no finite number
"""

from __future__ import annotations

import math
from collections.abc import Awaitable, Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from numbers import Real
from typing import Any, Protocol, TypeAlias, runtime_checkable

from inspect_tinker_plugin.contracts.episodes import EpisodeResult, Metrics
from inspect_tinker_plugin.contracts.errors import InspectRLError


@dataclass(frozen=True)
class Reward:
    """One number for the trainer, and the metrics that explain it."""

    value: float
    """The reward; finite."""

    metrics: Metrics = field(default_factory=dict)
    """Numbers by name, such as ``score/accuracy`` or ``reward/length_penalty``."""


@runtime_checkable
class RewardAggregator(Protocol):
    """Turns one finished episode into its reward.

    It sees the scores, the final state, the limit, turns, tokens and the sample. It
    travels inside picklable builders, so keep it a frozen dataclass or a module-level function.
    """

    async def __call__(self, result: EpisodeResult, /) -> Reward:
        """Return the reward of ``result``.

        Raises:
            UnscoredError: a score that the reward is made of is not a number.
        """
        ...


RewardFunction: TypeAlias = Callable[
    [EpisodeResult], "Reward | float | Awaitable[Reward] | Awaitable[float]"
]
"""A plain or async function that serves as an aggregator."""


@dataclass(frozen=True)
class GroupMember:
    """One episode of a group, as a group aggregator sees it."""

    result: EpisodeResult | None
    """How the episode ended; ``None`` when it never came to an end."""

    reward: Reward | None
    """The member's own reward; ``None`` when the episode failed."""

    @property
    def failed(self) -> bool:
        """Whether there is nothing to compare: no result, an error, or no reward."""
        return self.result is None or self.reward is None or self.result.error is not None


@runtime_checkable
class GroupAggregator(Protocol):
    """Turns a whole group of episodes of one sample into their final rewards.

    One that gives rewards below 0 says how low in an attribute ``least`` (a float): the price of an
    episode whose policy made its sandbox fail is not above it.
    """

    async def __call__(self, members: Sequence[GroupMember], /) -> Sequence[Reward | None]:
        """Return the final reward of each member, in order.

        The reward *replaces* the member's own (start from ``member.reward`` to add to it).
        ``None`` leaves a member as it is, and is the only valid value for a failed one.
        """
        ...


class UnscoredError(InspectRLError):
    """A score that the reward needs is missing or not a number; never a silent zero.

    Attributes:
        scorer: name of the score concerned, ``None`` when there was no score at all.
        key: key of a dict score, when it is one key that is missing or not a number.
    """

    def __init__(self, message: str, *, scorer: str | None = None, key: str | None = None) -> None:
        super().__init__(message)
        self.scorer = scorer
        self.key = key


class AggregatorError(InspectRLError):
    """An aggregator raised, timed out, or returned something that is not a finite number.

    Attributes:
        aggregator: its expression or name.
    """

    def __init__(self, message: str, *, aggregator: str) -> None:
        super().__init__(message)
        self.aggregator = aggregator


def checked_reward(answer: object, name: str, described: str) -> Reward:
    """Accept what an aggregator returned: a finite number, or a `Reward` with numeric metrics.

    Args:
        answer: the returned value.
        name: the aggregator.
        described: the aggregator for messages, with the plugin that it comes from.

    Raises:
        AggregatorError: it is something else.
    """

    def refused(what: object, wanted: str) -> AggregatorError:
        return AggregatorError(f"{described} gave {what!r:.80}, not {wanted}", aggregator=name)

    reward = Reward(answer) if isinstance(answer, Real) else answer  # type: ignore[arg-type]  # numpy's numbers, too
    if not isinstance(reward, Reward):
        raise refused(answer, "a number or a Reward")
    try:
        finite = isinstance(reward.value, Real) and math.isfinite(reward.value)
    except (OverflowError, ValueError, TypeError):  # an integer that is too large, say
        finite = False
    if not finite:
        raise refused(reward.value, "a finite number")
    metrics: object = reward.metrics
    if not isinstance(metrics, Mapping) or not all(
        isinstance(key, str) and isinstance(value, Real) for key, value in metrics.items()
    ):
        raise refused(metrics, "metrics: numbers by name")
    if type(reward.value) is float and type(metrics) is dict:
        return reward
    return replace(reward, value=float(reward.value), metrics=dict(metrics))


RewardSpec = str | RewardAggregator | RewardFunction
"""What ``reward=`` takes: an expression, an aggregator, or a plain (async) function."""


GroupFunction = Callable[[Sequence[GroupMember]], Any]
"""A plain or async function that serves as a group aggregator."""


GroupRewardSpec = str | GroupAggregator | GroupFunction
"""What ``group_reward=`` takes: an expression, an aggregator, or a plain (async) function."""
