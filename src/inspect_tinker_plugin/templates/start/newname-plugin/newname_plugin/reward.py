"""A reward: another one, which long answers lower."""

from __future__ import annotations

from dataclasses import dataclass, field

from inspect_tinker_plugin.plugins import EpisodeResult, Mean, Reward, RewardAggregator


@dataclass(frozen=True)
class Brief:
    """Scales a reward down where the answer has more words than it may."""

    reward: RewardAggregator = field(default_factory=Mean)
    words: int = 20

    async def __call__(self, result: EpisodeResult) -> Reward:
        inner = await self.reward(result)
        count = len(result.state.output.completion.split())
        factor = min(1.0, self.words / max(count, 1))
        return Reward(inner.value * factor, {**inner.metrics, "reward/words": count})
