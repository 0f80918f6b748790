"""Ends programs: signals stop this one as Ctrl-C does, and what runs in a folder is killed."""

from __future__ import annotations

import asyncio
import math
import signal
import threading
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from types import FrameType

import psutil

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


def _interrupt_between_steps() -> None:
    """Raise `KeyboardInterrupt`; out of a running event loop between two steps, not within one.

    ``asyncio.run`` then cancels all tasks and waits for them, as it does after Ctrl-C.
    """
    try:
        loop = asyncio.get_running_loop()
    except RuntimeError:
        raise KeyboardInterrupt from None
    loop.call_soon_threadsafe(_interrupt)


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


_CLOCK_SECONDS = 1.0
"""Seconds by which a process may seem to be older than it is: Linux counts from a whole second."""


def kill_processes_in(folder: str, *, since: float = 0.0, until: float = math.inf) -> None:
    """Kill all processes whose working directory is a folder, or is inside of it; it may be gone.

    Args:
        folder: The folder.
        since: When the oldest of them was started, by ``time.time()``.
        until: When the newest of them was started.
    """
    for number in psutil.pids():
        with suppress(psutil.Error, OSError):  # it has ended, or is somebody else's
            process = psutil.Process(number)
            in_time = since - _CLOCK_SECONDS <= process.create_time() <= until
            if in_time and Path(process.cwd()).is_relative_to(folder):
                process.kill()
