"""Worker processes: what is sent to them, the signals that stop them and this one, their memory."""

from __future__ import annotations

import asyncio
import atexit
import gc
import io
import itertools
import math
import multiprocessing
import os
import signal
import sys
import threading
import time
import warnings
import weakref
from collections.abc import Callable, Coroutine, Iterator
from concurrent.futures import Future, ProcessPoolExecutor
from contextlib import contextmanager, nullcontext, suppress
from contextvars import ContextVar
from functools import cache
from importlib import import_module
from multiprocessing.process import BaseProcess
from multiprocessing.util import Finalize
from pathlib import Path
from types import FrameType
from typing import Any, ParamSpec, TypeVar

import cloudpickle
import psutil

P = ParamSpec("P")
T = TypeVar("T")

GRACE = 15.0
"""Seconds that a worker has to close its episodes before it is killed."""

_HANGS = 1.0
"""Seconds after which a loop that has not seen a Ctrl-C hangs: the next one leaves it."""

_AGAIN_SECONDS = 0.5
"""Seconds after which a worker that a signal has not ended tries again."""

ROLLOUTS = "inspect_tinker_plugin.rl.group"
"""What a worker loads that runs groups of rollouts."""


STOPPING = (signal.SIGTERM, signal.SIGHUP)


class Stopped:
    """Which signal has stopped the program, if any."""

    def __init__(self) -> None:
        self.by: signal.Signals | None = None

    def __call__(self, number: int, frame: FrameType | None) -> None:
        """Act on a signal as on Ctrl-C.

        Repetitions are ignored: ``timeout`` and many supervisors signal a process twice, itself
        and with its group, and a second Ctrl-C would cut off the clean-up.
        """
        if self.by is not None:
            return
        self.by = signal.Signals(number)
        handler = signal.getsignal(signal.SIGINT)
        if callable(handler):
            handler(signal.SIGINT, frame)
        else:  # Ctrl-C is ignored, as in a background job of a script
            _interrupt_between_steps()

    def install(self) -> list[signal.Signals]:
        """Handle the signals that nothing handles yet; returns them.

        Python allows it in the main thread only; elsewhere this does nothing.
        """
        if threading.current_thread() is not threading.main_thread():
            return []
        free = [number for number in STOPPING if signal.getsignal(number) is signal.SIG_DFL]
        for number in free:
            signal.signal(number, self)
        return free


def run_in_loop(work: Coroutine[Any, Any, T]) -> T:
    """Run work in a new event loop, as ``asyncio.run``; a signal cancels it, as Ctrl-C would.

    An interruption that is raised out of the loop would cancel all tasks at once, asyncio's own
    included: a command whose pipes are just being connected is then waited for without end. So
    Ctrl-C cancels the work each time that it is pressed, where asyncio would leave the loop at the
    second; that happens only if the loop itself hangs.

    Raises:
        KeyboardInterrupt: It was cancelled by Ctrl-C or a signal.
    """
    # asyncio handles Ctrl-C in the main thread, unless the program does so itself or ignores it.
    by_asyncio = (
        threading.current_thread() is threading.main_thread()
        and signal.getsignal(signal.SIGINT) is signal.default_int_handler
    )

    async def main() -> T:
        task = asyncio.current_task()
        assert task is not None
        _main_tasks[asyncio.get_running_loop()] = task
        try:
            with _cancelled_by_ctrl_c(task) if by_asyncio else nullcontext():
                # In its own task: anyio may take back a cancellation of the task that it runs in.
                return await asyncio.ensure_future(work)
        except asyncio.CancelledError:
            if task.cancelling():
                raise KeyboardInterrupt from None
            raise

    return asyncio.run(main())


@contextmanager
def _cancelled_by_ctrl_c(task: asyncio.Task[Any]) -> Iterator[None]:
    """Cancel a task at each Ctrl-C inside a block, in place of asyncio's handler."""
    loop = asyncio.get_running_loop()
    asked: float | None = None

    def cancel() -> None:
        nonlocal asked
        asked = None
        task.cancel()

    def handle(number: int, frame: FrameType | None) -> None:
        nonlocal asked
        asked = asked or time.monotonic()
        if time.monotonic() - asked > _HANGS:
            raise KeyboardInterrupt
        loop.call_soon_threadsafe(cancel)

    before = signal.signal(signal.SIGINT, handle)
    try:
        yield
    finally:
        signal.signal(signal.SIGINT, before)


_main_tasks: weakref.WeakKeyDictionary[asyncio.AbstractEventLoop, asyncio.Task[Any]] = (
    weakref.WeakKeyDictionary()
)


def _interrupt_between_steps() -> None:
    """Interrupt what :func:`run_in_loop` runs; without it, raise `KeyboardInterrupt`."""
    try:
        loop = asyncio.get_running_loop()
    except RuntimeError:
        raise KeyboardInterrupt from None
    main = _main_tasks.get(loop)
    if main is None:
        loop.call_soon_threadsafe(_interrupt)
    else:
        loop.call_soon_threadsafe(main.cancel)


def _interrupt() -> None:
    raise KeyboardInterrupt


@contextmanager
def stopped_like_ctrl_c() -> Iterator[Stopped]:
    """Make the signals act as Ctrl-C inside a block.

    Signals that the program handles or ignores itself (``nohup``) are left alone.

    Yields:
        Which signal has come.
    """
    stopped = Stopped()
    installed = stopped.install()
    try:
        yield stopped
    finally:
        for number in installed:
            signal.signal(number, signal.SIG_DFL)


@contextmanager
def worker_pool(workers: int, *, loading: str = ROLLOUTS) -> Iterator[ProcessPoolExecutor]:
    """Yield an executor, such as the cookbook's ``set_rollout_executor`` takes.

    Leaving the block interrupts running calls, as Ctrl-C would: episodes are cancelled and
    release their sandboxes. A worker whose parent was killed does the same by itself. Workers that
    wait for a call ignore Ctrl-C, which a terminal sends to all processes: they end with the block.

    Args:
        workers: Processes; each runs one call at a time.
        loading: A module that the calls need; loaded when a worker starts.
    """
    context = multiprocessing.get_context("spawn")
    pool = _Pool(workers, mp_context=context, initializer=_start_worker, initargs=(loading,))
    try:
        yield pool
    finally:
        processes: list[BaseProcess] = list((getattr(pool, "_processes", None) or {}).values())
        pool.shutdown(wait=False, cancel_futures=True)
        _end(processes)


class _Pool(ProcessPoolExecutor):
    def submit(self, fn: Callable[P, T], /, *args: P.args, **kwargs: P.kwargs) -> Future[T]:
        return super().submit(_call, fn, *args, **kwargs)


def _end(processes: list[BaseProcess]) -> None:
    """Interrupt the processes that are busy, and kill those that do not end in time."""
    # A background job of a script ignores Ctrl-C, and so do the processes that it starts.
    ignored = signal.getsignal(signal.SIGINT) is signal.SIG_IGN
    number = signal.SIGTERM if ignored else signal.SIGINT
    for process in processes:
        process.join(0.2)
        if process.is_alive() and process.pid is not None:
            with suppress(ProcessLookupError):  # it has just ended by itself
                os.kill(process.pid, number)
    for process in processes:
        process.join(GRACE)
        if process.is_alive():
            process.kill()
            process.join()


def _start_worker(loading: str) -> None:
    """Prepare a worker; runs in it before the first call."""
    warnings.simplefilter("ignore", FutureWarning)  # of libraries, once in each worker
    # A supervisor that stops a service signals all of its processes, not only the parent.
    _signals.install()
    # An idle worker that exits by itself removes its containers first and must be given time.
    Finalize(None, signal.signal, args=(signal.SIGINT, signal.SIG_IGN), exitpriority=1000)
    Finalize(None, signal.setitimer, args=(signal.ITIMER_REAL, 0.0), exitpriority=1000)
    parent = multiprocessing.parent_process()
    assert parent is not None
    threading.Thread(target=_end_with, args=(parent,), name="watch-parent", daemon=True).start()
    try:
        # The first call would load it; an interruption during that would print a traceback.
        import_module(loading)
    except KeyboardInterrupt:
        os._exit(1)
    _signals.begin_waiting()


class _Signals(Stopped):
    """What signals do to this worker: they interrupt its call, or end it while it waits for one.

    Ctrl-C interrupts calls only: a terminal sends it to all processes, and a worker that waits ends
    with its parent.
    """

    def __init__(self) -> None:
        super().__init__()
        self._on_ctrl_c = signal.getsignal(signal.SIGINT)
        self._waiting = False
        self.interrupted = False
        """Whether a call was interrupted, or the worker is to end; further calls are refused."""

    def __call__(self, number: int, frame: FrameType | None) -> None:
        if not self._waiting:
            super().__call__(number, frame)
        elif self.by is None or number == signal.SIGALRM:
            self.by = self.by or signal.Signals(number)
            self.interrupted = True
            # The pool takes what is raised while it sends a result for that result: exit again.
            signal.signal(signal.SIGALRM, self)
            signal.setitimer(signal.ITIMER_REAL, _AGAIN_SECONDS)
            sys.exit(128 + self.by)

    def begin_waiting(self) -> None:
        self._waiting = True
        signal.signal(signal.SIGINT, signal.SIG_IGN)

    def begin_call(self) -> None:
        self._waiting = False
        signal.signal(signal.SIGINT, self._on_ctrl_c)


_signals = _Signals()


def _call(work: Callable[P, T], /, *args: P.args, **kwargs: P.kwargs) -> T:
    """Make a call, which signals interrupt."""
    if _signals.interrupted:
        raise KeyboardInterrupt
    _signals.begin_call()
    try:
        return work(*args, **kwargs)
    except KeyboardInterrupt:
        _signals.interrupted = True
        raise
    finally:
        _signals.begin_waiting()


def _end_with(parent: BaseProcess) -> None:
    parent.join()
    handled = signal.getsignal(signal.SIGTERM) is _signals
    os.kill(os.getpid(), signal.SIGTERM if handled else signal.SIGINT)
    threading.Event().wait(GRACE)
    os._exit(1)


_WEAK = (weakref.WeakKeyDictionary, weakref.WeakValueDictionary, weakref.WeakSet)


def dump(value: object) -> bytes:
    """Pickle by value; ``pickle.loads`` reads it.

    Raises:
        Exception: Something inside belongs to this process (an open file, a lock); each kind
            of object raises its own kind of error.
    """
    buffer = io.BytesIO()
    _Pickler(buffer).dump(value)
    return buffer.getvalue()


class _Pickler(cloudpickle.Pickler):  # type: ignore[misc]  # cloudpickle has no types
    """Replaces the globals that a closure reads by their counterparts in the other process.

    An agent is a function inside a function, which ``cloudpickle`` sends with the globals
    that it reads. Inspect's own are among them: a context variable is looked up again by
    module and name; weak containers (the sessions of an MCP server, say) start empty.
    """

    def reducer_override(self, obj: Any) -> Any:
        if isinstance(obj, ContextVar):
            home = _home(obj)
            if home is not None:
                return _look_up, home
        if type(obj) in _WEAK:
            return type(obj), ()
        return super().reducer_override(obj)


def _home(variable: ContextVar[Any]) -> tuple[str, str] | None:
    """Find the module of a context variable, and its name there."""
    for module_name, module in list(sys.modules.items()):
        if module_name == "__main__":  # a worker has another one
            continue
        for name, value in list(getattr(module, "__dict__", {}).items()):
            if value is variable:
                return module_name, name
    return None


def _look_up(module: str, name: str) -> Any:
    return getattr(import_module(module), name)


_CLOCK_SECONDS = 1.0
"""Seconds by which a process may seem to be older than it is: Linux counts from a whole second."""


def kill_processes_in(folder: str, *, since: float = 0.0, until: float = math.inf) -> None:
    """Kill processes whose working directory is a folder, or is inside of it; it may be gone."""
    for number in psutil.pids():
        with suppress(psutil.Error, OSError):  # it has ended, or is somebody else's
            process = psutil.Process(number)
            in_time = since - _CLOCK_SECONDS <= process.create_time() <= until
            if in_time and Path(process.cwd()).is_relative_to(folder):
                process.kill()


THRESHOLDS = (10_000, 500, 100)
"""New objects before a collection, and how many collections come before a more thorough one.

A collection of 100,000 young objects holds up the event loop for 50 ms, and costs more in all."""


def freeze_memory() -> None:
    """Exclude everything that is loaded from later garbage collections, and make those rare.

    A process with PyTorch and a large dataset holds millions of objects, and a full collection
    visits each of them: a third of a second in which no episode runs. Thousands of waiting
    episodes add as much. Call this once, when model and datasets are loaded and before the first
    rollout. The commands of ``inspect rl`` and rollout workers call it themselves; your own
    trainer has to.

    Memory is still freed as soon as nothing refers to it, which is how episodes free theirs. Only
    reference cycles wait for the collector: those among the loaded objects are never freed, later
    ones after 10,000 new objects instead of 700 (``gc.set_threshold``), or after 1,000 failed
    rollouts.
    """
    gc.collect()
    gc.freeze()
    gc.set_threshold(*THRESHOLDS)
    atexit.register(gc.unfreeze)  # libraries report what is frozen as lost otherwise


FAILURES = 1_000
"""Failed rollouts before a collection of everything that is not frozen.

The traceback of an exception holds frames, and these hold the exception: some 50 kB each. Rollouts
that had waited for long are old objects, which the thresholds above leave alone for hours."""

_failures = itertools.count(1)


def note_failed_rollout() -> None:
    """Count a failed rollout, where :func:`freeze_memory` is in force."""
    if gc.get_threshold() == THRESHOLDS and next(_failures) % FAILURES == 0:
        gc.collect()


@cache
def freeze_memory_once() -> None:
    """Do as :func:`freeze_memory` the first time: for commands and workers."""
    freeze_memory()
