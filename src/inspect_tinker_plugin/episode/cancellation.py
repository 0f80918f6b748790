"""Cancellation: telling a real one from a stray, and what it must not pass or interrupt."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from typing import TypeVar

import anyio

T = TypeVar("T")


def being_cancelled() -> bool:
    """Whether somebody cancels this task; a ``CancelledError`` alone may be a callee's own."""
    task = asyncio.current_task()
    return task is not None and task.cancelling() > 0


def stray(what: str, error: asyncio.CancelledError) -> RuntimeError:
    """Make an ordinary error of a ``CancelledError`` that nobody asked for."""
    wrapped = RuntimeError(f"{what} was cancelled by nothing that belongs to the episode")
    wrapped.__cause__ = error
    return wrapped


async def contained(what: str, work: Awaitable[T]) -> T:
    """Await somebody's code; what would end more than the episode becomes an ordinary error.

    Raises:
        RuntimeError: It raised ``SystemExit`` or another exception that is no ``Exception``, as
            test frameworks do.
    """
    try:
        return await work
    except (Exception, asyncio.CancelledError, GeneratorExit, KeyboardInterrupt):
        raise
    except BaseException as error:
        if being_cancelled():
            raise
        raise RuntimeError(f"{what} raised {error!r:.200}") from error


async def uninterrupted(work: Callable[[], Awaitable[object]]) -> None:
    """Run clean-up to its end, however often the caller is cancelled meanwhile.

    The work runs in a task of its own, out of reach of the caller's cancel scopes. A
    cancellation that hits that task itself (the loop is shutting down) starts it once more,
    so it must be idempotent.

    Raises:
        CancelledError: The caller was cancelled; the work is done all the same.
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
            task.exception()  # the cancellation goes first
        raise interrupted
    task.result()
