"""Rollouts in processes of this machine that always end with the trainer."""

from __future__ import annotations

import multiprocessing
import os
import signal
import threading
from collections.abc import Iterator
from concurrent.futures import ProcessPoolExecutor
from contextlib import contextmanager, suppress
from importlib import import_module
from multiprocessing.process import BaseProcess
from multiprocessing.util import Finalize

from inspect_tinker_plugin.stopping import Stopped

GRACE = 15.0
"""Seconds that a worker has to close its episodes before it is killed."""


@contextmanager
def worker_pool(workers: int) -> Iterator[ProcessPoolExecutor]:
    """Yield an executor for the cookbook's ``set_rollout_executor``.

    Leaving the block interrupts running calls, as Ctrl-C would: episodes are cancelled and
    release their sandboxes. A worker whose trainer was killed does the same by itself.

    Args:
        workers: Processes; each runs one group of rollouts at a time.
    """
    context = multiprocessing.get_context("spawn")
    pool = ProcessPoolExecutor(workers, mp_context=context, initializer=_start_worker)
    try:
        yield pool
    finally:
        processes: list[BaseProcess] = list((getattr(pool, "_processes", None) or {}).values())
        pool.shutdown(wait=False, cancel_futures=True)
        _end(processes)


def _end(processes: list[BaseProcess]) -> None:
    """Interrupt the processes that are busy, and kill those that do not end in time."""
    for process in processes:
        process.join(0.2)
        if process.is_alive() and process.pid is not None:
            with suppress(ProcessLookupError):  # it has just ended by itself
                os.kill(process.pid, signal.SIGINT)
    for process in processes:
        process.join(GRACE)
        if process.is_alive():
            process.kill()
            process.join()


def _start_worker() -> None:
    """Prepare a worker; runs in it before the first rollout."""
    # A supervisor that stops a service signals all of its processes, not only the trainer.
    Stopped().install()
    # An idle worker that exits by itself removes its containers first and must be given time.
    Finalize(None, signal.signal, args=(signal.SIGINT, signal.SIG_IGN), exitpriority=1000)
    parent = multiprocessing.parent_process()
    assert parent is not None
    threading.Thread(target=_end_with, args=(parent,), name="watch-trainer", daemon=True).start()
    try:
        # The first rollout would load it; an interruption during that would print a traceback.
        import_module("inspect_tinker_plugin.rl.group")
    except KeyboardInterrupt:
        os._exit(1)


def _end_with(parent: BaseProcess) -> None:
    parent.join()
    os.kill(os.getpid(), signal.SIGINT)
    threading.Event().wait(GRACE)
    os._exit(1)
