"""What is running in an episode's sandboxes: whose it is, and how it ends with the episode."""

from __future__ import annotations

import asyncio
import math
import sys
import time
from collections.abc import Callable, Collection, Coroutine, Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass
from typing import Any

import anyio
from inspect_ai.util import SandboxEnvironment

from inspect_tinker_plugin.contracts.errors import SandboxError
from inspect_tinker_plugin.episode.cancellation import bounded, contained, modules_of
from inspect_tinker_plugin.inspect_internals.turnstile import Turnstile

Work = Callable[..., Coroutine[Any, Any, Any]]

CANCEL_GRACE = 5.0
"""Seconds that operations have to end after they were cancelled; Inspect gives a command two."""

_MOMENT = 1.0
"""Seconds from the end of what a time-out has cancelled to the exception that tells of it."""


@dataclass(eq=False)
class _Operation:
    """One that is running.

    Attributes:
        part: The part of the episode that asked for it; ``None`` if somebody else did.
        caller: The episode's own task that waits for it.
        idle: Whether its end tells nothing: the caller was cancelled before it asked,
            or while it waited for one of the process's places for commands.
        task: The task that it runs in.
    """

    part: _Part | None
    caller: asyncio.Task[Any] | None
    idle: bool = False
    task: asyncio.Task[Any] | None = None


class Operations:
    """The operations of an episode's sandboxes that are running or were cut off.

    A policy can make them last for ever: it may put a pipe in the place of a file. A solver or
    scorer may leave them running: ``asyncio.gather`` does when one of them fails or is cancelled.
    """

    def __init__(self) -> None:
        self.cut_off_at = -math.inf
        """When one was cancelled last that counts as this part's, by the monotonic clock."""
        self._part = _Part(self)
        self._running: list[_Operation] = []
        self._all_ended: asyncio.Future[None] | None = None
        self._closed = False

    @property
    def running(self) -> int:
        """How many are running."""
        return len(self._running)

    @property
    def just_cut_off(self) -> bool:
        """Whether one was cancelled a moment ago, or goes on, that counts as this part's."""
        return self.awaited or time.monotonic() - self.cut_off_at < _MOMENT

    @property
    def awaited(self) -> bool:
        """Whether one is running that this part of the episode may be waiting for."""
        return any(self._counts(operation) for operation in self._running)

    def begin_part(self) -> None:
        """Tell what the caller starts from now on from what was left running before."""
        self._part = _Part(self)
        _watching.set(self._part)

    @contextmanager
    def of(self, environments: Collection[SandboxEnvironment]) -> Iterator[None]:
        """Watch the environments inside a block, which is the episode's; refuse all after it."""
        _watching.set(self._part)
        for environment in environments:
            for name in _OPERATIONS:
                vars(environment)[name] = self.watched(getattr(environment, name))
        try:
            yield
        finally:
            self._closed = True
            for environment in environments:
                vars(environment).update(dict.fromkeys(_OPERATIONS, _refuse))

    async def cancel(self) -> None:
        """Cancel the episode's own tasks that wait for operations, and give these time to end.

        Tasks whose operation was cancelled before are left alone.
        """
        self._cancel_callers()
        await self.ended(CANCEL_GRACE)

    def cut_off(self) -> None:
        """Cancel the episode's own tasks that wait for operations, and refuse any other.

        A solver or scorer may wait in a shield, where no cancellation of the episode reaches it,
        for a command that the policy has made last for ever.
        """
        self._closed = True
        self._cancel_callers()

    def _cancel_callers(self) -> None:
        for operation in self._running:
            caller, task = operation.caller, operation.task
            if caller is not None and task is not None and not task.cancelling():
                caller.cancel()

    async def ended(self, seconds: float) -> bool:
        """Wait until none is running any more; whether that is so after a number of seconds."""
        if self._running:
            self._all_ended = asyncio.get_running_loop().create_future()
            await asyncio.wait([self._all_ended], timeout=seconds)
        return not self._running

    def _counts(self, operation: _Operation) -> bool:
        return operation.part is None or operation.part is self._part

    def watched(self, operation: Work) -> Work:
        """Make an operation of what waits for the inside of a sandbox."""

        async def watched(*args: Any, **kwargs: Any) -> Any:
            part = _watching.get(None)
            if part is None or part.operations is not self:
                # A trainer may use the sandbox, too, in a task that is not the episode's to cancel.
                asked = _Operation(None, None)
            else:
                # What is asked for in a cancelled scope (by a `finally`) is cancelled at once.
                asked = _Operation(part, asyncio.current_task(), _in_cancelled_scope())
            handled, deadline = sys.exception(), anyio.current_effective_deadline()
            try:
                return await bounded(noted(asked, *args, **kwargs), None, grace=CANCEL_GRACE)
            except asyncio.CancelledError as error:
                if asked.idle or (_in_cancelled_scope() and anyio.current_time() < deadline):
                    vars(error)[_BLAMELESS] = True
                if error.__context__ is None and error is not handled:
                    error.__context__ = handled  # Python forgets it when there was more to await
                raise
            finally:
                asked.caller = None  # who has given it up waits for something else

        async def noted(asked: _Operation, *args: Any, **kwargs: Any) -> Any:
            if self._closed:
                await _refuse()
            asked.task = asyncio.current_task()
            self._running.append(asked)
            try:
                return await contained("a sandbox", operation(*args, **kwargs))
            except asyncio.CancelledError as error:
                asked.idle = asked.idle or _has_waited_for_a_place(error)
                if self._counts(asked) and not asked.idle:
                    self.cut_off_at = time.monotonic()
                raise
            finally:
                self._running.remove(asked)
                if not self._running and self._all_ended and not self._all_ended.done():
                    self._all_ended.set_result(None)

        return watched


_BLAMELESS = "_inspect_rl_blameless"
"""Attribute of a cancellation that tells nothing about the sandbox."""


def is_blameless(error: BaseException) -> bool:
    """Whether a cancellation tells nothing about the sandbox.

    What it has ended had not reached the sandbox, or its scope was cancelled before a deadline: by
    a group, whose failing member is what tells. (What that member is raised about may be lost: in
    a task that is cancelled once more meanwhile, Python puts what the task handles in its place.)
    """
    return _BLAMELESS in vars(error)


def _in_cancelled_scope() -> bool:
    return anyio.current_effective_deadline() == -math.inf


def _has_waited_for_a_place(error: BaseException) -> bool:
    """Whether a cancellation has ended the wait for one of the process's places."""
    return modules_of(error.__traceback__)[-1:] == [Turnstile.__module__]


async def _refuse(*_: object, **__: object) -> None:
    """Stand for an operation of a sandbox that is being released or is gone.

    What a solver leaves running may ask for one at any time; ``local`` would carry it out.
    """
    raise SandboxError("the sandbox is gone: its episode has ended")


@dataclass(frozen=True, eq=False)
class _Part:
    """A part of an episode, with the operations of the episode's sandboxes."""

    operations: Operations


_watching: ContextVar[_Part] = ContextVar("inspect_rl_operations")
"""The part of an episode that a task belongs to."""

_OPERATIONS = ("exec", "read_file", "write_file")
