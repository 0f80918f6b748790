"""A ``concurrent.futures.Executor`` over Ray tasks, for rollouts on other machines."""

from __future__ import annotations

import importlib.util
import os
import socket
from collections.abc import Callable, Iterator
from concurrent.futures import Executor, Future
from concurrent.futures import wait as wait_for
from contextlib import contextmanager
from typing import Any, TypeVar

from inspect_tinker_plugin.contracts.errors import ConfigError
from inspect_tinker_plugin.contracts.wording import missing_extra

T = TypeVar("T")

GRACE = 15.0
"""Seconds that interrupted calls have to close their episodes."""

_PASSED_ON = ("TINKER_", "HF_", "INSPECT_")
"""Variables of the trainer that workers receive: without them they cannot find the server."""


def missing() -> str | None:
    """Say why Ray cannot be used here, or return None. Imports nothing heavy."""
    if importlib.util.find_spec("ray") is None:
        return missing_extra("Ray", "ray")
    return None


class RayExecutor(Executor):
    """Runs each call as a Ray task.

    Ray reserves one CPU for each. A task whose worker or node dies is run again elsewhere, up to
    three times; an exception that the call raises is not retried, but given to the caller.
    """

    def __init__(self) -> None:
        import ray

        self._ray = ray
        self._call: Any = ray.remote(num_cpus=1, max_retries=3, retry_exceptions=False)(_call)
        self._environ = {
            name: value for name, value in os.environ.items() if name.startswith(_PASSED_ON)
        }
        self._refs: dict[Future[Any], Any] = {}
        self._interrupted: list[Any] = []
        self._closed = False

    def submit(self, fn: Callable[..., T], /, *args: Any, **kwargs: Any) -> Future[T]:
        """Start a call; cancelling its future interrupts it, even while it runs.

        Raises:
            RuntimeError: The executor was shut down.
        """
        if self._closed:
            raise RuntimeError("cannot submit to an executor that was shut down")
        reference = self._call.remote(self._environ, fn, args, kwargs)
        future: Future[T] = Future()
        self._refs[future] = reference
        future.add_done_callback(self._forget)
        reference.future().add_done_callback(lambda source: _hand_over(source, future))
        return future

    def shutdown(self, wait: bool = True, *, cancel_futures: bool = False) -> None:
        """Accept no more calls; safe to call again."""
        self._closed = True
        open_calls = list(self._refs)
        if cancel_futures:
            for future in open_calls:
                future.cancel()
        if wait:
            wait_for(open_calls)

    def wait_for_interrupted(self, timeout: float) -> None:
        """Wait until interrupted calls have cleaned up."""
        if self._interrupted:
            references, self._interrupted = self._interrupted, []
            self._ray.wait(references, num_returns=len(references), timeout=timeout)

    def _forget(self, future: Future[Any]) -> None:
        reference = self._refs.pop(future, None)
        if future.cancelled() and reference is not None and self._ray.is_initialized():
            self._interrupted.append(reference)
            self._ray.cancel(reference, force=False)


def _hand_over(source: Future[Any], target: Future[Any]) -> None:
    """Pass on the result of a task, unless nobody waits for it any more."""
    if not target.set_running_or_notify_cancel():
        return
    error = source.exception()
    if error is None:
        target.set_result(source.result())
        return
    # Ray wraps what a call raises; the trainer's policies check the type of the original.
    target.set_exception(getattr(error, "cause", None) or error)


def _call(
    environ: dict[str, str], fn: Callable[..., T], args: tuple[Any, ...], kwargs: dict[str, Any]
) -> T:
    """Run on a worker."""
    os.environ.update(environ)
    return fn(*args, **kwargs)


def _knock(address: str) -> None:
    """Check at once whether anything listens at an address, which Ray would try for minutes."""
    host, colon, port = address.rpartition("://")[2].rpartition(":")
    if colon and port.isdecimal():
        socket.create_connection((host, int(port)), timeout=10).close()


@contextmanager
def ray_pool(address: str) -> Iterator[RayExecutor]:
    """Connect to a Ray cluster for the duration of a block, and yield an executor on it.

    Args:
        address: ``host:port`` or ``ray://…`` of a cluster, ``"auto"``, or ``""`` to start one
            on this machine.
    """
    if reason := missing():
        raise ConfigError(reason)
    import ray

    ours = not ray.is_initialized()
    if ours:
        try:
            _knock(address)
            ray.init(
                address=address or "local",
                log_to_driver=False,
                configure_logging=False,
                include_dashboard=False if not address else None,
            )
        except (OSError, ValueError, RuntimeError) as error:
            raise ConfigError(f"the Ray cluster {address!r} cannot be reached: {error}") from error
    executor = RayExecutor()
    try:
        yield executor
    finally:
        executor.shutdown(wait=False, cancel_futures=True)
        executor.wait_for_interrupted(GRACE)
        if ours:
            ray.shutdown()
