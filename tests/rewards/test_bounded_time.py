"""Functions of users have a time limit, however they spend their time."""

from __future__ import annotations

import asyncio
import sys
import threading
from contextlib import suppress
from textwrap import dedent

import pytest
from tests.packages import run
from tests.rewards.episodes import finished, member

from inspect_tinker_plugin.contracts.episodes import EpisodeResult
from inspect_tinker_plugin.rewards import (
    AggregatorError,
    Pairwise,
    resolve_group_reward,
    resolve_reward,
)

LONG = 30.0
"""Far beyond what the tests allow; none of them waits for it."""


async def test_an_async_function_that_no_cancellation_ends_is_left_to_itself() -> None:
    end = asyncio.Event()

    async def clings(result: EpisodeResult) -> float:
        while not end.is_set():
            with suppress(asyncio.CancelledError):
                await end.wait()
        return 1.0

    async with asyncio.timeout(LONG):
        with pytest.raises(AggregatorError, match=r"clings' gave nothing within 0\.2 seconds"):
            await resolve_reward(clings, timeout=0.2)(finished())
    end.set()
    await asyncio.sleep(0.01)


async def test_an_async_function_runs_in_the_loop_that_it_may_share_with_others() -> None:
    gate = asyncio.Event()

    async def waits(result: EpisodeResult) -> float:
        await gate.wait()
        return 1.0

    reward = asyncio.create_task(resolve_reward(waits)(finished()))
    await asyncio.sleep(0)
    gate.set()
    assert (await reward).value == 1


async def test_a_judge_that_takes_too_long_is_the_group_rewards_failure() -> None:
    async def verdict(first: EpisodeResult, second: EpisodeResult) -> float:
        await asyncio.sleep(LONG)
        return 1.0

    with pytest.raises(AggregatorError, match="gave nothing within"):
        await resolve_group_reward(Pairwise(verdict), timeout=0.2)([member(1), member(0)])


async def test_functions_that_never_end_do_not_use_up_the_threads() -> None:
    def never(result: EpisodeResult) -> float:
        threading.Event().wait()
        return 1.0

    hanging = [resolve_reward(never, timeout=0.05)(finished()) for _ in range(40)]
    outcomes = await asyncio.gather(*hanging, return_exceptions=True)
    assert all(isinstance(outcome, AggregatorError) for outcome in outcomes)
    assert (await resolve_reward(lambda result: 1.0, timeout=60)(finished())).value == 1
    assert await asyncio.to_thread(lambda: 1) == 1


def test_a_function_that_exits_or_never_ends_does_not_keep_the_process() -> None:
    program = """
        import asyncio, sys, time
        from tests.rewards.episodes import finished
        from inspect_tinker_plugin.rewards import AggregatorError, resolve_reward

        def leaves(result):
            sys.exit(0)

        def never(result):
            while True:
                time.sleep(1)

        async def main():
            for function in (leaves, never):
                try:
                    await resolve_reward(function, timeout=0.2)(finished())
                except AggregatorError as error:
                    print(error)

        asyncio.run(main())
    """
    left, hung = run(sys.executable, "-c", dedent(program)).splitlines()
    assert "SystemExit" in left
    assert "gave nothing within" in hung


async def test_a_cancellation_of_its_own_making_is_the_functions_failure() -> None:
    async def cancels(result: EpisodeResult) -> float:
        raise asyncio.CancelledError

    with pytest.raises(AggregatorError, match="cancelled, but not by the episode"):
        await resolve_reward(cancels)(finished())
