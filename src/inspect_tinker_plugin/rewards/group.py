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
from inspect_tinker_plugin.rewards.resolve import (
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
        own = [reward.value for _, reward in _compared(members).values()]

        def rank(value: float) -> float:
            if len(own) < 2:
                return 0.5
            below = sum(other < value for other in own)
            ties = sum(other == value for other in own) - 1
            return (below + ties / 2) / (len(own) - 1)

        return _revise(members, lambda _, reward: rank(reward.value))


@dataclass(frozen=True)
class BestOf:
    """The best member keeps its reward (so do ties); the others get ``rest``."""

    rest: float = 0.0
    """Reward of the members that are not the best."""

    def __post_init__(self) -> None:
        require_number("rest", self.rest)

    async def __call__(self, members: Sequence[GroupMember]) -> list[Reward | None]:
        best = max((reward.value for _, reward in _compared(members).values()), default=0.0)
        return _revise(members, lambda _, reward: best if reward.value == best else self.rest)


@dataclass(frozen=True)
class Equal:
    """The mean of the group for each member, so that rewards are measured and teach nothing."""

    async def __call__(self, members: Sequence[GroupMember]) -> list[Reward | None]:
        mean = _mean([reward.value for _, reward in _compared(members).values()], 0.0)
        return _revise(members, lambda _, reward: mean)


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
        words = {index: _words(result) for index, (result, _) in _compared(members).items()}
        novelty = {
            index: _mean([_distance(own, words[other]) for other in words if other != index], 0.0)
            for index, own in words.items()
        }
        return _revise(
            members,
            lambda index, reward: reward.value + self.weight * novelty[index],
            diversity=novelty,
        )


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
        results = {index: result for index, (result, _) in _compared(members).items()}

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
        return _revise(members, lambda index, _: _mean(wins[index], 0.5))


GROUP_AGGREGATORS: Mapping[str, Callable[..., GroupAggregator]] = {
    "rank": Rank,
    "best_of": BestOf,
    "equal": Equal,
    "diversity": Diversity,
    "pairwise": Pairwise,
}
"""Built-in group aggregators by name."""


def _compared(members: Sequence[GroupMember]) -> dict[int, tuple[EpisodeResult, Reward]]:
    """Return result and own reward of the members that did not fail, by their place."""
    return {
        index: (member.result, member.reward)
        for index, member in enumerate(members)
        if member.result is not None and member.reward is not None and not member.failed
    }


def _revise(
    members: Sequence[GroupMember],
    revised: Callable[[int, Reward], float],
    **figures: Mapping[int, float],
) -> list[Reward | None]:
    """Replace the rewards of the members that did not fail; their own are among the metrics."""
    rewards: list[Reward | None] = [None] * len(members)
    for index, (_, own) in _compared(members).items():
        extra = {f"group/{name}": values[index] for name, values in figures.items()}
        rewards[index] = Reward(revised(index, own), {**extra, "group/own_reward": own.value})
    return rewards


def _mean(values: Sequence[float], empty: float) -> float:
    return math.fsum(values) / len(values) if values else empty


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
