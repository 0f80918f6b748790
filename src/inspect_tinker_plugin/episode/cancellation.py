"""Cancellation: tells real ones from stray ones, contains foreign exceptions, shields clean-up."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from typing import TypeVar

import anyio

T = TypeVar("T")


def being_cancelled() -> bool:
    """Whether this task is being cancelled; a ``CancelledError`` alone may come from a callee."""
    task = asyncio.current_task()
    return task is not None and task.cancelling() > 0


def stray(what: str, error: asyncio.CancelledError) -> RuntimeError:
    """Turn a ``CancelledError`` that nobody asked for into an ordinary error."""
    wrapped = RuntimeError(f"{what} was cancelled, but not by the episode")
    wrapped.__cause__ = error
    return wrapped


async def contained(what: str, work: Awaitable[T]) -> T:
    """Await foreign code; exceptions that would end more than the episode become ordinary errors.

    Raises:
        RuntimeError: It raised ``SystemExit`` or another exception that is not an ``Exception``, as
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
