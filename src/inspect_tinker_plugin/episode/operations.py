"""The sandbox operations of an episode: their causes, and how they end with the episode."""

from __future__ import annotations

import asyncio
import errno
import math
import time
from collections.abc import Callable, Collection, Coroutine, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import PurePosixPath
from typing import Any

import anyio
from inspect_ai.util import OutputLimitExceededError, SandboxEnvironment

from inspect_tinker_plugin.contracts.errors import Cause, SandboxError
from inspect_tinker_plugin.episode.boundaries import (
    Boundaries,
    Part,
    Stamp,
    running_part,
)
from inspect_tinker_plugin.inspect_internals import SandboxTimeoutError
from inspect_tinker_plugin.inspect_internals.turnstile import waited_in_vain
from inspect_tinker_plugin.processes.cancellation import bounded, contained

Work = Callable[..., Coroutine[Any, Any, Any]]

CANCEL_GRACE = 5.0
"""Seconds that operations have to end after they were cancelled; Inspect gives a command two."""

_TICK = 0.05
"""Seconds by which a time-out may seem to come early."""

_OPERATIONS = ("exec", "read_file", "write_file")

_IN_CONTRACT: dict[str, tuple[type[Exception], ...]] = {
    "exec": (UnicodeDecodeError, PermissionError, OutputLimitExceededError),
    "read_file": (
        FileNotFoundError,
        UnicodeDecodeError,
        PermissionError,
        IsADirectoryError,
        OutputLimitExceededError,
    ),
    "write_file": (PermissionError, IsADirectoryError),
}
"""What ``SandboxEnvironment`` says that its operations raise about files and commands. A time-out
is about a command only if the caller has set one; those of files are the provider's own."""

_OF_THIS_MACHINE = frozenset({errno.EMFILE, errno.ENFILE, errno.EAGAIN, errno.ENOMEM})
"""What the kernel of this machine says about any path when it has nothing left for a provider."""


@dataclass(frozen=True)
class _Asked:
    """What an operation was asked for.

    Attributes:
        name: Name of the method.
        path: The file, or the program of a command.
        timeout: The time-out of a command, if it was given one.
    """

    name: str
    path: str
    timeout: float | None

    @classmethod
    def of(cls, name: str, args: tuple[Any, ...], kwargs: dict[str, Any]) -> _Asked:
        first = args[0] if args else kwargs.get("cmd", kwargs.get("file", ""))
        path = first[0] if isinstance(first, list) and first else first
        # the proxy of Inspect and its tools give all but the command by name
        timeout = kwargs.get("timeout", args[5] if len(args) > 5 else None)
        return cls(name, str(path), timeout)

    @property
    def call(self) -> str:
        """The operation in words."""
        return f"{self.name}() of the sandbox"

    def is_about_inside(self, error: BaseException, seconds: float) -> bool:
        """Whether an exception tells of the file or command, and not of the way to the sandbox."""
        if isinstance(error, SandboxTimeoutError):  # which Inspect makes of any TimeoutError
            error = error.__cause__ or error
        if isinstance(error, TimeoutError):
            plain = type(error) in (TimeoutError, SandboxTimeoutError) and error.errno is None
            return plain and self.timeout is not None and seconds + _TICK >= self.timeout
        if isinstance(error, OSError) and error.errno is not None:
            # Made by a kernel. It is about the sandbox only if it names what was asked for.
            missing_program = self.name == "exec" and isinstance(error, FileNotFoundError)
            refused = error.errno in _OF_THIS_MACHINE
            return self._is_path(error.filename) and not missing_program and not refused
        return isinstance(error, _IN_CONTRACT.get(self.name, ()))

    def _is_path(self, found: object) -> bool:
        """Whether a path is the one that was asked for, which the provider may have made whole."""
        if not isinstance(found, str) or not self.path:
            return False
        asked, parts = PurePosixPath(self.path).parts, PurePosixPath(found).parts
        return parts[-len(asked) :] == asked


@dataclass(eq=False)
class _Operation:
    """One that is running.

    Attributes:
        part: The part of the episode that asked for it; ``None`` if somebody else did.
        caller: The episode's own task that waits for it.
        idle: Whether its cancellation tells nothing: the caller was cancelled before it asked,
            or while it waited for one of the process's places for commands.
        task: The task that it runs in.
    """

    part: Part | None
    caller: asyncio.Task[Any] | None
    idle: bool = False
    task: asyncio.Task[Any] | None = None

    @property
    def counts(self) -> bool:
        """Whether the running part of the episode may be waiting for it."""
        return self.part is None or self.part.is_current


class Operations:
    """The operations that are running in an episode's sandboxes.

    A policy can make them last for ever: it may put a pipe in the place of a file. A solver or
    scorer may leave them running: ``asyncio.gather`` does when one of them fails or is cancelled.
    """

    def __init__(self) -> None:
        part = running_part()
        self._boundaries = Boundaries() if part is None else part.boundaries
        self._running: list[_Operation] = []
        self._all_ended: asyncio.Future[None] | None = None
        self._closed = False

    @property
    def running(self) -> int:
        """How many are running."""
        return len(self._running)

    @property
    def awaited(self) -> bool:
        """Whether one is running that this part of the episode may be waiting for."""
        return any(operation.counts for operation in self._running)

    @contextmanager
    def of(self, environments: Collection[SandboxEnvironment]) -> Iterator[None]:
        """Watch the environments inside a block, which is the episode's; refuse all after it."""
        for environment in environments:
            for name in _OPERATIONS:
                vars(environment)[name] = self.watched(getattr(environment, name), name)
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

    def watched(self, operation: Work, name: str = "exec_remote") -> Work:
        """Make an operation of what waits for the inside of a sandbox."""

        async def watched(*args: Any, **kwargs: Any) -> Any:
            part = running_part()
            if part is None or part.boundaries is not self._boundaries:
                # A trainer may use the sandbox, too, in a task that is not the episode's to cancel.
                started = _Operation(None, None)
            else:
                # What is asked for in a cancelled scope (by a `finally`) is cancelled at once.
                started = _Operation(part, asyncio.current_task(), _in_cancelled_scope())
            asked, since = _Asked.of(name, args, kwargs), time.monotonic()
            try:
                return await bounded(run(started, args, kwargs), None, grace=CANCEL_GRACE)
            except asyncio.CancelledError:
                if started.counts and not started.idle:
                    stamp = Stamp(Cause.INSIDE_SANDBOX, asked.call)
                    self._boundaries.note_cut_off(stamp)
                raise
            except Exception as error:
                self._stamp(error, asked, time.monotonic() - since)
                raise
            finally:
                started.caller = None  # who has given it up waits for something else

        async def run(started: _Operation, args: Any, kwargs: Any) -> Any:
            if self._closed:
                await _refuse()
            started.task = asyncio.current_task()
            waited_in_vain.set(False)
            self._running.append(started)
            try:
                return await contained("a sandbox", operation(*args, **kwargs))
            except asyncio.CancelledError:
                started.idle = started.idle or waited_in_vain.get()
                raise
            finally:
                self._running.remove(started)
                if not self._running and self._all_ended and not self._all_ended.done():
                    self._all_ended.set_result(None)

        return watched

    def _stamp(self, error: Exception, asked: _Asked, seconds: float) -> None:
        inside = asked.is_about_inside(error, seconds)
        cause = Cause.INSIDE_SANDBOX if inside else Cause.SANDBOX
        self._boundaries.stamp(error, Stamp(cause, asked.call))


def _in_cancelled_scope() -> bool:
    return anyio.current_effective_deadline() == -math.inf


async def _refuse(*_: object, **__: object) -> None:
    """Stand for an operation of a sandbox that is being released or is gone.

    What a solver leaves running may ask for one at any time; ``local`` would carry it out.
    """
    raise SandboxError("the sandbox is gone: its episode has ended")
