"""Waits of tests for what has no event, as the end of a process."""

from __future__ import annotations

import asyncio
import os
import time
from collections.abc import Callable

import psutil


def wait_until(holds: Callable[[], object], seconds: float = 60) -> None:
    """Wait in this thread until something holds; fail when it does not in time."""
    deadline = time.monotonic() + seconds
    while not holds():
        assert time.monotonic() < deadline, "it did not happen"
        time.sleep(0.02)


def is_alive(pid: int) -> bool:
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return False
    return True


def has_ended(process: psutil.Process) -> bool:
    """Whether a process has ended, waited for or not."""
    try:
        return bool(process.status() == psutil.STATUS_ZOMBIE)
    except psutil.NoSuchProcess:
        return True


async def until(holds: Callable[[], object], seconds: float = 60) -> None:
    """Wait until something holds; fail when it does not in time."""
    deadline = time.monotonic() + seconds
    while not holds():
        assert time.monotonic() < deadline, "it did not happen"
        await asyncio.sleep(0.02)
