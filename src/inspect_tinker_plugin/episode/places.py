"""Places for sandboxes: limits how many of one provider are alive at once in this process."""

from __future__ import annotations

import asyncio
import threading
from collections import deque
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager


class Places:
    """Counts the sandboxes of one provider that are alive, for the whole process.

    There is one count per provider, shared by all datasets. Each caller brings the bound of its
    dataset and gets a place when fewer than that are alive, first come first served: a
    training set with eight places and a test set with four have at most eight between them,
    and an episode of the test set starts when fewer than four are alive.

    Inspect's ``concurrency()`` belongs to one event loop and is reset whenever an eval
    starts: waiters of another thread's loop would never be woken, and an eval in the same
    process would lift the bound. Here a place is handed over from loop to loop.

    Args:
        count: The bound for callers that bring none; without it such callers never wait.
    """

    def __init__(self, count: int | None = None) -> None:
        self._count = count
        self._alive = 0
        self._waiting: deque[asyncio.Future[None]] = deque()
        self._bounds: dict[asyncio.Future[None], int | None] = {}
        self._lock = threading.Lock()

    @property
    def alive(self) -> int:
        """Places held now."""
        return self._alive

    @asynccontextmanager
    async def place(self, bound: int | None = None) -> AsyncIterator[None]:
        """Hold a place, among fewer than ``bound`` others if that is given."""
        await self._acquire(self._count if bound is None else bound)
        try:
            yield
        finally:
            self._release()

    async def _acquire(self, bound: int | None) -> None:
        with self._lock:
            if bound is None or (not self._waiting and self._alive < bound):
                self._alive += 1
                return
            turn: asyncio.Future[None] = asyncio.get_running_loop().create_future()
            self._waiting.append(turn)
            self._bounds[turn] = bound
        try:
            await turn
        except asyncio.CancelledError:
            with self._lock:
                still_waiting = turn in self._waiting
                if still_waiting:
                    self._waiting.remove(turn)
                    self._let_in()  # the next one in the queue may have a wider bound
            if not still_waiting:
                self._release()  # the place had been given already
            raise
        finally:
            self._bounds.pop(turn, None)

    def _release(self) -> None:
        with self._lock:
            self._alive -= 1
            self._let_in()

    def _let_in(self) -> None:
        """Give places to waiters, in order, up to the first whose bound is reached."""
        while self._waiting:
            bound = self._bounds.get(self._waiting[0], self._count)
            if bound is not None and self._alive >= bound:
                return
            turn = self._waiting.popleft()
            try:
                turn.get_loop().call_soon_threadsafe(_grant, turn)
            except RuntimeError:
                self._bounds.pop(turn, None)
                continue  # that loop is closed, and its waiter is gone
            self._alive += 1


def _grant(turn: asyncio.Future[None]) -> None:
    # A waiter that is being cancelled gives the place back itself.
    if not turn.done():
        turn.set_result(None)


_places: dict[str, Places] = {}
_lock = threading.Lock()


def sandbox_places(provider: str) -> Places:
    """Return this process's places for a provider."""
    with _lock:
        return _places.setdefault(provider, Places())
