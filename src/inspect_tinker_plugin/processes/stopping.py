"""Makes ``SIGTERM`` and ``SIGHUP`` stop a program in the orderly way in which Ctrl-C does."""

from __future__ import annotations

import asyncio
import signal
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from types import FrameType

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
