"""Which samples each batch of a dataset has: passes over them, or its part of a mixture.

The order of a pass is computed without listing the samples (:class:`Permutation`).
"""

from __future__ import annotations

import math
import random
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from fractions import Fraction
from functools import cached_property
from itertools import accumulate
from typing import Protocol

from inspect_tinker_plugin.contracts.errors import ConfigError
from inspect_tinker_plugin.options import DatasetOptions
from inspect_tinker_plugin.samplers.state import OutcomeFile, SamplerState

_ROUNDS = 4


@dataclass(frozen=True)
class Permutation(Sequence[int]):
    """A pseudo-random permutation of ``range(size)`` that is never held in memory.

    A Feistel network permutes the next even power of two; values outside the range are
    permuted again until they fall inside. Position ``i`` costs the same for a thousand and
    for a hundred million samples.
    """

    size: int
    seed: int

    def __len__(self) -> int:
        return self.size

    def __getitem__(self, index: int) -> int:  # type: ignore[override]  # no slices needed
        if not 0 <= index < self.size:
            raise IndexError(index)
        half = max(1, ((self.size - 1).bit_length() + 1) // 2)
        keys = _keys(self.seed)
        value = index
        while True:
            value = _feistel(value, half, keys)
            if value < self.size:
                return value

    def __iter__(self) -> Iterator[int]:
        return (self[index] for index in range(self.size))


def _keys(seed: int) -> list[int]:
    generator = random.Random(seed)
    return [generator.getrandbits(64) for _ in range(_ROUNDS)]


def _feistel(value: int, half: int, keys: list[int]) -> int:
    mask = (1 << half) - 1
    left, right = value >> half, value & mask
    for key in keys:
        mixed = ((right + 1) * 0x9E3779B97F4A7C15 ^ key) & 0xFFFFFFFFFFFFFFFF
        mixed = (mixed ^ (mixed >> 29)) * 0xBF58476D1CE4E5B9 & 0xFFFFFFFFFFFFFFFF
        left, right = right, left ^ ((mixed >> 32) & mask)
    return left << half | right


_FINEST = 1000
"""Shares are rounded to multiples of one thousandth of their sum."""


class Order(Protocol):
    """Assigns samples to batches."""

    def __len__(self) -> int:
        """Return the number of batches."""
        ...

    def batch(self, index: int) -> list[int]:
        """Return the positions of a batch's samples, one per group."""
        ...


@dataclass(frozen=True)
class Passes:
    """Passes over the samples; the last batch of each may be smaller."""

    samples: int
    options: DatasetOptions

    def __len__(self) -> int:
        return self._per_pass * self.options.epochs

    def batch(self, index: int) -> list[int]:
        """Return the positions of a batch's samples."""
        number, batch = divmod(index, self._per_pass)
        order = order_of_pass(self.samples, self.options, number)
        start = batch * self.options.batch_size
        return [order[p] for p in range(start, min(start + self.options.batch_size, self.samples))]

    @property
    def _per_pass(self) -> int:
        return math.ceil(self.samples / self.options.batch_size)


@dataclass(frozen=True)
class Portion:
    """The part of a mixture's batches that comes from one task; it begins again after each pass."""

    samples: int
    options: DatasetOptions
    mix: Mix
    source: int
    """Position of the task in the mixture."""

    batches: int

    def __len__(self) -> int:
        return self.batches

    def batch(self, index: int) -> list[int]:
        """Return the positions of this task's samples in a batch of the mixture."""
        found = []
        for place in self.mix.places(self.source, index):
            number, position = divmod(place, self.samples)
            found.append(order_of_pass(self.samples, self.options, number)[position])
        return found


@dataclass(frozen=True)
class Sampled:
    """Batches as large as those of another order, of samples that a sampler chooses.

    Batches that the trainer goes through again are later steps.
    """

    sizes: Order
    state: SamplerState

    def __len__(self) -> int:
        return len(self.sizes)

    def batch(self, index: int) -> list[int]:
        """Return the positions of a batch's samples."""
        count = len(self.sizes.batch(index))
        return self.state.choose(self._step(index), count) if count else []

    def outcome_file(self, index: int, group: int, position: int) -> OutcomeFile:
        """Return where the rewards of a group go, for the sampler to learn from."""
        return self.state.outcome_file(self._step(index), group, position)

    def _step(self, index: int) -> int:
        step = self.state.last_step // len(self) * len(self) + index
        return step + len(self) if self.state.rolled_out(step) else step


def order_of_pass(samples: int, options: DatasetOptions, number: int) -> Sequence[int]:
    """Return the order of a pass over the samples, counted from 0."""
    if not options.shuffle:
        return range(samples)
    return Permutation(samples, hash((options.seed or 0, number)))


@dataclass(frozen=True)
class Mix:
    """Deals the groups of batches out to tasks, in given shares.

    The groups of all batches, one after the other, are dealt out in turns that repeat: in each
    turn every task gets its share exactly, spread evenly. So every batch has the groups that its
    share says, give or take one, whichever batch it is and however often it is asked for.

    Args:
        shares: One positive number per task; only their ratios count.
        batch_size: Groups per batch.

    Raises:
        ConfigError: A share is not a positive number.
    """

    shares: tuple[float, ...]
    batch_size: int

    def __post_init__(self) -> None:
        for share in self.shares:
            if isinstance(share, bool) or not 0 < share < math.inf:
                raise ConfigError(f"a share of a mixture is a number above 0, not {share!r}")

    def deal(self, batch: int) -> list[int]:
        """Return the task of each group of a batch."""
        start = batch * self.batch_size
        return [
            self._turn[slot % len(self._turn)] for slot in range(start, start + self.batch_size)
        ]

    def places(self, source: int, batch: int) -> range:
        """Return which of a task's groups are in a batch, counted from the first batch's on."""
        start = batch * self.batch_size
        return range(self._before(source, start), self._before(source, start + self.batch_size))

    def batches(self, sizes: Sequence[int], passes: int) -> int:
        """Return how many batches it takes until every task had this many passes.

        Args:
            sizes: Samples of each task.
            passes: Passes over the samples; smaller tasks will have had more.
        """
        needed = 1
        for source, size in enumerate(sizes):
            own = self._whole[source]
            turns, rest = divmod(size * passes, own)
            slots = turns * len(self._turn)
            if rest:
                slots += self._dealt[source].index(rest)
            else:
                slots += self._dealt[source].index(own) - len(self._turn)
            needed = max(needed, math.ceil(slots / self.batch_size))
        return needed

    def _before(self, source: int, slot: int) -> int:
        """Return how many groups a task gets before a slot, over all batches."""
        turns, rest = divmod(slot, len(self._turn))
        return turns * self._whole[source] + self._dealt[source][rest]

    @cached_property
    def _whole(self) -> list[int]:
        """The shares as whole numbers without a common divisor."""
        parts = [Fraction(share).limit_denominator(10**6) for share in self.shares]
        total = sum(parts)
        exact = [part / total for part in parts]
        if math.lcm(*(part.denominator for part in exact)) > _FINEST:
            exact = [Fraction(max(1, round(part * _FINEST)), _FINEST) for part in exact]
        scale = math.lcm(*(part.denominator for part in exact))
        whole = [int(part * scale) for part in exact]
        common = math.gcd(*whole)
        return [each // common for each in whole]

    @cached_property
    def _turn(self) -> list[int]:
        """The task of each group of one turn: always that which is most behind its share."""
        whole = self._whole
        credit = [0] * len(whole)
        turn = []
        for _ in range(sum(whole)):
            credit = [have + each for have, each in zip(credit, whole, strict=True)]
            chosen = max(range(len(whole)), key=credit.__getitem__)
            credit[chosen] -= sum(whole)
            turn.append(chosen)
        return turn

    @cached_property
    def _dealt(self) -> list[list[int]]:
        """By task and slot of a turn, how many groups it has got before that slot."""
        return [
            list(accumulate((int(each == source) for each in self._turn), initial=0))
            for source in range(len(self._whole))
        ]
