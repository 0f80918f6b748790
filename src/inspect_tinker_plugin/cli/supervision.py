"""Runs async work in a separate thread, so that work that never ends cannot block a command."""

from __future__ import annotations

import asyncio
import queue
import threading
from collections.abc import AsyncIterator, Callable, Iterator
from contextvars import copy_context
from typing import TypeVar

from inspect_tinker_plugin.errors import InspectRLError

T = TypeVar("T")

_CLEAN_UP = 30.0
"""Seconds for the clean-up of the work when the command is interrupted."""


class StuckWorkError(InspectRLError):
    """The work did not answer in time, and cannot be stopped: it blocks, or refuses to end."""


def stream_from_thread(work: Callable[[], AsyncIterator[T]], *, patience: float) -> Iterator[T]:
    """Yield the items of an async iterator, from an event loop in a daemon thread.

    An interrupt (Ctrl-C) cancels the work and waits for its clean-up.

    Args:
        work: makes the iterator; called in the thread.
        patience: seconds to wait for one item.

    Raises:
        StuckWorkError: no item came in time; the thread is left behind.
    """
    items: queue.Queue[tuple[str, object]] = queue.Queue()
    loop = asyncio.new_event_loop()
    tasks: list[asyncio.Task[None]] = []

    async def forward() -> None:
        async for item in work():
            items.put(("item", item))

    def run() -> None:
        asyncio.set_event_loop(loop)
        try:
            task = loop.create_task(forward())
            tasks.append(task)
            loop.run_until_complete(task)
            items.put(("end", None))
        except BaseException as error:
            items.put(("error", error))
        else:
            loop.run_until_complete(loop.shutdown_asyncgens())
            loop.close()

    thread = threading.Thread(
        target=copy_context().run, args=(run,), name="supervised", daemon=True
    )
    thread.start()
    try:
        while True:
            try:
                kind, item = items.get(timeout=patience)
            except queue.Empty:
                raise StuckWorkError(
                    f"nothing happened for {patience:g} seconds: the solver blocks the event loop"
                ) from None
            if kind == "end":
                return
            if kind == "error":
                assert isinstance(item, BaseException)
                raise item
            yield item  # type: ignore[misc]  # what forward() put there
    except KeyboardInterrupt:
        for task in tasks:
            loop.call_soon_threadsafe(task.cancel)
        thread.join(_CLEAN_UP)
        raise
