"""Limits for a whole process whose waiters run in several event loops, in several threads.

Locks and limiters of asyncio and anyio belong to one loop: a waiter that is let in from another
thread's loop is never woken. A :class:`Turnstile` wakes each waiter in its own loop. The places for
sandboxes (``episode/sandbox.py``) use it, and so do the limiters below, which replace those of
Inspect's own process-wide limits (``inspect_internals.share_limits_between_loops``).
"""

from __future__ import annotations

import asyncio
import math
import threading
from collections import deque
from collections.abc import Callable
from contextvars import ContextVar
from dataclasses import dataclass
from types import TracebackType

import anyio
from anyio import CapacityLimiterStatistics, SemaphoreStatistics, WouldBlock
from anyio.lowlevel import cancel_shielded_checkpoint, checkpoint_if_cancelled

Admission = Callable[[int], bool]
"""Says whether one more may enter, given how many are inside."""

waited_in_vain: ContextVar[bool] = ContextVar("inspect_rl_waited_in_vain", default=False)
"""Whether the running task was cancelled while it waited for its turn."""


@dataclass(frozen=True)
class _Waiter:
    turn: asyncio.Future[None]
    admits: Admission


class Turnstile:
    """Admits waiters one by one, first come first served, whichever loop they wait in."""

    def __init__(self) -> None:
        self._inside = 0
        self._waiting: deque[_Waiter] = deque()
        # The collector may close an abandoned waiter while this thread is in here.
        self._lock = threading.RLock()

    @property
    def inside(self) -> int:
        """How many are inside."""
        return self._inside

    @property
    def waiting(self) -> int:
        """How many wait."""
        return len(self._waiting)

    def enter_at_once(self, admits: Admission) -> bool:
        """Enter if that is possible without waiting; otherwise return ``False``."""
        with self._lock:
            if self._waiting or not admits(self._inside):
                return False
            self._inside += 1
            return True

    def pass_by(self) -> None:
        """Enter without waiting and without asking anybody."""
        with self._lock:
            self._inside += 1

    async def enter(self, admits: Admission) -> None:
        """Enter as soon as all earlier waiters are inside and ``admits`` allows it."""
        with self._lock:
            if self.enter_at_once(admits):
                return
            waiter = _Waiter(asyncio.get_running_loop().create_future(), admits)
            self._waiting.append(waiter)
        try:
            await waiter.turn
        except BaseException:
            with self._lock:
                still_waiting = waiter in self._waiting
                if still_waiting:
                    self._waiting.remove(waiter)
                    waited_in_vain.set(True)
                    self.let_in()  # the next one in the queue may be admitted
            if not still_waiting:
                self.leave()  # the turn had been given already
            raise

    def leave(self) -> None:
        """Leave, and admit waiters."""
        with self._lock:
            self._inside -= 1
            self.let_in()

    def let_in(self) -> None:
        """Admit waiters, in order, up to the first one that may not enter yet."""
        with self._lock:
            while self._waiting and self._waiting[0].admits(self._inside):
                turn = self._waiting.popleft().turn
                self._inside += 1
                try:
                    turn.get_loop().call_soon_threadsafe(_grant, turn)
                except RuntimeError:
                    self._inside -= 1  # that loop is closed, and its waiter is gone


def _grant(turn: asyncio.Future[None]) -> None:
    # A waiter that is being cancelled leaves by itself.
    if not turn.done():
        turn.set_result(None)


class ProcessLimiter(anyio.CapacityLimiter):
    """An ``anyio.CapacityLimiter`` whose borrowers may live in several event loops."""

    def __new__(cls, total_tokens: float) -> ProcessLimiter:
        """Make one of these, and not the limiter of the running backend."""
        return object.__new__(cls)

    def __init__(self, total_tokens: float) -> None:
        self._turnstile = Turnstile()
        self._borrowers: set[object] = set()
        self.total_tokens = total_tokens

    async def __aenter__(self) -> None:
        await self.acquire()

    async def __aexit__(
        self,
        exc_type: type[BaseException] | None,
        exc_val: BaseException | None,
        exc_tb: TracebackType | None,
    ) -> None:
        self.release()

    @property
    def total_tokens(self) -> float:
        """How many may be borrowed at the same time."""
        return self._total_tokens

    @total_tokens.setter
    def total_tokens(self, value: float) -> None:
        if not isinstance(value, int) and not math.isinf(value):
            raise TypeError("total_tokens must be an int or math.inf")
        if value < 0:
            raise ValueError("total_tokens must be >= 0")
        self._total_tokens = value
        self._turnstile.let_in()

    @property
    def borrowed_tokens(self) -> int:
        """How many are borrowed."""
        return self._turnstile.inside

    @property
    def available_tokens(self) -> float:
        """How many are left."""
        return self._total_tokens - self.borrowed_tokens

    def acquire_nowait(self) -> None:
        """Borrow a token for this task without waiting."""
        self.acquire_on_behalf_of_nowait(asyncio.current_task())

    def acquire_on_behalf_of_nowait(self, borrower: object) -> None:
        """Borrow a token without waiting."""
        if borrower in self._borrowers:
            raise RuntimeError(
                "this borrower is already holding one of this CapacityLimiter's tokens"
            )
        if not self._turnstile.enter_at_once(self._admits):
            raise WouldBlock
        self._borrowers.add(borrower)

    async def acquire(self) -> None:
        """Borrow a token for this task."""
        await self.acquire_on_behalf_of(asyncio.current_task())

    async def acquire_on_behalf_of(self, borrower: object) -> None:
        """Borrow a token."""
        await checkpoint_if_cancelled()
        try:
            self.acquire_on_behalf_of_nowait(borrower)
        except WouldBlock:
            await self._turnstile.enter(self._admits)
            self._borrowers.add(borrower)
        else:
            try:
                await cancel_shielded_checkpoint()
            except BaseException:
                self.release_on_behalf_of(borrower)
                raise

    def release(self) -> None:
        """Give this task's token back."""
        self.release_on_behalf_of(asyncio.current_task())

    def release_on_behalf_of(self, borrower: object) -> None:
        """Give a token back."""
        try:
            self._borrowers.remove(borrower)
        except KeyError:
            raise RuntimeError(
                "this borrower isn't holding any of this CapacityLimiter's tokens"
            ) from None
        self._turnstile.leave()

    def statistics(self) -> CapacityLimiterStatistics:
        """Give the figures of this moment."""
        return CapacityLimiterStatistics(
            self.borrowed_tokens,
            self.total_tokens,
            tuple(self._borrowers),
            self._turnstile.waiting,
        )

    def _admits(self, inside: int) -> bool:
        return inside < self._total_tokens


class ProcessSemaphore(anyio.Semaphore):
    """An ``anyio.Semaphore`` whose holders may live in several event loops."""

    def __new__(
        cls, initial_value: int, *, max_value: int | None = None, fast_acquire: bool = False
    ) -> ProcessSemaphore:
        """Make one of these, and not the semaphore of the running backend."""
        return object.__new__(cls)

    def __init__(
        self, initial_value: int, *, max_value: int | None = None, fast_acquire: bool = False
    ) -> None:
        super().__init__(initial_value, max_value=max_value, fast_acquire=fast_acquire)
        self._turnstile = Turnstile()
        self._places = initial_value
        self._max_value = max_value

    async def acquire(self) -> None:
        """Take one of the places."""
        await checkpoint_if_cancelled()
        await self._turnstile.enter(self._admits)

    def acquire_nowait(self) -> None:
        """Take one of the places without waiting."""
        if not self._turnstile.enter_at_once(self._admits):
            raise WouldBlock

    def release(self) -> None:
        """Give a place back."""
        if self._max_value is not None and self.value >= self._max_value:
            raise ValueError("semaphore released too many times")
        self._turnstile.leave()

    @property
    def value(self) -> int:
        """How many places are left."""
        return self._places - self._turnstile.inside

    @property
    def max_value(self) -> int | None:
        """How many places there are at most."""
        return self._max_value

    def statistics(self) -> SemaphoreStatistics:
        """Give the figures of this moment."""
        return SemaphoreStatistics(tasks_waiting=self._turnstile.waiting)

    def _admits(self, inside: int) -> bool:
        return inside < self._places
