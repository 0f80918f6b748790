"""The samplers that ship with the package: ``curriculum``."""

from __future__ import annotations

import random
from collections.abc import Callable, Mapping
from heapq import nlargest

from inspect_tinker_plugin.contracts.hooks import GroupOutcome, SamplePool, Sampler


class Curriculum(Sampler):
    """Prefers samples whose last group had different rewards: only these teach anything.

    Each sample has a weight, its chance to be chosen relative to others: 1 after a group whose
    rewards differed; before its first group the share of samples whose first group had a
    difference; and after groups in a row whose rewards were all equal that share times ``again``
    for each of them, so that such samples come back rarely, and ever more so. Samples below 1 are
    scaled down where they are so many that they would get more than that share of the choices:
    otherwise the untried ones of a large dataset would crowd out the few that are known to be
    useful. A batch has no sample twice unless there are too few.

    Args:
        again: What one more group without a difference multiplies a weight by, from 0 to 1.
        least: What groups without a difference multiply a weight by at least, above 0, so that no
            sample is lost.

    Raises:
        ValueError: A number is out of its range.
    """

    def __init__(self, again: float = 0.25, least: float = 0.02) -> None:
        if not 0 <= again <= 1:
            raise ValueError(f"again is a number from 0 to 1, not {again!r}")
        if not 0 < least <= 1:
            raise ValueError(f"least is a number above 0, up to 1, not {least!r}")
        self._again = again
        self._least = least

    def begin(self, pool: SamplePool, /) -> None:
        """Start with every sample untried."""
        self._pool = pool
        self._even: dict[int, float] = {}
        """By position of a tried sample, its groups in a row without a difference."""
        self._level: dict[int, float] = {}
        """By position of a tried sample, the mean reward of its last group."""
        self._first: dict[int, float] = {}
        """By position of a tried sample, how much of its first group is known: all, except from
        logs with fewer attempts."""
        self._mixed = 0.0
        """Of these first groups, those with a difference."""

    def learn(self, outcome: GroupOutcome, /) -> None:
        """Put a sample into another pool; attempts of a log count as the groups they would make."""
        rewards = outcome.rewards
        if not rewards:
            return
        groups = 1.0 if outcome.step is not None else len(rewards) / self._pool.group_size
        differ = min(rewards) < max(rewards)
        before = self._even.get(outcome.position, 0.0)
        self._even[outcome.position] = 0.0 if differ else before + groups
        self._level[outcome.position] = sum(rewards) / len(rewards)
        known = self._first.get(outcome.position, 0.0)
        self._first[outcome.position] = min(1.0, known + groups)
        self._mixed += self._first[outcome.position] - known if differ else 0.0

    def choose(self, step: int, count: int, /) -> list[int]:
        """Draw samples by their weights, with a generator of this step alone."""
        generator = random.Random(f"{self._pool.seed}/{self._pool.task}/{step}")
        weights = self.weights()
        # The largest of u ** (1 / weight) are a draw without replacement (Efraimidis, Spirakis).
        keys = [generator.random() ** (1 / weight) for weight in weights]
        chosen: list[int] = []
        while len(chosen) < count:
            chosen += nlargest(count - len(chosen), range(len(keys)), key=keys.__getitem__)
        return chosen

    def weights(self) -> list[float]:
        """Return the weight of each sample."""
        share = (self._mixed + 1) / (sum(self._first.values()) + 1)
        weights = [self._weight(position, share) for position in range(len(self._pool.samples))]
        useful = sum(weight == 1 for weight in weights)
        others = sum(weights) - useful
        if not useful or others * (1 - share) <= useful * share:
            return weights
        scale = useful * share / (1 - share) / others
        return [weight if weight == 1 else weight * scale for weight in weights]

    def _weight(self, position: int, share: float) -> float:
        even = self._even.get(position)
        if even is None:
            return share
        return share * max(self._least, self._again**even) if even else 1.0

    def figures(self) -> Mapping[str, float]:
        """Return how many samples are untried, useful, too easy and too hard."""
        resting = [position for position, even in self._even.items() if even]
        low, high = min(self._level.values(), default=0.0), max(self._level.values(), default=0.0)
        easy = sum(self._level[position] > (low + high) / 2 for position in resting)
        return {
            "untried": len(self._pool.samples) - len(self._even),
            "useful": len(self._even) - len(resting),
            "easy": easy,
            "hard": len(resting) - easy,
        }


SAMPLERS: Mapping[str, Callable[..., Sampler]] = {"curriculum": Curriculum}
"""Built-in samplers by name."""
