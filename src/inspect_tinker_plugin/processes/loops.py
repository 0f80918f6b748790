"""Waits in event loops: for other threads, and for foreign code that may be cancelled."""

from __future__ import annotations

import asyncio
import threading
from collections import deque
from collections.abc import AsyncIterator, Awaitable, Callable, Coroutine
from contextlib import asynccontextmanager, suppress
from typing import Any, TypeVar

import anyio

T = TypeVar("T")

GRACE = 1.0
"""Seconds that somebody's code has to end after it was cancelled for taking too long."""

# asyncio holds tasks only weakly, and complains of those that are collected while they wait.
_abandoned: set[asyncio.Task[Any]] = set()


NOT_BY_THE_EPISODE = "was cancelled, but not by the episode"
"""Part of the message of an error that replaces a cancellation which nobody asked for."""


class GivenUpError(TimeoutError):
    """Somebody's code did not end in its time."""


def is_being_cancelled() -> bool:
    """Whether this task is being cancelled; a ``CancelledError`` alone may come from a callee."""
    task = asyncio.current_task()
    return task is not None and task.cancelling() > 0


def wrap_cancelled(what: str, error: asyncio.CancelledError) -> RuntimeError:
    """Turn a ``CancelledError`` that nobody asked for into an ordinary error."""
    wrapped = RuntimeError(f"{what} {NOT_BY_THE_EPISODE}")
    wrapped.__cause__ = error
    return wrapped


async def contain(what: str, work: Awaitable[T]) -> T:
    """Await foreign code; exceptions that would end more than the episode become ordinary errors.

    Raises:
        RuntimeError: It raised ``SystemExit`` or another exception that is not an ``Exception``, as
            test frameworks do.
    """
    task = asyncio.current_task()
    try:
        return await work
    except (Exception, asyncio.CancelledError, KeyboardInterrupt):
        raise
    except BaseException as error:
        # Who closes a coroutine throws this in, from outside of its task.
        closing = isinstance(error, GeneratorExit) and not _is_running(task)
        if closing or is_being_cancelled():
            raise
        raise raised_by(what, error) from error
    finally:
        del task  # it keeps the traceback of its exception, which refers to this frame


def _is_running(task: asyncio.Task[Any] | None) -> bool:
    try:
        return task is not None and asyncio.current_task() is task
    except RuntimeError:  # no loop runs
        return False


def raised_by(what: str, error: BaseException) -> RuntimeError:
    """Make an ordinary error of an exception that is not an ``Exception``."""
    return RuntimeError(f"{what} raised {error!r:.200}")


async def run_bounded(
    work: Coroutine[Any, Any, T], seconds: float | None, *, grace: float | None = None
) -> T:
    """Await somebody's code in a separate task, for a limited time.

    A time-out alone limits only code that can be cancelled. Code that has not ended within the
    grace period after its cancellation is abandoned. Until then it is cancelled once, however often
    the caller is: anyio cancels who waits in ``asyncio.gather`` over and over, which would cut off
    clean-up. When it is abandoned it is cancelled again, which ends a clean-up that waits without
    end and holds what others wait for: one of Inspect's places for subprocesses, say.

    Args:
        work: A coroutine.
        seconds: How long it may take; ``None`` for no limit.
        grace: Seconds it has to end after it is cancelled; ``GRACE`` if not given.

    Raises:
        CancelledError: The caller was cancelled; what the code raises is its cause, and what it
            returns is dropped.
        GivenUpError: It took longer.
    """
    grace = GRACE if grace is None else grace
    task, late = asyncio.ensure_future(work), False
    try:
        await asyncio.wait([task], timeout=seconds)
        if not task.done():
            late = True
            task.cancel()
            await asyncio.wait([task], timeout=grace)
    except asyncio.CancelledError as cancelled:
        task.cancel()
        with suppress(asyncio.CancelledError):
            await run_uninterrupted(lambda: asyncio.wait([task], timeout=grace))
        raised = task.exception() if task.done() and not task.cancelled() else None
        raise cancelled from raised
    finally:
        if not task.done():
            _abandoned.add(task)
            task.add_done_callback(_forget)
            task.cancel()
        elif not task.cancelled():
            task.exception()  # who was cancelled meanwhile does not ask for it
    if late and (not task.done() or task.cancelled()):
        raise GivenUpError(f"it did not end within {seconds:g} seconds")
    return task.result()


def _forget(task: asyncio.Task[Any]) -> None:
    _abandoned.discard(task)
    if not task.cancelled():
        task.exception()


async def run_uninterrupted(work: Callable[[], Awaitable[object]]) -> None:
    """Run clean-up to its end, however often the caller is cancelled in the meantime.

    The work runs in its own task, out of reach of the caller's cancel scopes. A
    cancellation that hits that task itself (the loop is shutting down) starts it once more,
    so it must be idempotent.

    Raises:
        CancelledError: The caller was cancelled; the work has finished nevertheless.
    """

    async def run() -> None:
        try:
            await work()
        except asyncio.CancelledError:
            await work()

    task = asyncio.ensure_future(run())
    interrupted: asyncio.CancelledError | None = None
    with anyio.CancelScope(shield=True):
        while not task.done():
            try:
                await asyncio.wait([task])
            except asyncio.CancelledError as error:
                interrupted = error
    if interrupted is not None:
        if not task.cancelled():
            task.exception()  # the cancellation has precedence
        raise interrupted
    task.result()


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


class Places:
    """Places for a process, given first come first served, whichever loop waits for one.

    Each caller brings a bound of its own, and gets a place when fewer than that are held: callers
    with eight and with four hold at most eight between them.

    Attributes:
        alive: Places held now.
    """

    def __init__(self) -> None:
        self.alive = 0
        self._waiting: deque[tuple[asyncio.Future[None], int]] = deque()
        # The collector may close an abandoned waiter while this thread is in here.
        self._lock = threading.RLock()

    @asynccontextmanager
    async def place(self, bound: int | None) -> AsyncIterator[None]:
        """Hold a place, among fewer than ``bound`` others; without one, wait for nobody."""
        await self._enter(bound)
        try:
            yield
        finally:
            self._leave()

    async def _enter(self, bound: int | None) -> None:
        with self._lock:
            if bound is None or (not self._waiting and self.alive < bound):
                self.alive += 1
                return
            turn = asyncio.get_running_loop().create_future()
            waiter = turn, bound
            self._waiting.append(waiter)
        try:
            await turn
        except BaseException:
            with self._lock:
                if waiter in self._waiting:
                    self._waiting.remove(waiter)
                    self._admit_waiters()
                else:  # the turn had been given already
                    self._leave()
            raise

    def _leave(self) -> None:
        with self._lock:
            self.alive -= 1
            self._admit_waiters()

    def _admit_waiters(self) -> None:
        """Give places to waiters, in order, up to the first one whose bound is reached."""
        while self._waiting and self.alive < self._waiting[0][1]:
            turn, _ = self._waiting.popleft()
            # One that is cancelled at this moment leaves by itself; a closed loop's never does.
            self.alive += run_in(turn.get_loop(), _settle, turn, None, None)
