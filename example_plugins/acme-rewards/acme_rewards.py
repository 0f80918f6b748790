"""A reward for short answers, and one for agreeing with the rest of the group."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field

from inspect_tinker_plugin.plugins import (
    EpisodeResult,
    GroupAggregator,
    GroupMember,
    Mean,
    Reward,
    RewardAggregator,
    hookimpl,
)


@dataclass(frozen=True)
class Brevity:
    """Another reward, scaled down when the answer has more words than a limit."""

    reward: RewardAggregator = field(default_factory=Mean)
    words: int = 50

    async def __call__(self, result: EpisodeResult) -> Reward:
        inner = await self.reward(result)
        count = len(result.state.output.completion.split())
        factor = min(1.0, self.words / max(count, 1))
        return Reward(inner.value * factor, {**inner.metrics, "reward/words": count})


@dataclass(frozen=True)
class Consensus:
    """The share of the group that ends with the same answer; needs no target."""

    async def __call__(self, members: Sequence[GroupMember]) -> list[Reward | None]:
        answers = [
            None if m.result is None or m.failed else m.result.state.output.completion.strip()
            for m in members
        ]
        votes = Counter(answer for answer in answers if answer is not None)
        return [
            None if answer is None else Reward(votes[answer] / votes.total()) for answer in answers
        ]


@hookimpl
def inspect_rl_reward_aggregators() -> Mapping[str, Callable[..., RewardAggregator]]:
    return {"brevity": Brevity}


@hookimpl
def inspect_rl_group_aggregators() -> Mapping[str, Callable[..., GroupAggregator]]:
    return {"consensus": Consensus}
