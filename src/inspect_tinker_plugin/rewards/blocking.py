"""Interrupts a coroutine that blocks the event loop, where no time-out of the loop can fire.

An async reward function runs in the loop of the rollouts, since it may use objects that belong
to that loop (a judge's model, a semaphore). While it blocks, the loop stands still and its timers
with it. A separate thread therefore watches the steps of such coroutines, and raises an
exception inside the one that takes too long: at its next line of Python, and in the main thread
also inside a call that waits in the operating system (``time.sleep``, a socket, a lock).
"""

from __future__ import annotations

import ctypes
import functools
import signal
import threading
import time
import types
from collections.abc import Coroutine, Generator
from typing import Any, TypeVar

T = TypeVar("T")

_PERIOD = 0.1
"""Seconds between checks of the running steps."""

_AGAIN = 1.0
"""Seconds until a step that swallowed its interruption is interrupted again."""


class BlockedLoopError(RuntimeError):
    """A coroutine blocked the event loop and was interrupted."""


class _Interruption(BaseException):
    """Raised inside a blocking step; not an ``Exception``, so that the step does not handle it."""


async def interrupt_if_blocked(coroutine: Coroutine[Any, Any, T], *, after: float) -> T:
    """Await a coroutine; interrupt it when one of its steps blocks the event loop too long.

    Args:
        coroutine: what to await.
        after: seconds that one step may take.

    Raises:
        BlockedLoopError: a step took longer.
    """
    return await _stepwise(coroutine, after)


@types.coroutine
def _stepwise(coroutine: Coroutine[Any, Any, T], after: float) -> Generator[Any, Any, T]:
    advance: Any = coroutine.send
    value: Any = None
    try:
        while True:
            try:
                yielded = _step(advance, value, after)
            except StopIteration as end:
                answer: T = end.value
                return answer
            try:
                value = yield yielded
                advance = coroutine.send
            except BaseException as error:
                value, advance = error, coroutine.throw
    finally:
        coroutine.close()


def _step(advance: Any, value: Any, after: float) -> Any:
    step = _Step(after)
    try:
        _watchdog.add(step)
        try:
            return advance(value)
        finally:
            step.finish()
            if step.interrupted:  # it may have swallowed the interruption
                raise BlockedLoopError("the event loop was blocked")
    except _Interruption:
        step.finish()
        raise BlockedLoopError("the event loop was blocked") from None


class _Step:
    """One step of a coroutine: the time between two awaits."""

    def __init__(self, after: float) -> None:
        self.deadline = time.monotonic() + after
        self._thread = threading.get_ident()
        self._main = self._thread == threading.main_thread().ident
        self._lock = threading.Lock()
        self._finished = False
        self.interrupted = False
        if self._main:
            _accept_nudges()

    def interrupt_if_late(self) -> None:
        """Raise an exception in the step's thread when its time is over."""
        with self._lock:
            if self._finished or time.monotonic() < self.deadline:
                return
            self.interrupted = True
            self.deadline = time.monotonic() + _AGAIN
            _raise_in(self._thread, _Interruption)
            if self._main and _NUDGE is not None:
                # ends a wait in the operating system; the exception is raised in the handler
                signal.pthread_kill(self._thread, _NUDGE)

    def finish(self) -> None:
        """End the step; an interruption that has not been raised by now is withdrawn."""
        with self._lock:
            if self._finished:
                return
            self._finished = True
            if self.interrupted:
                _raise_in(self._thread, None)
        _watchdog.remove(self)


class _Watchdog:
    """Watches the running steps from a thread, which lives only while there are any."""

    def __init__(self) -> None:
        self._steps: set[_Step] = set()
        self._some = threading.Event()
        self._lock = threading.Lock()
        self._thread: threading.Thread | None = None

    def add(self, step: _Step) -> None:
        with self._lock:
            self._steps.add(step)
            if self._thread is None or not self._thread.is_alive():  # or left behind by a fork
                self._thread = threading.Thread(target=self._watch, name="rewards", daemon=True)
                self._thread.start()
        self._some.set()

    def remove(self, step: _Step) -> None:
        with self._lock:
            self._steps.discard(step)

    def _watch(self) -> None:
        while True:
            self._some.wait()
            time.sleep(_PERIOD)
            with self._lock:
                steps = list(self._steps)
                if not steps:
                    self._some.clear()
            for step in steps:
                step.interrupt_if_late()


_watchdog = _Watchdog()

_NUDGE: signal.Signals | None = getattr(signal, "SIGURG", None)
"""A signal that does nothing by default, and that is rarely used."""


@functools.cache
def _accept_nudges() -> None:
    """Handle the signal in Python, so that it interrupts calls; keep an existing handler."""
    if _NUDGE is not None and signal.getsignal(_NUDGE) in (signal.SIG_DFL, signal.SIG_IGN):
        signal.signal(_NUDGE, _nudged)


def _nudged(number: int, frame: object) -> None:
    """Do nothing: the pending exception is raised here."""


def _raise_in(thread: int, kind: type[BaseException] | None) -> None:
    """Raise an exception in a thread asynchronously; ``None`` withdraws it."""
    ctypes.pythonapi.PyThreadState_SetAsyncExc(
        ctypes.c_ulong(thread), None if kind is None else ctypes.py_object(kind)
    )
