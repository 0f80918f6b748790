"""Calls functions that users provide, plain or async, with a time limit."""

from __future__ import annotations

import asyncio
import contextlib
import inspect
import threading
from collections.abc import Awaitable, Callable, Coroutine
from contextvars import copy_context
from typing import Any
from weakref import WeakKeyDictionary

from inspect_tinker_plugin.episode.cancellation import being_cancelled, bounded, stray
from inspect_tinker_plugin.errors import RewardError
from inspect_tinker_plugin.rewards.blocking import BlockedLoopError, interrupt_if_blocked

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

    async def run() -> Any:
        try:
            return await work
        except (Exception, asyncio.CancelledError, GeneratorExit, KeyboardInterrupt):
            raise
        except BaseException as ex:  # SystemExit would end the loop
            raise RuntimeError(f"raised {ex!r}") from ex

    return await bounded(run(), None)


async def _watched(work: Awaitable[Any], timeout: float | None) -> Any:
    if timeout is None or not isinstance(work, Coroutine):
        return await work
    return await interrupt_if_blocked(work, after=timeout)


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
            answered.set_exception(RuntimeError(f"raised {error!r}"))

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
