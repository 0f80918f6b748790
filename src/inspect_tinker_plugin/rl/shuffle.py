"""The order in which samples are visited, computed without listing them."""

from __future__ import annotations

import random
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

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
