"""Many starts leave the event loop time for others."""

from __future__ import annotations

import asyncio
from itertools import pairwise

from inspect_tinker_plugin.rl.env import AT_ONCE, wait_to_start


async def starts_per_turn(count: int) -> list[int]:
    """How many of so many starts happened in each turn of the loop."""
    started = 0

    async def start() -> None:
        nonlocal started
        await wait_to_start()
        started += 1

    starting = [asyncio.create_task(start()) for _ in range(count)]
    seen = [0]
    while started < count:
        await asyncio.sleep(0)
        seen.append(started)
    await asyncio.gather(*starting)
    return [after - before for before, after in pairwise(seen)]


async def test_a_few_start_in_each_turn_of_the_loop() -> None:
    turns = await starts_per_turn(10 * AT_ONCE)
    assert sum(turns) == 10 * AT_ONCE
    assert max(turns) <= 2 * AT_ONCE  # a turn as this test sees it may be two of the loop's


def test_each_loop_has_starts_of_its_own() -> None:
    for _ in range(2):
        assert sum(asyncio.run(starts_per_turn(AT_ONCE + 1))) == AT_ONCE + 1
