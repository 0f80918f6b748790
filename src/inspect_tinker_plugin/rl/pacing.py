"""Starts many episodes a few at a time, so that the event loop has time for everything else."""

from __future__ import annotations

import asyncio
from collections import deque
from weakref import WeakKeyDictionary

from inspect_tinker_plugin.episode.fast_paths import FastPath, taken

AT_ONCE = 16
"""Starts per iteration of the loop; one takes about a millisecond."""


class Starts:
    """The starts of one event loop, first in first out."""

    def __init__(self) -> None:
        self._waiting: deque[asyncio.Future[None]] = deque()
        self._left = AT_ONCE
        self._counting = False

    async def turn(self) -> None:
        """Return immediately, or in a later iteration when enough has started in this one."""
        loop = asyncio.get_running_loop()
        if not self._counting:
            self._counting = True
            loop.call_soon(self._next_turn, loop)
        if self._left > 0 and not self._waiting:
            self._left -= 1
            return
        place = loop.create_future()
        self._waiting.append(place)
        await place

    def _next_turn(self, loop: asyncio.AbstractEventLoop) -> None:
        self._left = AT_ONCE
        while self._waiting and self._left > 0:
            place = self._waiting.popleft()
            if not place.done():  # its episode was cancelled in the meantime
                place.set_result(None)
                self._left -= 1
        if self._left < AT_ONCE:
            loop.call_soon(self._next_turn, loop)
        else:
            self._counting = False


_starts: WeakKeyDictionary[asyncio.AbstractEventLoop, Starts] = WeakKeyDictionary()


async def turn_to_start() -> None:
    """Wait until this event loop has time for one more start."""
    if taken(FastPath.STARTS):
        await _starts.setdefault(asyncio.get_running_loop(), Starts()).turn()
