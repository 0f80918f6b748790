"""The processes of a server: what signals do to them, and workers behind one address."""

from __future__ import annotations

import asyncio
import multiprocessing
import signal
import sys
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from logging import getLogger
from multiprocessing import connection
from multiprocessing.process import BaseProcess
from typing import Any

from inspect_tinker_plugin.contracts.errors import ConfigError
from inspect_tinker_plugin.processes.loops import run_in
from inspect_tinker_plugin.processes.workers import STOPPING
from inspect_tinker_plugin.serve.host import Host

logger = getLogger(__name__)

SIGNALS = (*STOPPING, signal.SIGINT)

SAME_SECONDS = 2.0
"""Seconds in which a second signal counts as the first: ``timeout``, terminals and supervisors
signal a process and its group, and so its workers, which their parent signals as well."""


@contextmanager
def handle_signals(host: Host, patience: float) -> Iterator[None]:
    """Let running episodes end at the first SIGTERM, SIGINT or SIGHUP; a later one ends them.

    A worker whose parent was killed ends its episodes, too. Nothing is done where no server has set
    a handler, which is called at the end.

    Args:
        host: What runs.
        patience: Seconds that running episodes have.
    """
    loop = asyncio.get_running_loop()
    main = threading.current_thread() is threading.main_thread()
    handlers = {number: signal.getsignal(number) for number in SIGNALS if main}
    stop: Any = handlers.get(signal.SIGTERM)
    if not callable(stop):
        yield
        return
    draining: asyncio.Task[None] | None = None
    began = 0.0

    def end(number: int) -> None:
        host.stop()
        stop(number, None)

    async def drain(number: int) -> None:
        host.drain()
        await asyncio.wait([asyncio.ensure_future(host.idle.wait())], timeout=patience)
        end(number)

    def react(number: int) -> None:
        nonlocal draining, began
        if draining is None:
            draining, began = loop.create_task(drain(number)), loop.time()
        elif loop.time() - began > SAME_SECONDS:
            end(number)

    def watch(parent: BaseProcess) -> None:
        parent.join()
        run_in(loop, end, signal.SIGTERM)

    if (parent := multiprocessing.parent_process()) is not None:
        threading.Thread(target=watch, args=(parent,), daemon=True).start()
    for number, handler in handlers.items():
        if number != signal.SIGHUP or handler is signal.SIG_DFL:
            signal.signal(number, lambda number, _: loop.call_soon_threadsafe(react, number))
    try:
        yield
    finally:
        for number, handler in handlers.items():
            signal.signal(number, handler)


def run_workers(work: Callable[[], None], count: int) -> int:
    """Run something in worker processes until a signal comes, or one of them fails with 1.

    A worker that ends otherwise is replaced. Signals are passed on.

    Args:
        work: What a worker does; it pickles.
        count: Workers.

    Returns:
        The exit code.
    """
    context = multiprocessing.get_context("spawn")
    came: list[int] = []
    for number in SIGNALS:
        if number == signal.SIGINT or signal.getsignal(number) is not signal.SIG_IGN:  # nohup
            signal.signal(number, lambda number, _: came.append(number))

    def start() -> BaseProcess:
        process = context.Process(target=_work, args=(work,))
        process.start()
        return process

    workers = [start() for _ in range(count)]
    failed = False
    while not came and not failed:
        connection.wait([each.sentinel for each in workers], timeout=0.2)
        for place, worker in enumerate(workers):
            if worker.is_alive() or came:
                continue
            failed = failed or worker.exitcode == 1
            if not failed:
                logger.warning("worker %s has ended (%s)", worker.pid, worker.exitcode)
                workers[place] = start()
    code = 128 + came[0] if came else 1
    passed_on = -1
    while alive := [each for each in workers if each.is_alive()]:
        if passed_on < len(came):
            passed_on = len(came)
            for each in alive:
                each.terminate()
        connection.wait([each.sentinel for each in alive], timeout=0.2)
    return code


def _work(work: Callable[[], None]) -> None:
    try:
        work()
    except ConfigError as error:
        print(f"Error: {error}", file=sys.stderr)
        sys.exit(1)
    except KeyboardInterrupt:  # while it loads
        sys.exit(128 + signal.SIGINT)
