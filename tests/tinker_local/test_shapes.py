"""The number of sizes that the engine compiles for; padding changes no result."""

from __future__ import annotations

import pytest

from tinker_local.engine import full_batch, round_limit


@pytest.mark.parametrize(
    ("count", "expected"), [(1, 1), (3, 4), (8, 8), (17, 32), (32, 32), (33, 33), (45, 48)]
)
def test_batches_are_filled_to_a_power_of_two_in_the_last_pass(count: int, expected: int) -> None:
    assert full_batch(count, limit=32) == expected


def test_a_limit_that_is_no_power_of_two_is_kept() -> None:
    assert full_batch(23, limit=24) == 24
    assert {full_batch(n, limit=24) for n in range(1, 25)} == {1, 2, 4, 8, 16, 24}


def test_few_token_limits_remain() -> None:
    limits = {round_limit(n) for n in range(1, 1025)}
    assert len(limits) < 25
    assert all(n <= round_limit(n) < n + 64 for n in range(1, 1025))
