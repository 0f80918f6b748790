"""Places for sandboxes: how many of one provider's may be alive at once in this process."""

from __future__ import annotations

import asyncio
import threading
from collections import deque
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager


class Places:
    """Counts places for the whole process, first come first served.

    Inspect's ``concurrency()`` belongs to one event loop and is reset whenever an eval
    starts: waiters of another thread's loop would never be woken, and an eval in the same
    process would lift the bound. Here a place is handed over from loop to loop.

    Args:
        count: Places in all.
    """

    def __init__(self, count: int) -> None:
        self._free = count
        self._waiting: deque[asyncio.Future[None]] = deque()
        self._lock = threading.Lock()

    @asynccontextmanager
    async def place(self) -> AsyncIterator[None]:
        """Hold a place."""
        await self._acquire()
        try:
            yield
        finally:
            self._release()

    async def _acquire(self) -> None:
        with self._lock:
            if self._free > 0:
                self._free -= 1
                return
            turn: asyncio.Future[None] = asyncio.get_running_loop().create_future()
            self._waiting.append(turn)
        try:
            await turn
        except asyncio.CancelledError:
            with self._lock:
                still_waiting = turn in self._waiting
                if still_waiting:
                    self._waiting.remove(turn)
            if not still_waiting:
                self._release()  # the place was on its way already
            raise

    def _release(self) -> None:
        with self._lock:
            while self._waiting:
                turn = self._waiting.popleft()
                try:
                    turn.get_loop().call_soon_threadsafe(_grant, turn)
                except RuntimeError:
                    continue  # that loop is closed, and whoever waited is gone with it
                return
            self._free += 1


def _grant(turn: asyncio.Future[None]) -> None:
    # A waiter that is being cancelled gives the place back itself.
    if not turn.done():
        turn.set_result(None)


_places: dict[tuple[str, int], Places] = {}
_lock = threading.Lock()


def sandbox_places(provider: str, count: int) -> Places:
    """Return this process's places for a provider under a bound."""
    with _lock:
        return _places.setdefault((provider, count), Places(count))
