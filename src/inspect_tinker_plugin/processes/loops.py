"""Event loops of several threads: wakes each waiter, and does work, in the right one."""

from __future__ import annotations

import asyncio
import threading
from collections import deque
from collections.abc import Callable
from typing import Any


def running_loop() -> asyncio.AbstractEventLoop | None:
    """Return the event loop that runs in this thread, if one does."""
    try:
        return asyncio.get_running_loop()
    except RuntimeError:
        return None


def run_in(loop: asyncio.AbstractEventLoop, work: Callable[..., object], *arguments: Any) -> bool:
    """Do something in a loop: now when it runs here, otherwise as its next callback.

    Returns:
        ``False`` when the loop is closed: nothing waits there any more.
    """
    if loop.is_closed():
        return False
    if loop is running_loop() or not loop.is_running():
        work(*arguments)
        return True
    try:
        loop.call_soon_threadsafe(work, *arguments)
    except RuntimeError:  # closed in the meantime
        return False
    return True


def settle(
    future: asyncio.Future[Any], result: object = None, *, error: BaseException | None = None
) -> bool:
    """Give a future its result or error, in its own loop.

    Returns:
        ``False`` when nobody waits for it any more: it is done, or its loop is closed.
    """
    return not future.done() and run_in(future.get_loop(), _settle, future, result, error)


def cancel(future: asyncio.Future[Any]) -> None:
    """Cancel a future or task, in its own loop."""
    run_in(future.get_loop(), future.cancel)


async def wait_for_end(task: asyncio.Future[Any], timeout: float | None = None) -> bool:
    """Wait until a task or future of any loop is done; return whether it is.

    Its result is not looked at. One whose loop has stopped is not waited for.
    """
    home, here = task.get_loop(), asyncio.get_running_loop()
    if task.done() or (home is not here and not home.is_running()):
        return task.done()
    if home is here:
        await asyncio.wait([task], timeout=timeout)
        return task.done()
    ended = here.create_future()

    def watch() -> None:
        task.add_done_callback(wake)

    def wake(_: object) -> None:
        settle(ended)

    if run_in(home, watch):
        await asyncio.wait([ended], timeout=timeout)
        run_in(home, task.remove_done_callback, wake)
    return task.done()


def _settle(future: asyncio.Future[Any], result: object, error: BaseException | None) -> None:
    if future.done():
        return
    if error is None:
        future.set_result(result)
    else:
        future.set_exception(error)


Admission = Callable[[int], bool]
"""Says whether one more may enter, given how many are inside."""


class Turnstile:
    """Admits waiters one by one, first come first served, whichever loop they wait in."""

    def __init__(self) -> None:
        self._inside = 0
        self._waiting: deque[tuple[asyncio.Future[None], Admission]] = deque()
        # The collector may close an abandoned waiter while this thread is in here.
        self._lock = threading.RLock()

    @property
    def inside(self) -> int:
        """How many are inside."""
        return self._inside

    def pass_by(self) -> None:
        """Enter without waiting for those who wait."""
        with self._lock:
            self._inside += 1

    async def enter(self, admits: Admission) -> None:
        """Enter as soon as all earlier waiters are inside and ``admits`` allows it."""
        with self._lock:
            if not self._waiting and admits(self._inside):
                self._inside += 1
                return
            turn = asyncio.get_running_loop().create_future()
            waiter = turn, admits
            self._waiting.append(waiter)
        try:
            await turn
        except BaseException:
            with self._lock:
                if waiter in self._waiting:
                    self._waiting.remove(waiter)
                    self._admit_waiters()
                else:  # the turn had been given already
                    self.leave()
            raise

    def leave(self) -> None:
        """Leave, and admit waiters, in order, up to the first one that may not enter yet."""
        with self._lock:
            self._inside -= 1
            self._admit_waiters()

    def _admit_waiters(self) -> None:
        while self._waiting and self._waiting[0][1](self._inside):
            turn, _ = self._waiting.popleft()
            # One that is cancelled at this moment leaves by itself; a closed loop's never does.
            self._inside += run_in(turn.get_loop(), _settle, turn, None, None)
