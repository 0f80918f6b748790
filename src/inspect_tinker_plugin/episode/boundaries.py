"""Attributes exceptions to the part of an episode that raised them, where foreign code is called.

Whoever calls foreign code (a sandbox operation, a tool, a judge, the policy) stamps the cause on
what it raises; the first stamp stays. Solver, scorer, start-up and reward are the parts that run
the rest. Texts of messages are not looked at, but for that of a zero byte, which has no type of its
own.
"""

from __future__ import annotations

import asyncio
import errno
import math
import time
from collections import deque
from collections.abc import Awaitable, Collection, Iterable, Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass, field
from pathlib import PurePosixPath
from typing import Any, TypeVar

import anyio
from inspect_ai.util import OutputLimitExceededError, SandboxEnvironment

from inspect_tinker_plugin import inspect_internals as internals
from inspect_tinker_plugin.contracts.errors import PRICED, Cause, SandboxError
from inspect_tinker_plugin.contracts.sandboxes import Work
from inspect_tinker_plugin.inspect_internals import SandboxTimeoutError
from inspect_tinker_plugin.processes.loops import contain, run_bounded, wait_for_end

T = TypeVar("T")

_MOST_STAMPS = 64
"""Stamps that an episode keeps; a solver that handles failures for hours leaves the oldest out."""

_MOMENT = 1.0
"""Seconds from the end of a call that a time-out has cut off to the ``TimeoutError`` itself, where
that is not raised from the cancellation: by anyio."""

_STRONGEST = (Cause.POLICY, Cause.SANDBOX, Cause.JUDGE, Cause.TOOL)
"""Causes that count wherever an exception was raised about them. Those with a price count only if
nothing else does: whoever handles a missing file can fail for reasons of its own."""


@dataclass(frozen=True)
class Stamp:
    """The cause of an exception, and the call that raised it, e.g. ``exec() of the sandbox``."""

    cause: Cause
    call: str = ""


class Boundaries:
    """What has crossed the boundaries of one episode.

    Attributes:
        since: When the running part began. What an earlier one left running is not this one's.
        policy_calls: The ids of the tool calls that the policy has asked for.
    """

    def __init__(self) -> None:
        self.since = 0.0
        self.policy_calls: set[str] = set()
        self._stamps: dict[int, tuple[BaseException, Stamp]] = {}
        self._cut_off: deque[tuple[BaseException, Stamp, float]] = deque(maxlen=_MOST_STAMPS)

    def begin_part(self) -> None:
        """Let the running context be the episode's, and a new part of it."""
        self.since = time.monotonic()
        _running.set(self)

    def stamp(self, error: BaseException, stamp: Stamp) -> None:
        """Stamp an exception, unless it or what it was raised about has a cause already."""
        found = self._find(error, set())
        if found is not None and found.call:
            return
        if len(self._stamps) >= _MOST_STAMPS:
            del self._stamps[next(iter(self._stamps))]
        self._stamps[id(error)] = error, Stamp(found.cause if found else stamp.cause, stamp.call)

    def note_cut_off(self, stamp: Stamp, since: float, error: BaseException) -> None:
        """Note that a call of the running part was cancelled, or ended with a time-out."""
        if since >= self.since:
            self._cut_off.append((error, stamp, time.monotonic()))

    def forget(self, *, handled: bool) -> None:
        """Forget all exceptions, whose tracebacks hold what the episode has used.

        Args:
            handled: Whether none of them has ended it, so that nobody reads their tracebacks: what
                handles an error of a tool, in Inspect, is part of it.
        """
        for error, _ in self._stamps.values() if handled else ():
            error.__traceback__ = None
        self._stamps.clear()
        self._cut_off.clear()

    def attribute(
        self, error: BaseException, phase: Cause, *, cut_off_since: float | None = None
    ) -> Stamp:
        """Attribute an exception that ended a part of the episode.

        Args:
            error: The exception, or the whole group that it is a member of.
            phase: What was running; the cause of an exception that crossed no boundary.
            cut_off_since: When the limit was reached that it is about, if it is about one.
        """
        if phase is Cause.SANDBOX:
            return Stamp(phase)
        if found := self._find(error, set()):
            return found
        if cut_off_since is None and is_timeout(error):
            cut_off_since = time.monotonic() - _MOMENT
        if cut_off_since is None:
            return Stamp(phase)
        sources = set(map(id, _sources(error)))
        late = [
            stamp for by, stamp, at in self._cut_off if at >= cut_off_since or id(by) in sources
        ]
        return _strongest(late) or next(iter(late), Stamp(phase))

    def _find(self, error: BaseException, seen: set[int]) -> Stamp | None:
        """Return the stamp of an exception, or of what it was raised from or about."""
        found = [
            stamp
            for link, is_source in _walk_chain(error, seen)
            if (stamp := self._find_own(link, seen)) is not None
            and (is_source or stamp.cause not in PRICED)
        ]
        return _strongest(found) or next(iter(found), None)

    def _find_own(self, error: BaseException, seen: set[int]) -> Stamp | None:
        known, stamp = self._stamps.get(id(error), (None, None))
        if known is error:
            return stamp
        if isinstance(error, BaseExceptionGroup):
            found = [self._find(member, seen) for member in error.exceptions]
            # A member without a cause is a failure of what was running, and no price is paid.
            return _strongest(found) or (None if None in found else found[0])
        if isinstance(error, internals.SentinelFailure):
            return Stamp(Cause.JUDGE, "a monitor")
        stated = getattr(error, "inside_sandbox", None)  # what its provider says
        if not isinstance(stated, bool):
            return None
        return Stamp(Cause.INSIDE_SANDBOX if stated else Cause.SANDBOX)


_running: ContextVar[Boundaries | None] = ContextVar("inspect_rl_boundaries", default=None)


def running_boundaries() -> Boundaries | None:
    """Return the boundaries of the episode that the caller belongs to, if it belongs to any."""
    return _running.get()


def stamp(error: BaseException, cause: Cause) -> None:
    """Stamp an exception in the running episode, if there is one."""
    if boundaries := _running.get():
        boundaries.stamp(error, Stamp(cause))


def enclose(cause: Cause, call: str, work: Awaitable[T]) -> Awaitable[T]:
    """Return what awaits a call of foreign code and stamps what it raises, in an episode."""
    boundaries = _running.get()
    return work if boundaries is None else _await_stamped(boundaries, Stamp(cause, call), work)


async def _await_stamped(boundaries: Boundaries, stamp: Stamp, work: Awaitable[T]) -> T:
    since = time.monotonic()
    try:
        return await contain(stamp.call, work)
    except (Exception, asyncio.CancelledError) as error:
        # asyncio makes a new TimeoutError of one that leaves a thread, so the stamp is not enough.
        ended_early = isinstance(error, asyncio.CancelledError | TimeoutError)
        if ended_early and stamp.cause is Cause.JUDGE:
            boundaries.note_cut_off(stamp, since, error)
        if isinstance(error, Exception):
            boundaries.stamp(error, stamp)
        raise


def _strongest(found: Iterable[Stamp | None]) -> Stamp | None:
    ranked = [each for each in found if each is not None and each.cause in _STRONGEST]
    return min(ranked, key=lambda each: _STRONGEST.index(each.cause), default=None)


def _walk_chain(error: BaseException, seen: set[int]) -> Iterator[tuple[BaseException, bool]]:
    """Yield an exception and those that it was raised about; true if only by ``raise … from``."""
    left: list[tuple[BaseException | None, bool]] = [(error, True)]
    while left:
        current, is_source = left.pop(0)
        if current is None or id(current) in seen:
            continue
        seen.add(id(current))
        yield current, is_source
        left += [(current.__cause__, is_source), (current.__context__, False)]


def is_timeout(error: BaseException) -> bool:
    """Whether an exception is a ``TimeoutError`` or was raised from one.

    In a group, that of a member is what ends those beside it, and not the other way round.
    """
    return any(isinstance(link, TimeoutError) for link in _sources(error))


def _sources(error: BaseException) -> list[BaseException]:
    """Return an exception, or the only one of a group, and those that it was raised from."""
    while isinstance(error, BaseExceptionGroup) and len(error.exceptions) == 1:
        [error] = error.exceptions
    return [link for link, is_source in _walk_chain(error, set()) if is_source]


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


def _cannot_be_said(error: BaseException) -> bool:
    """Whether what was asked for holds a zero byte or half a surrogate pair, or is too long.

    No kernel takes that as an argument or a path, and a policy may say it in any answer.
    """
    if isinstance(error, UnicodeEncodeError):
        return error.reason == "surrogates not allowed"
    if isinstance(error, OSError):
        return error.errno == errno.E2BIG
    return isinstance(error, ValueError) and "embedded null" in str(error)


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
        if _cannot_be_said(error):
            return True
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
            named = self._is_path(error.filename) or self._is_directory_without_name(error)
            return named and not missing_program and not refused
        return isinstance(error, _IN_CONTRACT.get(self.name, ()))

    def _is_path(self, found: object) -> bool:
        """Whether a path is the one that was asked for, which the provider may have made whole."""
        asked = PurePosixPath(self.path).parts
        return isinstance(found, str) and PurePosixPath(found).parts[-len(asked) :] == asked != ()

    def _is_directory_without_name(self, error: OSError) -> bool:
        """Whether the file that was asked for is ``""`` or ``"."``, as a policy may call one."""
        return isinstance(error, IsADirectoryError) and not PurePosixPath(self.path).parts


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
                vars(environment)[name] = self.watch_operation(getattr(environment, name), name)
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

    def watch_operation(self, operation: Work, name: str = "exec_remote") -> Work:
        """Make an operation of what waits for the inside of a sandbox."""

        async def watched(*args: Any, **kwargs: Any) -> Any:
            asked = self._describe(name, args, kwargs)
            work = self._run(asked, operation, args, kwargs)
            try:
                return await run_bounded(work, None, grace=CANCEL_GRACE)
            except asyncio.CancelledError as error:
                if not asked.idle:
                    self._boundaries.note_cut_off(asked.stamp(), asked.since, error)
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
            return await contain("a sandbox", operation(*args, **kwargs))
        finally:
            self._running.remove(asked)


async def _refuse(*_: object, **__: object) -> None:
    """Stand for an operation of a sandbox that is being released or is gone.

    What a solver leaves running may ask for one at any time; ``local`` would carry it out.
    """
    raise SandboxError("the sandbox is gone: its episode has ended")
