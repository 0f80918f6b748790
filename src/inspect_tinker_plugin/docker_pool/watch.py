"""Removes everything from the engine when a process is ended from outside.

A signal that asks the process to end is answered by removing its containers first. Against
ends that a process cannot handle (``SIGKILL``, out of memory, a crash), a tiny shell waits beside
it; when its pipe closes without a message, it becomes this module and removes what is left.
"""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable

from inspect_tinker_plugin.docker_pool.engine import Engine
from inspect_tinker_plugin.docker_pool.lease import Lease, remove_owned
from inspect_tinker_plugin.errors import SandboxError

CLOSE_SECONDS = 20.0
"""Seconds that a process that was asked to end may take to remove its containers."""

_WAIT = 'read -r _ || exec "$0" -m inspect_tinker_plugin.docker_pool.watch "$@"'
_PASSES = 30
_PAUSE_SECONDS = 1.0


class Watch:
    """The shell beside this process."""

    def __init__(self, owner: Lease) -> None:
        labels = [owner.id, owner.host, str(owner.pid), owner.started]
        self._shell = subprocess.Popen(
            ["/bin/sh", "-c", _WAIT, sys.executable, *labels],
            stdin=subprocess.PIPE,
            stdout=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL,
            cwd="/",
            start_new_session=True,  # a signal to the process's group must not end the watch
        )
        # A forked child would keep the pipe open beyond the end of this process.
        os.register_at_fork(after_in_child=self._let_go)

    def stop(self) -> None:
        """Tell the shell that nothing is left to do."""
        assert self._shell.stdin is not None
        try:
            self._shell.stdin.write(b"\n")
            self._shell.stdin.close()
        except OSError:  # it was ended
            pass
        self._shell.wait()

    def _let_go(self) -> None:
        if self._shell.returncode is None and self._shell.stdin is not None:
            self._shell.stdin.close()
            self._shell.returncode = 0  # of the parent's child, not of this process's


def close_before_signals_end_it(close: Callable[[], None]) -> None:
    """Make ``SIGTERM`` and ``SIGHUP`` wait for the removal of all containers.

    Only where they would end the process at once: a program with its own handlers keeps
    them. Python allows this in the main thread only; elsewhere the watch does the work.
    """
    if threading.current_thread() is not threading.main_thread():
        return
    process = os.getpid()

    def end(number: int, frame: object) -> None:
        signal.signal(number, signal.SIG_DFL)  # a second one ends at once
        if os.getpid() == process:
            # Not in this thread: it may hold a lock of the pools.
            closing = threading.Thread(target=close, daemon=True)
            closing.start()
            closing.join(CLOSE_SECONDS)
        os.kill(os.getpid(), number)

    for number in (signal.SIGTERM, signal.SIGHUP):
        if signal.getsignal(number) is signal.SIG_DFL:
            signal.signal(number, end)


def _remove_after(owner: Lease) -> None:
    """Remove what an owner left, once its process has ended."""
    engine = Engine(timeout=30)
    empty = 0
    for _ in range(_PASSES):
        if owner.lives_here() is not False:
            return
        try:
            # Require two empty results: the engine may still have been starting a container.
            empty = empty + 1 if remove_owned(engine, owner.id, keep_kept=True) == 0 else 0
        except (SandboxError, OSError):
            empty = 0
        if empty == 2:
            return
        time.sleep(_PAUSE_SECONDS)


if __name__ == "__main__":
    _id, _host, _pid, _started = sys.argv[1:]
    time.sleep(0.1)  # the kernel closes files before it removes the process
    _remove_after(Lease(_id, _host, int(_pid), _started))
