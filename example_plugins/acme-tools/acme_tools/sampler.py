"""A sampler that goes through the levels of a task, the next one when this one pays."""

from __future__ import annotations

import random

from inspect_tinker_plugin.plugins import GroupOutcome, SamplePool, Sampler


class ByLevel(Sampler):
    """Chooses samples of the lowest ``level`` in their metadata that does not pay enough yet.

    Args:
        enough: Mean reward of a sample's last group above which it pays.
    """

    def __init__(self, enough: float = 0.8) -> None:
        self._enough = enough

    def begin(self, pool: SamplePool, /) -> None:
        self._pool = pool
        self._levels = [(sample.metadata or {}).get("level", 0) for sample in pool.samples]
        self._means: dict[int, float] = {}

    def learn(self, outcome: GroupOutcome, /) -> None:
        if outcome.rewards:
            self._means[outcome.position] = sum(outcome.rewards) / len(outcome.rewards)

    def choose(self, step: int, count: int, /) -> list[int]:
        open_ = [p for p in range(len(self._levels)) if self._means.get(p, 0.0) < self._enough]
        level = min((self._levels[p] for p in open_), default=max(self._levels))
        choices = [p for p, each in enumerate(self._levels) if each == level]
        return random.Random(f"{self._pool.seed}/{step}").choices(choices, k=count)
