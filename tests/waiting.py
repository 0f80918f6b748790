"""Waits of tests for what has no event, as the end of a process."""

from __future__ import annotations

import asyncio
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
    """Whether a process runs: one of a parent that was killed may wait for `init` to take note."""
    try:
        return not has_ended(psutil.Process(pid))
    except psutil.NoSuchProcess:
        return False


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
