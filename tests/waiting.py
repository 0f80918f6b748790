"""Waits of tests for what has no event."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable


async def until(holds: Callable[[], object], seconds: float = 60) -> None:
    """Wait until something holds; fail when it does not in time."""
    deadline = time.monotonic() + seconds
    while not holds():
        assert time.monotonic() < deadline, "it did not happen"
        await asyncio.sleep(0.02)
