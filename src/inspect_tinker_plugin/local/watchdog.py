"""Ends a server's processes when the process that started them is gone, for whatever reason."""

from __future__ import annotations

import os
import select
import signal
import threading

PERIOD = 1.0
"""Seconds between checks of the parent process."""


def end_with_parent(lifeline: int, parent: int) -> None:
    """Start a thread that kills this process group once the parent is gone.

    Two signs are watched, because each alone can fail: ``lifeline`` is the reading end of a pipe
    whose other end closes with the parent, even by SIGKILL, unless a child that the parent
    forked still holds a copy; and the parent's process id changes when it dies, but not when it
    is alive and merely dropped its server. Nothing is ever written to the pipe.

    Args:
        lifeline: file descriptor of the reading end.
        parent: process id of the parent.
    """
    thread = threading.Thread(
        target=_watch, args=(lifeline, parent), name="watch-parent", daemon=True
    )
    thread.start()


def _watch(lifeline: int, parent: int) -> None:
    while os.getppid() == parent:
        readable, _, _ = select.select([lifeline], [], [], PERIOD)
        if readable and not os.read(lifeline, 1):
            break
    os.killpg(os.getpgrp(), signal.SIGKILL)
