"""Starts many episodes a few at a time, so that the event loop has time for everything else."""

from __future__ import annotations

import asyncio
from collections import deque
from weakref import WeakKeyDictionary

from inspect_tinker_plugin.episode.fast_paths import FastPath, taken

AT_ONCE = 64
"""Starts per iteration of the loop, at most: many at once take less time than one by one."""

AT_LEAST = 16
"""Starts per iteration, however long it takes."""

LONG = 0.02
"""Seconds of an iteration after which the next ones have half as many starts."""


class Starts:
    """The starts of one event loop, first in first out."""

    def __init__(self) -> None:
        self._waiting: deque[asyncio.Future[None]] = deque()
        self._at_once = AT_ONCE
        self._left = AT_ONCE
        self._counting = False
        self._begun = 0.0

    async def turn(self) -> None:
        """Return immediately, or in a later iteration when enough has started in this one."""
        loop = asyncio.get_running_loop()
        if not self._counting:
            self._counting, self._begun = True, loop.time()
            loop.call_soon(self._next_turn, loop)
        if self._left > 0 and not self._waiting:
            self._left -= 1
            return
        place = loop.create_future()
        self._waiting.append(place)
        await place

    def _next_turn(self, loop: asyncio.AbstractEventLoop) -> None:
        self._left = self._at_once = self._next_number(loop.time())
        while self._waiting and self._left > 0:
            place = self._waiting.popleft()
            if not place.done():  # its episode was cancelled in the meantime
                place.set_result(None)
                self._left -= 1
        if self._left < self._at_once:
            loop.call_soon(self._next_turn, loop)
        else:
            self._counting = False

    def _next_number(self, now: float) -> int:
        """Return how many may start in an iteration, by how long the last one took."""
        took, self._begun = now - self._begun, now
        if took > LONG:
            return max(AT_LEAST, self._at_once // 2)
        return min(AT_ONCE, self._at_once * 2) if took < LONG / 2 else self._at_once


_starts: WeakKeyDictionary[asyncio.AbstractEventLoop, Starts] = WeakKeyDictionary()


async def turn_to_start() -> None:
    """Wait until this event loop has time for one more start."""
    if taken(FastPath.STARTS):
        await _starts.setdefault(asyncio.get_running_loop(), Starts()).turn()
