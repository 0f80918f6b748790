"""Waiting for somebody's code: what becomes of a cancellation meanwhile."""

from __future__ import annotations

import asyncio
from contextlib import suppress

import anyio
import pytest

from inspect_tinker_plugin.processes.loops import run_bounded


async def stubborn() -> str:
    """Swallow a cancellation and return."""
    with suppress(asyncio.CancelledError):
        await asyncio.sleep(60)
    return "done"


async def test_who_waits_for_code_that_swallows_cancellation_is_cancelled() -> None:
    waiting = asyncio.ensure_future(run_bounded(stubborn(), None))
    await asyncio.sleep(0.01)
    waiting.cancel()
    with pytest.raises(asyncio.CancelledError):
        await waiting


async def test_a_scope_around_code_that_swallows_cancellation_ends() -> None:
    with anyio.move_on_after(0.01) as scope:
        await run_bounded(stubborn(), None)
        pytest.fail("the deadline was lost")
    assert scope.cancelled_caught


async def test_what_such_code_returns_in_its_grace_after_a_time_out_counts() -> None:
    assert await run_bounded(stubborn(), 0.01) == "done"


async def test_work_is_cancelled_once_by_a_scope_around_a_gathering() -> None:
    told: list[str] = []

    async def cleans_up() -> None:
        try:
            await asyncio.sleep(3600)
        except asyncio.CancelledError:
            told.append("cancelled")
            await asyncio.sleep(0.05)
            told.append("cleaned up")
            raise

    with anyio.CancelScope() as scope:
        asyncio.get_running_loop().call_later(0.01, scope.cancel)
        await asyncio.gather(run_bounded(cleans_up(), None, grace=5.0))
    assert told == ["cancelled", "cleaned up"]
