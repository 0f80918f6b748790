"""Group aggregators: final rewards from a whole group of episodes (rank, pairwise, best of …).

All of them leave failed members unchanged, and compare only members with a reward.
"""

from __future__ import annotations

import asyncio
import importlib
import itertools
import math
import re
from collections.abc import Awaitable, Callable, Mapping, Sequence
from dataclasses import dataclass

from inspect_tinker_plugin.contracts.episodes import EpisodeResult
from inspect_tinker_plugin.contracts.errors import RewardError
from inspect_tinker_plugin.contracts.rewards import (
    AggregatorError,
    GroupAggregator,
    GroupMember,
    Reward,
)
from inspect_tinker_plugin.rewards.builtin import require_number
from inspect_tinker_plugin.rewards.calling import (
    DEFAULT_GROUP_TIMEOUT,
    call_function,
    object_name,
)

Judge = Callable[[EpisodeResult, EpisodeResult], "float | Awaitable[float]"]
"""How much better the first episode is than the second: 1 (it wins) to 0 (it loses)."""


@dataclass(frozen=True)
class Rank:
    """The rank of a member's own reward in its group: 1 for the best, 0 for the worst.

    Ties share the mean of their ranks. A member with nobody to compare with gets 0.5.
    """

    async def __call__(self, members: Sequence[GroupMember]) -> list[Reward | None]:
        standing = [m.reward.value for m in members if m.reward is not None and not m.failed]

        def rank(value: float) -> float:
            if len(standing) < 2:
                return 0.5
            below = sum(other < value for other in standing)
            ties = sum(other == value for other in standing) - 1
            return (below + ties / 2) / (len(standing) - 1)

        return [
            None if m.failed or m.reward is None else _replaced(m.reward, rank(m.reward.value))
            for m in members
        ]


@dataclass(frozen=True)
class BestOf:
    """The best member keeps its reward (so do ties); the others get ``rest``."""

    rest: float = 0.0
    """Reward of the members that are not the best."""

    def __post_init__(self) -> None:
        require_number("rest", self.rest)

    async def __call__(self, members: Sequence[GroupMember]) -> list[Reward | None]:
        own = [m.reward.value for m in members if m.reward is not None and not m.failed]
        best = max(own, default=0.0)
        return [
            None
            if m.failed or m.reward is None
            else _replaced(m.reward, best if m.reward.value == best else self.rest)
            for m in members
        ]


@dataclass(frozen=True)
class Diversity:
    """Adds ``weight`` × how different a member's final completion is from the others'.

    The difference of two completions is the share of their distinct lower-case words that only
    one of them has (the Jaccard distance), 0 to 1; a member's is the mean over the others.
    """

    weight: float = 0.1
    """Maximum that is added."""

    def __post_init__(self) -> None:
        require_number("weight", self.weight)

    async def __call__(self, members: Sequence[GroupMember]) -> list[Reward | None]:
        words = {
            index: _words(m.result)
            for index, m in enumerate(members)
            if m.result is not None and not m.failed
        }
        rewards: list[Reward | None] = []
        for index, member in enumerate(members):
            if index not in words or member.reward is None:
                rewards.append(None)
                continue
            others = [_distance(words[index], words[i]) for i in words if i != index]
            novelty = math.fsum(others) / len(others) if others else 0.0
            value = member.reward.value + self.weight * novelty
            rewards.append(_replaced(member.reward, value, diversity=novelty))
        return rewards


@dataclass(frozen=True)
class Pairwise:
    """The mean of a judge's verdicts on a member against each of the others.

    Every pair is judged once (in group order), or in both orders, which evens out a judge's
    preference for a position. A member with nobody to compare with gets 0.5.
    """

    judge: Judge | str
    """A plain or async function, or where to import it: ``"package.module:function"``."""

    both_orders: bool = False
    """Judge every pair in both orders and take the mean."""

    concurrency: int = 8
    """Number of verdicts asked for at once."""

    def __post_init__(self) -> None:
        _load(self.judge)
        require_number("concurrency", self.concurrency, above=0)

    async def __call__(self, members: Sequence[GroupMember]) -> list[Reward | None]:
        judge, slots = _load(self.judge), asyncio.Semaphore(self.concurrency)
        results = {
            index: m.result
            for index, m in enumerate(members)
            if m.result is not None and not m.failed
        }

        async def verdict(first: int, second: int) -> float:
            async with slots:
                value = await call_function(
                    judge, results[first], results[second], timeout=DEFAULT_GROUP_TIMEOUT
                )
            if not isinstance(value, int | float) or not 0 <= value <= 1:
                name = object_name(judge)
                raise AggregatorError(
                    f"judge {name} gave {value!r:.80}, not a number from 0 to 1", aggregator=name
                )
            return float(value)

        wins: dict[int, list[float]] = {index: [] for index in results}
        pairs = list(itertools.combinations(results, 2))
        if self.both_orders:
            pairs += [(second, first) for first, second in pairs]
        async with asyncio.TaskGroup() as tasks:
            verdicts = [tasks.create_task(verdict(*pair)) for pair in pairs]
        for (first, second), task in zip(pairs, verdicts, strict=True):
            wins[first].append(task.result())
            wins[second].append(1.0 - task.result())
        return [
            None
            if index not in wins or m.reward is None
            else _replaced(m.reward, math.fsum(wins[index]) / len(wins[index]))
            if wins[index]
            else _replaced(m.reward, 0.5)
            for index, m in enumerate(members)
        ]


GROUP_AGGREGATORS: Mapping[str, Callable[..., GroupAggregator]] = {
    "rank": Rank,
    "best_of": BestOf,
    "diversity": Diversity,
    "pairwise": Pairwise,
}
"""Built-in group aggregators by name."""


def _replaced(own: Reward, value: float, **figures: float) -> Reward:
    extra = {f"group/{name}": figure for name, figure in figures.items()}
    return Reward(value, {**extra, "group/own_reward": own.value})


def _words(result: EpisodeResult) -> frozenset[str]:
    return frozenset(re.findall(r"\w+", result.state.output.completion.lower()))


def _distance(first: frozenset[str], second: frozenset[str]) -> float:
    union = len(first | second)
    return 1.0 - len(first & second) / union if union else 0.0


def _load(judge: Judge | str) -> Judge:
    if not isinstance(judge, str):
        if not callable(judge):
            raise RewardError(f"judge is a function or 'package.module:function', not {judge!r}")
        return judge
    module, _, name = judge.partition(":")
    try:
        loaded: Judge = getattr(importlib.import_module(module), name)
    except (ImportError, AttributeError, ValueError) as ex:
        raise RewardError(f"judge {judge!r} cannot be imported: {ex}") from ex
    return loaded
