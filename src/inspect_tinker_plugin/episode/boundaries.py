"""Attributes exceptions to the part of an episode that raised them, where foreign code is called.

Whoever calls foreign code (a sandbox operation, a tool, a judge, the policy) stamps the cause on
what it raises; the first stamp stays. Solver, scorer, start-up and reward are the parts that run
the rest. Texts of messages are never looked at.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Awaitable, Iterable, Iterator
from contextvars import ContextVar
from dataclasses import dataclass
from typing import TypeVar

from inspect_tinker_plugin import inspect_internals as internals
from inspect_tinker_plugin.contracts.errors import Cause
from inspect_tinker_plugin.processes.loops import contained

T = TypeVar("T")

_MOST_STAMPS = 64
"""Stamps that an episode keeps; a solver that handles failures for hours leaves the oldest out."""

_MOMENT = 1.0
"""Seconds from the end of a call that a time-out has cut off to the ``TimeoutError`` itself."""

_STRONGEST = (Cause.POLICY, Cause.SANDBOX, Cause.JUDGE, Cause.TOOL)
"""Causes that count wherever an exception was raised about them. ``inside_sandbox`` counts only if
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
    """

    def __init__(self) -> None:
        self.since = 0.0
        self._stamps: dict[int, tuple[BaseException, Stamp]] = {}
        self._cut_off: dict[Stamp, float] = {}

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

    def note_cut_off(self, stamp: Stamp, since: float) -> None:
        """Note that a call of the running part was cancelled, or ended with a time-out."""
        if since >= self.since:
            self._cut_off[stamp] = time.monotonic()

    def forget(self) -> None:
        """Forget all exceptions, whose tracebacks hold what the episode has used."""
        self._stamps.clear()

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
        late = [stamp for stamp, at in self._cut_off.items() if at >= cut_off_since]
        return _strongest(late) or next(iter(late), Stamp(phase))

    def _find(self, error: BaseException, seen: set[int]) -> Stamp | None:
        """Return the stamp of an exception, or of what it was raised from or about."""
        found = [
            stamp
            for link, is_source in _walk_chain(error, seen)
            if (stamp := self._find_own(link, seen)) is not None
            and (is_source or stamp.cause is not Cause.INSIDE_SANDBOX)
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
        return await contained(stamp.call, work)
    except (Exception, asyncio.CancelledError) as error:
        # asyncio makes a new TimeoutError of one that leaves a thread, so the stamp is not enough.
        ended_early = isinstance(error, asyncio.CancelledError | TimeoutError)
        if ended_early and stamp.cause is Cause.JUDGE:
            boundaries.note_cut_off(stamp, since)
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
    while isinstance(error, BaseExceptionGroup) and len(error.exceptions) == 1:
        [error] = error.exceptions
    chain = _walk_chain(error, set())
    return any(is_source and isinstance(link, TimeoutError) for link, is_source in chain)


def first_error(error: Exception) -> Exception:
    """Return the exception that is reported of a group (the first one in it) or of a monitor."""
    while isinstance(error, ExceptionGroup | internals.SentinelFailure):
        error = error.error if isinstance(error, internals.SentinelFailure) else error.exceptions[0]
    return error
