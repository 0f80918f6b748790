"""The sandbox operations of an episode: what a failure is about, and how they end with it."""

from __future__ import annotations

import asyncio
import errno
import math
import time
from collections.abc import Collection, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import PurePosixPath
from typing import Any

import anyio
from inspect_ai.util import OutputLimitExceededError, SandboxEnvironment

from inspect_tinker_plugin.contracts.errors import Cause, SandboxError
from inspect_tinker_plugin.contracts.sandboxes import Work
from inspect_tinker_plugin.episode.boundaries import Boundaries, Stamp, running_boundaries
from inspect_tinker_plugin.inspect_internals import SandboxTimeoutError
from inspect_tinker_plugin.processes.loops import bounded, contained, wait_for_end

CANCEL_GRACE = 5.0
"""Seconds that operations have to end after they were cancelled; Inspect gives a command two."""

_TICK = 0.05
"""Seconds by which a time-out may seem to come early."""

_OF_FILES = (PermissionError, IsADirectoryError)
_OF_OUTPUT = (UnicodeDecodeError, PermissionError, OutputLimitExceededError)
_IN_CONTRACT: dict[str, tuple[type[Exception], ...]] = {
    "exec": _OF_OUTPUT,
    "read_file": (FileNotFoundError, *_OF_FILES, *_OF_OUTPUT),
    "write_file": _OF_FILES,
}
"""What ``SandboxEnvironment`` says that its operations raise about files and commands. A time-out
is about a command only if the caller has set one; those of files are the provider's own."""

_OF_THIS_MACHINE = frozenset({errno.EMFILE, errno.ENFILE, errno.EAGAIN, errno.ENOMEM})
"""What the kernel of this machine says about any path when it has nothing left for a provider."""


@dataclass(eq=False)
class _Operation:
    """One that somebody waits for.

    Attributes:
        name: Name of the method.
        path: The file, or the program of a command.
        timeout: The time-out of a command, if it was given one.
        caller: The episode's own task that waits for it; ``None`` if somebody else does, as a
            trainer may.
        idle: Whether its caller had been cancelled before it asked (in a ``finally``), so that
            its own cancellation tells nothing.
        task: The task that it runs in.
        since: When it was asked for.
    """

    name: str
    path: str
    timeout: float | None
    caller: asyncio.Task[Any] | None
    idle: bool = False
    task: asyncio.Task[Any] | None = None
    since: float = field(default_factory=time.monotonic)

    def stamp(self, error: BaseException | None = None) -> Stamp:
        """Make the stamp of what it has raised, or of its cancellation."""
        inside = error is None or self._is_about_inside(error)
        cause = Cause.INSIDE_SANDBOX if inside else Cause.SANDBOX
        return Stamp(cause, f"{self.name}() of the sandbox")

    def _is_about_inside(self, error: BaseException) -> bool:
        """Whether an exception is about the file or command, and not the way to the sandbox."""
        if isinstance(error, SandboxTimeoutError):  # which Inspect makes of any TimeoutError
            error = error.__cause__ or error
        if isinstance(error, TimeoutError):
            plain = type(error) in (TimeoutError, SandboxTimeoutError) and error.errno is None
            passed = time.monotonic() - self.since + _TICK
            return plain and self.timeout is not None and passed >= self.timeout
        if isinstance(error, OSError) and error.errno is not None:
            # Made by a kernel. It is about the sandbox only if it names what was asked for.
            missing_program = self.name == "exec" and isinstance(error, FileNotFoundError)
            refused = error.errno in _OF_THIS_MACHINE
            return self._is_path(error.filename) and not missing_program and not refused
        return isinstance(error, _IN_CONTRACT.get(self.name, ()))

    def _is_path(self, found: object) -> bool:
        """Whether a path is the one that was asked for, which the provider may have made whole."""
        asked = PurePosixPath(self.path).parts
        return isinstance(found, str) and PurePosixPath(found).parts[-len(asked) :] == asked != ()


class Operations:
    """The operations that are running in an episode's sandboxes.

    A policy can make them last for ever: it may put a pipe in the place of a file. A solver or
    scorer may leave them running: ``asyncio.gather`` does when one of them fails or is cancelled.
    """

    def __init__(self) -> None:
        self._boundaries = running_boundaries() or Boundaries()
        self._running: list[_Operation] = []
        self._closed = False

    @property
    def running(self) -> int:
        """How many are running."""
        return len(self._running)

    @property
    def awaited(self) -> bool:
        """Whether one is running that this part of the episode may be waiting for."""
        return any(operation.since >= self._boundaries.since for operation in self._running)

    @contextmanager
    def watch(self, environments: Collection[SandboxEnvironment]) -> Iterator[None]:
        """Watch the environments inside a block, which is the episode's; refuse all after it."""
        for environment in environments:
            for name in _IN_CONTRACT:
                vars(environment)[name] = self.watched(getattr(environment, name), name)
        try:
            yield
        finally:
            self._closed = True
            for environment in environments:
                vars(environment).update(dict.fromkeys(_IN_CONTRACT, _refuse))

    def cut_off(self) -> None:
        """Cancel the episode's own tasks that wait for operations, and refuse any other.

        A solver or scorer may wait in a shield, where no cancellation of the episode reaches it,
        for a command that the policy has made last for ever.
        """
        self._closed = True
        for operation in self._running:
            caller, task = operation.caller, operation.task
            if caller is not None and task is not None and not task.cancelling():
                caller.cancel()

    async def wait_for_all(self, seconds: float) -> bool:
        """Wait until all that run have ended; whether that is so after a number of seconds."""
        tasks = [operation.task for operation in self._running if operation.task is not None]
        await asyncio.gather(*(wait_for_end(task, seconds) for task in tasks))
        return not self._running

    def watched(self, operation: Work, name: str = "exec_remote") -> Work:
        """Make an operation of what waits for the inside of a sandbox."""

        async def watched(*args: Any, **kwargs: Any) -> Any:
            asked = self._describe(name, args, kwargs)
            work = self._run(asked, operation, args, kwargs)
            try:
                return await bounded(work, None, grace=CANCEL_GRACE)
            except asyncio.CancelledError:
                if not asked.idle:
                    self._boundaries.note_cut_off(asked.stamp(), asked.since)
                raise
            except Exception as error:
                self._boundaries.stamp(error, asked.stamp(error))
                raise
            finally:
                asked.caller = None  # who has given it up waits for something else

        return watched

    def _describe(self, name: str, args: tuple[Any, ...], kwargs: dict[str, Any]) -> _Operation:
        first = args[0] if args else kwargs.get("cmd", kwargs.get("file", ""))
        path = first[0] if isinstance(first, list) and first else first
        # the proxy of Inspect and its tools give all but the command by name
        timeout = kwargs.get("timeout", args[5] if len(args) > 5 else None)
        own = running_boundaries() is self._boundaries
        caller = asyncio.current_task() if own else None
        idle = anyio.current_effective_deadline() == -math.inf
        return _Operation(name, str(path), timeout, caller, idle)

    async def _run(self, asked: _Operation, operation: Work, args: Any, kwargs: Any) -> Any:
        if self._closed:
            await _refuse()
        asked.task = asyncio.current_task()
        self._running.append(asked)
        try:
            return await contained("a sandbox", operation(*args, **kwargs))
        finally:
            self._running.remove(asked)


async def _refuse(*_: object, **__: object) -> None:
    """Stand for an operation of a sandbox that is being released or is gone.

    What a solver leaves running may ask for one at any time; ``local`` would carry it out.
    """
    raise SandboxError("the sandbox is gone: its episode has ended")
