"""Threads for blocking calls of one kind: bounded, urgent work first, never delaying an exit."""

from __future__ import annotations

import threading
import time
from collections import deque
from collections.abc import Callable
from concurrent.futures import Future
from functools import partial
from queue import Empty, SimpleQueue
from typing import Any, Generic, ParamSpec, TypeVar

P = ParamSpec("P")
T = TypeVar("T")


class _Job(Generic[T]):
    """A call that has not begun, and the future for its result."""

    def __init__(self, call: Callable[[], T]) -> None:
        self.call = call
        self.future: Future[T] = Future()

    def run(self) -> None:
        if not self.future.set_running_or_notify_cancel():
            return
        try:
            result = self.call()
        except BaseException as ex:  # the boundary: passed to the waiter
            self.future.set_exception(ex)
        else:
            self.future.set_result(result)


_postponed: SimpleQueue[Callable[[], object]] = SimpleQueue()


def undo(error: BaseException | None, work: Callable[[], object]) -> None:
    """Undo what a coroutine has begun, when it ends with an error or otherwise.

    A coroutine that nothing refers to any more is closed by a garbage collection, in whatever
    thread that runs, perhaps one that holds the lock which ``work`` takes. So the work of a closed
    one is left to the pools' keeper (:func:`undo_postponed`).
    """
    cause = error
    while cause is not None and not isinstance(cause, GeneratorExit):
        cause = cause.__context__  # anyio's scopes raise another error outside of their loop
    if cause is None:
        work()
    else:
        _postponed.put(work)


def undo_postponed() -> None:
    """Do the work of coroutines that were closed."""
    while True:
        try:
            work = _postponed.get_nowait()
        except Empty:
            return
        work()


class Workers:
    """Up to ``most`` daemon threads, started on demand.

    Not a ``ThreadPoolExecutor``: the interpreter joins that one's threads at exit, with all
    queued calls, and an engine that does not answer would delay the exit.
    """

    def __init__(self, name: str, most: int) -> None:
        self._name = name
        self._most = most
        self._wake = threading.Condition()
        self._urgent: deque[_Job[Any]] = deque()
        self._later: deque[_Job[Any]] = deque()
        self._threads: set[threading.Thread] = set()
        self._idle = 0
        self._closing = False

    def submit(self, call: Callable[P, T], *args: P.args, **kwargs: P.kwargs) -> Future[T]:
        """Run a call before all calls that can wait."""
        return self._add(self._urgent, partial(call, *args, **kwargs))

    def submit_later(self, call: Callable[P, T], *args: P.args, **kwargs: P.kwargs) -> Future[T]:
        """Run a call when nothing urgent waits."""
        return self._add(self._later, partial(call, *args, **kwargs))

    def close(self, seconds: float) -> None:
        """Drop queued calls and wait this long for running ones. Can be used again afterwards."""
        with self._wake:
            self._closing = True
            dropped = [*self._urgent, *self._later]
            self._urgent.clear()
            self._later.clear()
            threads = list(self._threads)
            self._wake.notify_all()
        for job in dropped:
            job.future.cancel()
        deadline = time.monotonic() + seconds
        for thread in threads:
            if thread is not threading.current_thread():
                thread.join(max(0.0, deadline - time.monotonic()))
        with self._wake:
            self._closing = False

    def _add(self, queue: deque[_Job[Any]], call: Callable[[], T]) -> Future[T]:
        job = _Job(call)
        with self._wake:
            queue.append(job)
            if len(self._urgent) + len(self._later) <= self._idle:
                self._wake.notify()
            elif len(self._threads) < self._most:
                thread = threading.Thread(target=self._work, name=self._name, daemon=True)
                try:
                    thread.start()
                except RuntimeError:  # the interpreter is shutting down
                    queue.remove(job)
                    raise
                self._threads.add(thread)
        return job.future

    def _work(self) -> None:
        while (job := self._next()) is not None:
            job.run()
            del job  # a waiting thread must not keep a caller's objects alive

    def _next(self) -> _Job[Any] | None:
        with self._wake:
            while not (self._urgent or self._later):
                if self._closing:
                    self._threads.discard(threading.current_thread())
                    return None
                self._idle += 1
                try:
                    self._wake.wait()
                finally:
                    self._idle -= 1
            return (self._urgent or self._later).popleft()


class Ticker:
    """Makes a call every given number of seconds in its own daemon thread."""

    def __init__(self, name: str, seconds: float, call: Callable[[], object]) -> None:
        self._seconds = seconds
        self._call = call
        self._stop = threading.Event()
        self._thread = threading.Thread(target=self._run, name=name, daemon=True)

    def start(self) -> None:
        self._thread.start()

    def stop(self, seconds: float) -> None:
        """End the calls; wait this long for a running one."""
        self._stop.set()
        if self._thread.is_alive() and self._thread is not threading.current_thread():
            self._thread.join(seconds)

    def _run(self) -> None:
        while not self._stop.wait(self._seconds):
            try:
                self._call()
            except Exception:
                continue  # the engine is away; callers get the typed error
