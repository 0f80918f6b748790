"""Calls functions that users provide, plain or async, with a time limit.

An async reward function runs in the loop of the rollouts, since it may use objects that belong
to that loop (a judge's model, a semaphore). While it blocks, the loop stands still and its timers
with it, so that no time-out of the loop can fire. A separate thread therefore watches each step of
such a coroutine, and raises an exception inside the one that takes too long: at its next line of
Python, and in the main thread also inside a call that waits in the operating system
(``time.sleep``, a socket, a lock).
"""

from __future__ import annotations

import asyncio
import contextlib
import ctypes
import functools
import inspect
import signal
import threading
import types
from collections.abc import Awaitable, Callable, Coroutine, Generator
from contextvars import copy_context
from typing import Any, TypeVar
from weakref import WeakKeyDictionary

from inspect_tinker_plugin.contracts.errors import RewardError
from inspect_tinker_plugin.processes.cancellation import (
    being_cancelled,
    bounded,
    contained,
    raised_by,
    stray,
)

T = TypeVar("T")

_AGAIN = 1.0
"""Seconds until a step that swallowed its interruption is interrupted again."""


class BlockedLoopError(RuntimeError):
    """A coroutine blocked the event loop and was interrupted."""


class _Interruption(BaseException):
    """Raised inside a blocking step; not an ``Exception``, so that the step does not handle it."""


@types.coroutine
def _interrupt_if_blocked(
    coroutine: Coroutine[Any, Any, T], after: float
) -> Generator[Any, Any, T]:
    """Await a coroutine; interrupt it when one of its steps blocks the event loop too long.

    Args:
        coroutine: what to await.
        after: seconds that one step may take.

    Raises:
        BlockedLoopError: a step took longer.
    """
    advance: Any = coroutine.send
    value: Any = None
    try:
        while True:
            try:
                yielded = _step(advance, value, after)
            except StopIteration as end:
                answer: T = end.value
                return answer
            try:
                value = yield yielded
                advance = coroutine.send
            except BaseException as error:
                value, advance = error, coroutine.throw
    finally:
        coroutine.close()


def _step(advance: Any, value: Any, after: float) -> Any:
    """Run a coroutine up to its next await; a thread interrupts it when it is late."""
    step = _Step()
    threading.Thread(target=step.interrupt_if_late, args=(after,), daemon=True).start()
    try:
        try:
            return advance(value)
        finally:
            step.end()
            if step.interrupted:  # it may have swallowed the interruption
                raise BlockedLoopError("the event loop was blocked")
    except _Interruption:
        step.end()
        raise BlockedLoopError("the event loop was blocked") from None


class _Step:
    """The time between two awaits of a coroutine, in the thread that makes it."""

    def __init__(self) -> None:
        self.interrupted = False
        self._thread = threading.get_ident()
        self._main = self._thread == threading.main_thread().ident
        self._lock = threading.Lock()
        self._ended = threading.Event()
        if self._main:
            _accept_nudges()

    def interrupt_if_late(self, after: float) -> None:
        """Wait for the step's end; raise an exception in its thread when its time is over."""
        while not self._ended.wait(after):
            with self._lock:
                if self._ended.is_set():
                    return
                self.interrupted = True
                _raise_in(self._thread, _Interruption)
                if self._main and _NUDGE is not None:
                    # ends a wait in the operating system; the exception is raised in the handler
                    signal.pthread_kill(self._thread, _NUDGE)
            after = _AGAIN

    def end(self) -> None:
        """End the step; an interruption that has not been raised by now is withdrawn."""
        with self._lock:
            self._ended.set()
            if self.interrupted:
                _raise_in(self._thread, None)


_NUDGE: signal.Signals | None = getattr(signal, "SIGURG", None)
"""A signal that does nothing by default, and that is rarely used."""


@functools.cache
def _accept_nudges() -> None:
    """Handle the signal in Python, so that it interrupts calls; keep an existing handler."""
    if _NUDGE is not None and signal.getsignal(_NUDGE) in (signal.SIG_DFL, signal.SIG_IGN):
        signal.signal(_NUDGE, _nudged)


def _nudged(number: int, frame: object) -> None:
    """Do nothing: the pending exception is raised here."""


def _raise_in(thread: int, kind: type[BaseException] | None) -> None:
    """Raise an exception in a thread asynchronously; ``None`` withdraws it."""
    ctypes.pythonapi.PyThreadState_SetAsyncExc(
        ctypes.c_ulong(thread), None if kind is None else ctypes.py_object(kind)
    )


DEFAULT_TIMEOUT = 60.0
"""Seconds that an aggregator may take for one episode."""

DEFAULT_GROUP_TIMEOUT = 600.0
"""Seconds that a group aggregator may take for one group; a judge may ask a model many times."""

_THREADS = 32
"""Maximum number of plain functions that run at once in one event loop."""

_places: WeakKeyDictionary[asyncio.AbstractEventLoop, asyncio.Semaphore] = WeakKeyDictionary()


class OutOfTimeError(Exception):
    """A function did not return in time."""


async def call_function(
    function: Callable[..., Any], *arguments: Any, timeout: float | None = None
) -> Any:
    """Call a plain or async function.

    A plain one runs in its own thread, so that it cannot block the loop. The thread of a function
    that never returns is left behind, and does not keep the process from ending. An async one runs
    in the loop, where it may use objects that belong to the loop; if it blocks the loop for the
    whole time, it is interrupted.

    Raises:
        OutOfTimeError: it did not return in time.
        RuntimeError: it raised something that would end more than itself (``SystemExit``, a
            cancellation that nobody asked for).
    """
    if _is_async(function):
        return await _within(timeout, _apart(_watched(function(*arguments), timeout)))
    places = _places.setdefault(asyncio.get_running_loop(), asyncio.Semaphore(_THREADS))
    async with places:
        answer = await _within(timeout, _in_thread(function, arguments))
    if isinstance(answer, Awaitable):
        return await _within(timeout, _apart(_watched(answer, timeout)))
    return answer


async def _within(timeout: float | None, work: Awaitable[Any]) -> Any:
    try:
        async with asyncio.timeout(timeout) as scope:
            return await work
    except (TimeoutError, BlockedLoopError) as ex:
        if _blocked(ex):
            raise OutOfTimeError(
                f"blocked the event loop for {timeout:g} seconds and was interrupted; make it a "
                "plain function, which runs in a thread, or await what it waits for"
            ) from ex
        if scope.expired():
            raise OutOfTimeError(f"gave nothing within {timeout:g} seconds") from ex
        raise
    except asyncio.CancelledError as ex:
        if being_cancelled():
            raise
        raise stray("it", ex) from ex


def _blocked(error: BaseException | None) -> bool:
    """Tell whether the loop was blocked: then a time-out is late, and only comes after it."""
    while error is not None and not isinstance(error, BlockedLoopError):
        error = error.__cause__
    return error is not None


async def _apart(work: Coroutine[Any, Any, Any]) -> Any:
    """Await in a separate task, so that a cancellation in it cancels nothing else."""
    return await bounded(contained("it", work), None)


async def _watched(work: Awaitable[Any], timeout: float | None) -> Any:
    if timeout is None or not isinstance(work, Coroutine):
        return await work
    return await _interrupt_if_blocked(work, timeout)


async def _in_thread(function: Callable[..., Any], arguments: tuple[Any, ...]) -> Any:
    """Run a plain function in a daemon thread: those of executors are waited for at exit."""
    loop = asyncio.get_running_loop()
    answered: asyncio.Future[Any] = loop.create_future()
    context = copy_context()

    def settle(answer: Any, error: BaseException | None) -> None:
        if answered.done():  # nobody waits any more
            return
        if error is None:
            answered.set_result(answer)
        elif isinstance(error, Exception) and not isinstance(error, StopIteration):
            answered.set_exception(error)
        else:
            answered.set_exception(raised_by("it", error))

    def run() -> None:
        answer, error = None, None
        try:
            answer = context.run(function, *arguments)
        except BaseException as ex:
            error = ex
        with contextlib.suppress(RuntimeError):  # the loop is closed
            loop.call_soon_threadsafe(settle, answer, error)

    threading.Thread(target=run, name=f"reward {object_name(function)}", daemon=True).start()
    return await answered


def require_one_argument(spec: object, role: str) -> None:
    """Refuse an object that cannot be called with one argument.

    Raises:
        RewardError: it is not callable, or takes other arguments.
    """
    if not callable(spec) or isinstance(spec, type):
        raise RewardError(
            f"{role}: {spec!r:.80} is neither an expression, an aggregator nor a function"
        )
    try:
        signature = inspect.signature(spec)
    except ValueError:
        return  # a builtin without a signature
    try:
        signature.bind(None)
    except TypeError as ex:
        raise RewardError(f"{role}: {object_name(spec)} must take one argument: {ex}") from ex


def object_name(spec: object) -> str:
    """Name a function or an object for messages."""
    return getattr(spec, "__qualname__", None) or type(spec).__qualname__


def _is_async(function: Callable[..., Any]) -> bool:
    return inspect.iscoroutinefunction(function) or inspect.iscoroutinefunction(
        getattr(function, "__call__", None)  # noqa: B004 - the method itself, to look at
    )
