"""What Inspect keeps for the whole process: its limits, how it starts processes, its trace log."""

from __future__ import annotations

import asyncio
import os
import signal
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from contextvars import ContextVar
from typing import Any

import anyio
from anyio.abc import Process
from inspect_ai.util import _concurrency, _subprocess

from inspect_tinker_plugin.inspect_internals.turnstile import ProcessLimiter, ProcessSemaphore

__all__ = [
    "START_PATIENCE",
    "TRACE",
    "ProcessGroups",
    "end_processes",
    "keep_processes",
    "limit_subprocesses",
    "share_limits_between_loops",
    "start_processes_uncut",
]

TRACE = 13
"""Level of the records in Inspect's trace log, between ``DEBUG`` and ``INFO``."""


class _AnyioOfLimits:
    """Replaces ``anyio`` in the module of Inspect's limits, with limiters for all event loops."""

    CapacityLimiter = ProcessLimiter
    Semaphore = ProcessSemaphore

    def __getattr__(self, name: str) -> Any:
        return getattr(anyio, name)


def share_limits_between_loops() -> None:
    """Make Inspect's process-wide limits work with, and count over, all event loops.

    ``concurrency()`` (a model's connections, subprocesses, a tool's own calls) waits in limiters
    that belong to one loop. A trainer with several threads and a loop in each would wait for
    ever, since a waiter that is let in from another loop is not woken.
    """
    if isinstance(_concurrency.anyio, _AnyioOfLimits):  # type: ignore[attr-defined]  # its import
        return
    _concurrency.anyio = _AnyioOfLimits()  # type: ignore[attr-defined,assignment]  # stands in
    made = getattr(_concurrency._concurrency_registry, "_semaphores", {})
    for key, limit in list(made.items()):
        if limit.value >= limit.concurrency:  # one that is in use belongs to a running eval
            made.pop(key, None)


def limit_subprocesses(count: int | None) -> None:
    """Set how many of Inspect's subprocesses run at once; ``None`` leaves that to Inspect.

    The limit is the process's: episodes wait for the subprocesses of others. A release whose
    limits have a fixed size keeps the size of the first subprocess.
    """
    if count is None:
        return
    _subprocess.init_max_subprocesses(count)
    for limit in _concurrency._concurrency_registry.values():
        if limit.name == "subprocesses" and limit.concurrency != count:
            limit.concurrency = count  # type: ignore[misc]  # a property that can be set


START_PATIENCE = 0.5
"""Seconds that a process whose start was cancelled has to finish starting, before it is killed."""

_open_process = _subprocess.open_process  # type: ignore[attr-defined]  # its import


async def _open_process_uncut(*args: Any, **kwargs: Any) -> Process:
    """Start a process for Inspect; if the start is cancelled, finish it and kill the process.

    asyncio itself waits for a process whose start is cancelled, and does so for ever if its pipes
    were not connected yet: they are connected in another task, which a loop that ends cancels as
    well. Only a second cancellation ends that wait, and nobody else sends one.
    """
    kept = _kept.get()
    if kept is not None:
        kwargs["start_new_session"] = True
    starting = asyncio.ensure_future(_open_process(*args, **kwargs))
    try:
        process = await asyncio.shield(starting)
        if kept is not None:
            kept[process.pid] = process
            _end_at_once(process)
        return process
    except asyncio.CancelledError:
        # Done by the loop: this task may be cancelled again, and leave.
        asyncio.get_running_loop().call_later(START_PATIENCE, starting.cancel)
        starting.add_done_callback(_kill if kept is None else _kill_group)
        with anyio.CancelScope(shield=True):
            await asyncio.wait([starting])
            if not starting.cancelled() and starting.exception() is None:
                with suppress(Exception), anyio.move_on_after(START_PATIENCE):
                    await starting.result().aclose()
        raise


def _kill_group(started: asyncio.Task[Process]) -> None:
    if not started.cancelled() and started.exception() is None:
        with suppress(ProcessLookupError, PermissionError):
            os.killpg(started.result().pid, signal.SIGKILL)


_CLOSE_SECONDS = 2.5
"""Seconds from a process's termination until its pipes are closed. Inspect kills it after two."""

ProcessGroups = dict[int, Process | asyncio.subprocess.Process]
"""Ids of process groups, with the process that leads each of them."""

_kept: ContextVar[ProcessGroups | None] = ContextVar("inspect_rl_processes", default=None)
"""Process groups of what is started here; ``None`` where nobody keeps them."""


@contextmanager
def keep_processes(groups: ProcessGroups) -> Iterator[None]:
    """Give each process that Inspect starts here a group of its own, and keep the group.

    Groups of which nothing is left are forgotten at the end.
    """
    token = _kept.set(groups) if os.name == "posix" else None
    try:
        yield
    finally:
        if token is not None:
            _kept.reset(token)
        for group in [group for group in groups if not _lives(os.killpg, group)]:
            del groups[group]


def end_processes(groups: ProcessGroups) -> None:
    """Kill what is left of groups that were kept."""
    for group, leader in groups.items():
        # If another process has the id of one that has ended, so may another group.
        if leader.returncode is None or not _lives(os.kill, group):
            with suppress(ProcessLookupError, PermissionError):
                os.killpg(group, signal.SIGKILL)
    groups.clear()


def _lives(send: Any, number: int) -> bool:
    try:
        send(number, 0)
    except ProcessLookupError:
        return False
    except PermissionError:
        return True
    return True


def _end_at_once(process: Process) -> None:
    """Let nobody wait for the children of a process that was cut off.

    They may hold its output open, and Inspect waits for the end of that.
    """
    terminate = process.terminate

    def close_pipes() -> None:
        transport = getattr(process, "_transport", None)
        for number in (0, 1, 2):
            pipe = transport.get_pipe_transport(number) if transport else None
            if pipe is not None:
                pipe.close()

    def terminate_at_once() -> None:
        terminate()
        asyncio.get_running_loop().call_later(_CLOSE_SECONDS, close_pipes)

    process.terminate = terminate_at_once  # type: ignore[method-assign]


def _kill(started: asyncio.Task[Process]) -> None:
    if not started.cancelled() and started.exception() is None:
        with suppress(ProcessLookupError):
            started.result().kill()


def start_processes_uncut() -> None:
    """Make Inspect start its processes such that an event loop can end at any moment."""
    _subprocess.open_process = _open_process_uncut  # type: ignore[attr-defined]  # its import
