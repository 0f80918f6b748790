"""Warm containers of one configuration: hand out fresh ones fairly, refill behind.

A container serves one episode and is removed; there is no way back into the pool but for
one that was never handed over. State is guarded by a lock and waiting is on futures, so
that episodes in several event loops and threads share a pool.
"""

from __future__ import annotations

import threading
import time
from collections import deque
from collections.abc import Callable
from concurrent.futures import Future
from dataclasses import dataclass

import anyio

from inspect_tinker_plugin.errors import SandboxError, SandboxStartError
from inspect_tinker_plugin.sandboxes.config import ContainerConfig, PoolSize
from inspect_tinker_plugin.sandboxes.container import Container
from inspect_tinker_plugin.sandboxes.engine import Engine, settled
from inspect_tinker_plugin.sandboxes.metrics import ACQUIRE, WARM_HITS, measure

IDLE_SECONDS = 600.0
"""Without an acquisition for so long a pool lets its warm containers go."""

MAX_BACKOFF_SECONDS = 60.0
_REMOVE_ATTEMPTS = 3


@dataclass(frozen=True)
class PoolState:
    """A look at a pool's counters."""

    idle: int
    starting: int
    leased: int
    removing: int
    waiting: int
    failures: int


class Pool:
    """Containers of one key. ``start`` makes one, blocking, or raises."""

    def __init__(
        self,
        engine: Engine,
        config: ContainerConfig,
        start: Callable[[], Container],
    ) -> None:
        self.config = config
        self._engine = engine
        self._start = start
        self._lock = threading.Lock()
        self._idle: deque[Container] = deque()
        self._leased: set[Container] = set()
        self._waiters: deque[Future[Container]] = deque()
        self._starting = 0
        self._removing = 0
        self._failures = 0
        self._retry_at = 0.0
        self._warm = config.pool.warm
        self._max = config.pool.max
        self._floor = 0
        self._last_used = time.monotonic()
        self._closed = False

    @property
    def state(self) -> PoolState:
        with self._lock:
            return PoolState(
                len(self._idle),
                self._starting,
                len(self._leased),
                self._removing,
                len(self._waiters),
                self._failures,
            )

    def grow(self, size: PoolSize) -> None:
        """Take over the larger of the present and another configuration's wishes."""
        with self._lock:
            self._warm = max(self._warm, size.warm)
            if self._max is not None:
                self._max = None if size.max is None else max(self._max, size.max)

    async def prewarm(self, count: int) -> None:
        """Wait until so many containers are ready (as far as ``max`` allows).

        Raises:
            SandboxError: the first start that failed.
        """
        with self._lock:
            self._last_used = time.monotonic()
            room = count if self._max is None else min(count, self._max - len(self._leased))
            self._floor = max(self._floor, room)
        failures = self.state.failures
        self.tend()
        while True:
            state = self.state
            if state.idle >= room:
                return
            if state.failures > failures or self._closed:
                raise self._last_error or SandboxStartError("the sandbox pool is closed")
            await anyio.sleep(0.02)

    async def acquire(self) -> Container:
        """Wait for a container of one's own; first come, first served.

        Raises:
            SandboxError: no container could be started for this caller.
        """
        begun = time.monotonic()
        waiter: Future[Container] = Future()
        with self._lock:
            if self._closed:
                raise SandboxStartError("the sandbox pool is closed")
            self._last_used = begun
            self._waiters.append(waiter)
        try:
            hit = self._dispatch(waiter)
            container = await settled(waiter)
        except BaseException:
            self._withdraw(waiter)
            raise
        if hit:
            measure(WARM_HITS)
        measure(ACQUIRE, time.monotonic() - begun)
        return container

    def release(self, container: Container) -> Future[None] | None:
        """Give a container up for removal in the background. Safe to call again."""
        with self._lock:
            if container not in self._leased:
                return None
            self._leased.discard(container)
            self._removing += 1
            if container.kept:
                self._removing -= 1
                return None
        try:
            return self._engine.submit(self._remove, container)
        except RuntimeError:  # the interpreter is shutting down: no threads any more
            self._remove(container)
            return None

    def tend(self) -> None:
        """Refill, shrink and retry; called after every change and from time to time."""
        surplus: list[Container] = []
        with self._lock:
            idle_since = time.monotonic() - self._last_used
            if self._warm_now(idle_since) == 0 and not self._waiters:
                surplus = [self._idle.popleft() for _ in range(len(self._idle))]
            while len(self._idle) > max(self._warm_now(idle_since), len(self._waiters)):
                surplus.append(self._idle.popleft())
            self._removing += len(surplus)
        for container in surplus:
            self._engine.submit(self._remove, container)
        self._dispatch(None)

    def containers(self) -> list[Container]:
        """List the containers in use."""
        with self._lock:
            return list(self._leased)

    def close(self) -> list[Container]:
        """Take no more callers; return what is left to be removed, leased ones included."""
        with self._lock:
            self._closed = True
            rest = [*self._idle, *(c for c in self._leased if not c.kept)]
            self._idle.clear()
            self._leased.clear()
            waiters = list(self._waiters)
            self._waiters.clear()
        for waiter in waiters:
            if waiter.set_running_or_notify_cancel():
                waiter.set_exception(SandboxStartError("the sandbox pool was closed"))
        return rest

    def _warm_now(self, idle_since: float) -> int:
        return 0 if self._closed or idle_since > IDLE_SECONDS else max(self._warm, self._floor)

    def _dispatch(self, caller: Future[Container] | None) -> bool:
        """Serve waiters and start what is missing; tell whether ``caller`` was served."""
        dead: list[Container] = []
        served = False
        while True:
            with self._lock:
                if not (self._waiters and self._idle):
                    break
                container = self._idle.popleft()
            if not container.is_ready():
                dead.append(container)
                with self._lock:
                    self._removing += 1
                continue
            with self._lock:
                waiter = self._next_waiter()
                if waiter is None:
                    self._idle.appendleft(container)
                    break
                self._leased.add(container)
                self._floor = max(0, self._floor - 1)
                # Within the lock, so that callers wake in the order in which they came.
                waiter.set_result(container)
            served = served or waiter is caller
        for container in dead:
            self._engine.submit(self._remove, container)
        for _ in range(self._reserve()):
            try:
                self._engine.submit_start(self._start_one)
            except RuntimeError:  # the interpreter is shutting down
                with self._lock:
                    self._starting -= 1
        return served

    def _next_waiter(self) -> Future[Container] | None:
        while self._waiters:
            waiter = self._waiters.popleft()
            if waiter.set_running_or_notify_cancel():
                return waiter
        return None

    def _reserve(self) -> int:
        """Book as many starts as are wanted and allowed now."""
        with self._lock:
            if self._closed:
                return 0
            now = time.monotonic()
            warm = self._warm_now(now - self._last_used)
            if now < self._retry_at:
                warm = 0
            wanted = len(self._waiters) + warm - len(self._idle) - self._starting
            if self._max is not None:
                total = len(self._idle) + len(self._leased) + self._starting + self._removing
                wanted = min(wanted, self._max - total)
            wanted = max(0, wanted)
            self._starting += wanted
            return wanted

    _last_error: SandboxError | None = None

    def _start_one(self) -> None:
        try:
            container = self._start()
        except BaseException as ex:
            self._failed(ex if isinstance(ex, SandboxError) else SandboxStartError(str(ex)))
            return
        with self._lock:
            self._starting -= 1
            self._failures = 0
            closed = self._closed
            if not closed:
                self._idle.append(container)
        if closed:
            container.remove()
            return
        self._dispatch(None)

    def _failed(self, ex: SandboxError) -> None:
        with self._lock:
            self._starting -= 1
            self._failures += 1
            self._last_error = ex
            delay = min(MAX_BACKOFF_SECONDS, 0.5 * 2 ** min(self._failures, 10))
            self._retry_at = time.monotonic() + delay
            # A caller gets the error at once: to retry is the episode runner's decision.
            waiter = self._next_waiter()
        if waiter is not None:
            waiter.set_exception(ex)
        self._dispatch(None)

    def _withdraw(self, waiter: Future[Container]) -> None:
        """Take a cancelled caller out; a container that was on its way to it is untouched."""
        with self._lock:
            if waiter in self._waiters:
                self._waiters.remove(waiter)
        if waiter.cancel() or waiter.cancelled():
            return
        if waiter.done() and waiter.exception() is None:
            container = waiter.result()
            with self._lock:
                if container not in self._leased:
                    return
                self._leased.discard(container)
                if not self._closed:
                    self._idle.appendleft(container)
                    container = None  # type: ignore[assignment]  # back in the pool
            if container is not None:
                container.remove()
            self.tend()

    def _remove(self, container: Container) -> None:
        for attempt in range(_REMOVE_ATTEMPTS):
            if container.remove():
                break
            time.sleep(0.2 * 2**attempt)
        with self._lock:
            self._removing -= 1
        self._dispatch(None)
