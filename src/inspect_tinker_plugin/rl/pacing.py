"""Starts many episodes a few at a time, so that the event loop has time for everything else."""

from __future__ import annotations

import asyncio
from collections import deque
from weakref import WeakKeyDictionary

AT_ONCE = 32
"""Starts per iteration of the loop."""


class _Starts:
    """The starts of one event loop, first in first out."""

    def __init__(self) -> None:
        self._waiting: deque[asyncio.Future[None]] = deque()
        self._left = AT_ONCE
        self._counting = False

    async def wait_for_turn(self) -> None:
        loop = asyncio.get_running_loop()
        if not self._counting:
            self._counting = True
            loop.call_soon(self._begin_iteration, loop)
        if self._left > 0 and not self._waiting:
            self._left -= 1
            return
        place = loop.create_future()
        self._waiting.append(place)
        await place

    def _begin_iteration(self, loop: asyncio.AbstractEventLoop) -> None:
        self._left = AT_ONCE
        while self._waiting and self._left > 0:
            place = self._waiting.popleft()
            if not place.done():  # its episode was cancelled in the meantime
                place.set_result(None)
                self._left -= 1
        self._counting = self._left < AT_ONCE
        if self._counting:
            loop.call_soon(self._begin_iteration, loop)


_starts: WeakKeyDictionary[asyncio.AbstractEventLoop, _Starts] = WeakKeyDictionary()


async def wait_to_start() -> None:
    """Wait until this iteration of the event loop has room for one more start."""
    await _starts.setdefault(asyncio.get_running_loop(), _Starts()).wait_for_turn()
