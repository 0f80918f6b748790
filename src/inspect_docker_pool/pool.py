"""Warm projects of one configuration: hands out fresh ones fairly, and refills.

A project serves one episode and is removed. State is guarded by a lock and waiting is on
futures, so that episodes in several event loops and threads share a pool. Nothing here calls
the engine in the caller's thread.
"""

from __future__ import annotations

import asyncio
import contextlib
import threading
import time
from collections import deque
from collections.abc import Callable, Sequence
from concurrent.futures import Future
from dataclasses import dataclass, field
from functools import partial

from inspect_docker_pool.config import ProjectConfig
from inspect_docker_pool.context import ACQUIRE, WARM_HITS, exceeds_bounds, measure
from inspect_docker_pool.engine import CLOSED, Engine, undo, wait_for_thread
from inspect_docker_pool.errors import (
    SandboxError,
    SandboxImageError,
    SandboxStartError,
)
from inspect_docker_pool.image import Image
from inspect_docker_pool.project import Project

IDLE_SECONDS = 600.0
"""Idle seconds before a pool removes its warm projects."""

NETWORKS = 24
"""Networks that projects may have of their own: engines have addresses for about 30."""

SPARE_NETWORKS = 5
"""Networks beyond that for callers who exceed bounds."""

MAX_BACKOFF_SECONDS = 60.0
_NO_LIMIT = 1 << 30


@dataclass(frozen=True)
class PoolState:
    """A snapshot of a pool's counters."""

    idle: int
    starting: int
    leased: int
    removing: int
    waiting: int
    failures: int


def _running_loop() -> asyncio.AbstractEventLoop | None:
    try:
        return asyncio.get_running_loop()
    except RuntimeError:  # under trio, or in a thread
        return None


@dataclass(eq=False)
class Waiter:
    """A caller that waits for a project."""

    image: Image | None = None
    """A snapshot to start from; such a project is started for this caller alone."""
    future: Future[Project] = field(default_factory=Future)
    booked: bool = False
    """Whether a start from ``image`` is in progress."""
    exceeds: bool = field(default_factory=exceeds_bounds)
    """Whether it waits for no bound."""
    loop: asyncio.AbstractEventLoop | None = field(default_factory=_running_loop)

    def give(self, project: Project) -> bool:
        """Hand a project over; return whether the caller still wanted it."""
        if self.loop is not None and self.loop.is_closed():
            return False  # nobody cancelled what waited in it
        if not self.future.set_running_or_notify_cancel():
            return False
        self.future.set_result(project)
        return True

    def fail(self, error: SandboxError) -> None:
        if self.future.set_running_or_notify_cancel():
            self.future.set_exception(error)


class Networks:
    """The networks that an engine has addresses for; pools take turns when there are too few."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._taken = 0
        self._queue: deque[Pool] = deque()

    def are_short(self) -> bool:
        """Return whether callers wait for networks, so that no project shall keep one idle."""
        return bool(self._queue)

    def take(self, pool: Pool, count: int, *, exceeds: bool = False, queues: bool = True) -> bool:
        """Take the networks of one project, if there are enough and no other pool is next.

        Args:
            pool: the pool; it is next when the others had their turn, if it queues.
            count: how many.
            exceeds: whether the caller waits for no bound.
            queues: whether a caller waits.
        """
        most = NETWORKS + exceeds * max(SPARE_NETWORKS, count)
        with self._lock:
            is_next = exceeds or not self._queue or self._queue[0] is pool
            if not count or (is_next and self._taken + count <= max(most, count)):
                self._taken += count
                if pool in self._queue:
                    self._queue.remove(pool)
                return True
            if queues and pool not in self._queue:
                self._queue.append(pool)
            return False

    def give(self, count: int) -> Pool | None:
        """Give the networks of one project back; return the pool that is next to take some."""
        with self._lock:
            self._taken -= count
            return self._queue[0] if count and self._queue else None

    def leave(self, pool: Pool) -> None:
        """Take a pool whose callers wait for no networks out of the queue."""
        with self._lock, contextlib.suppress(ValueError):
            self._queue.remove(pool)


class Pool:
    """The projects of one key: the containers of as many episodes.

    Args:
        engine: the engine that they run on.
        config: the configuration of the projects.
        images: the images of their services.
        networks: the networks that its projects share with those of other pools.
        make: describes a new one, from the pool's own image or from a snapshot.
        lost: called when the pool's image is gone from the engine.
    """

    def __init__(
        self,
        engine: Engine,
        config: ProjectConfig,
        images: Sequence[Image],
        networks: Networks,
        make: Callable[[Image | None], Project],
        lost: Callable[[Pool], None] = lambda pool: None,
    ) -> None:
        self.config = config
        self.images = images
        self._engine = engine
        self._networks = networks
        self._own = len(config.networks)
        self._make = make
        self._lost = lost
        self._lock = threading.Lock()
        self._idle: deque[Project] = deque()
        self._leased: set[Project] = set()
        self._left: list[Project] = []  # the engine did not remove them; tried again by tend()
        self._waiters: deque[Waiter] = deque()
        self._starting = 0
        self._dedicated = 0  # starting projects that come from a snapshot, for one caller
        self._removing = 0
        self._failures = 0
        self._retry_at = 0.0
        self._warm = config.pool.warm
        self._max = config.pool.max
        self._floor = 0
        self._resting = False
        self._last_used = float("-inf")
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

    @property
    def last_used(self) -> float:
        """Monotonic time of the last caller."""
        return self._last_used

    def rest(self, resting: bool) -> None:
        """Stop keeping projects ready (the pool stays open), or resume it."""
        self._resting = resting

    def note_use(self) -> None:
        """Record that somebody wants this pool's projects."""
        self._last_used = time.monotonic()

    def expect(self, count: int) -> None:
        """Start projects for future callers, as many as ``max`` allows.

        They are kept until as many callers have come. Zero cancels the expectation.
        """
        with self._lock:
            if count:
                self._last_used = time.monotonic()
            room = count if self._max is None else min(count, self._max - len(self._leased))
            self._floor = max(self._floor, room) if count else 0
        self.tend()

    async def acquire(self, image: Image | None = None, *, begun: float | None = None) -> Project:
        """Wait for a project for this caller alone; first come, first served.

        Args:
            image: a snapshot to start from, in place of the pool's own image.
            begun: monotonic time at which the caller came, if that was earlier.
        """
        begun = time.monotonic() if begun is None else begun
        waiter = Waiter(image)
        with self._lock:
            if self._closed:
                raise SandboxStartError(CLOSED)
            self._last_used = time.monotonic()
            self._resting = False
            # Who exceeds bounds goes before those who wait for one.
            (self._waiters.appendleft if waiter.exceeds else self._waiters.append)(waiter)
        self.pump()
        try:
            project = await wait_for_thread(waiter.future)
        except BaseException as ex:
            undo(ex, partial(self._withdraw, waiter))
            raise
        if project.ready_at <= begun:
            measure(WARM_HITS)
        measure(ACQUIRE, time.monotonic() - begun)
        return project

    def _withdraw(self, waiter: Waiter) -> None:
        """Take a cancelled caller out; a project that was starting for it is not affected."""
        with self._lock:
            if waiter in self._waiters:
                self._waiters.remove(waiter)
            cancelled = waiter.future.cancel() or waiter.future.cancelled()
            given = not cancelled and waiter.future.exception() is None
        if given:
            self.release(waiter.future.result())
        self.pump()

    def release(self, project: Project) -> None:
        """Give a project back for removal in the background. Safe to call again."""
        with self._lock:
            if project not in self._leased:
                return
            self._leased.discard(project)
            if project.kept:
                return
            self._removing += 1
        self._dispose(project)

    def tend(self) -> None:
        """Refill, shrink and retry; called after every change and periodically."""
        with self._lock:
            surplus, self._left = self._left, []
            while len(self._idle) > max(self._warm_now(), self._waiting()):
                surplus.append(self._idle.popleft())
            self._removing += len(surplus)
        for project in surplus:
            self._dispose(project)
        self.pump()

    def projects_in_use(self) -> list[Project]:
        """List the projects in use."""
        with self._lock:
            return list(self._leased)

    def close(self) -> list[Project]:
        """Accept no more callers; return what is left to remove, leased projects included."""
        with self._lock:
            self._closed = True
            rest = [*self._left, *self._idle, *(c for c in self._leased if not c.kept)]
            self._idle.clear()
            self._leased.clear()
            waiters = list(self._waiters)
            self._waiters.clear()
        for waiter in waiters:
            waiter.fail(SandboxStartError(CLOSED))
        return rest

    def pump(self) -> None:
        """Serve waiting callers, then start missing projects."""
        for project in self._serve():
            self._dispose(project)
        for waiter in self._book():
            self._submit_start(waiter)

    # Under the lock -----------------------------------------------------------------

    def _warm_now(self) -> int:
        idle_since = time.monotonic() - self._last_used
        short = self._own > 0 and self._networks.are_short()
        if self._closed or short or idle_since > IDLE_SECONDS:
            return 0
        return max(0 if self._resting else self._warm, self._floor)

    def _waiting(self) -> int:
        """Number of callers that any project of the pool can serve."""
        return sum(waiter.image is None for waiter in self._waiters)

    def _total(self) -> int:
        return len(self._idle) + len(self._leased) + self._starting + self._removing

    def _surplus(self) -> int:
        """Containers ready or starting for which there is neither a caller nor a warm place."""
        return self._supply() - self._waiting() - self._warm_now()

    def _supply(self) -> int:
        return len(self._idle) + self._starting - self._dedicated

    # Serving ------------------------------------------------------------------------

    def _serve(self) -> list[Project]:
        """Hand out ready projects; return those that died while they were idle."""
        dead: list[Project] = []
        with self._lock:
            while self._idle and self._waiting():
                project = self._idle.popleft()
                if not project.is_ready():
                    self._removing += 1
                    dead.append(project)
                elif not self._hand_over(project):
                    self._idle.appendleft(project)
        return dead

    def _hand_over(self, project: Project) -> bool:
        # Within the lock, so that callers wake in the order in which they came.
        for waiter in list(self._waiters):
            if waiter.image is None:
                self._waiters.remove(waiter)
                self._leased.add(project)
                if waiter.give(project):
                    self._floor = max(0, self._floor - 1)
                    return True
                self._leased.discard(project)
        return False

    # Starting -----------------------------------------------------------------------

    def _book(self) -> list[Waiter | None]:
        """Register the starts that are wanted and allowed now, in the order of the callers."""
        surplus: Project | None = None
        with self._lock:
            if self._closed:
                return []
            total, supply = self._total(), self._supply()
            room = _NO_LIMIT if self._max is None else self._max - total
            starts: list[Waiter | None] = []
            for waiter in self._waiters:
                if waiter.image is None and supply > 0:
                    supply -= 1
                elif not waiter.booked:
                    # Nobody overtakes.
                    if len(starts) >= room and not waiter.exceeds:
                        self._networks.leave(self)
                        break
                    if not self._networks.take(self, self._own, exceeds=waiter.exceeds):
                        break
                    waiter.booked = waiter.image is not None
                    starts.append(waiter if waiter.booked else None)
            else:
                self._networks.leave(self)
                warm = self._warm_now() if time.monotonic() >= self._retry_at else 0
                refill = min(max(0, warm - supply), room - len(starts))
                for _ in range(refill):
                    if not self._networks.take(self, self._own, queues=False):
                        break
                    starts.append(None)
            self._starting += len(starts)
            self._dedicated += sum(waiter is not None for waiter in starts)
            stuck = any(w.image is not None and not w.booked for w in self._waiters)
            if stuck and self._idle:
                # A warm project occupies the place that one from a snapshot needs.
                surplus = self._idle.pop()
                self._removing += 1
        if surplus is not None:
            self._dispose(surplus)
        return starts

    def _submit_start(self, waiter: Waiter | None) -> None:
        # Several services wait for each other more than they work.
        several = len(self.config.services) > 1
        starts = self._engine.project_starts if several else self._engine.starts
        # Refilling a pool has to wait while an episode waits.
        submit = starts.submit if waiter or self._waiting() else starts.submit_later
        try:
            submit(self._start_one, waiter)
        except RuntimeError:  # the interpreter is shutting down
            with self._lock:
                self._ended_start(waiter)
                self._networks.give(self._own)

    def _ended_start(self, waiter: Waiter | None) -> None:
        self._starting -= 1
        self._dedicated -= waiter is not None

    def _start_one(self, waiter: Waiter | None) -> None:
        with self._lock:
            # The caller that wanted this project may be gone by now.
            unwanted = waiter not in self._waiters if waiter else self._surplus() > 0
            unwanted = unwanted or self._closed
            if unwanted:
                self._ended_start(waiter)
        if unwanted:
            self._give_networks()
            self.pump()
            return
        project = self._make(waiter.image if waiter else None)
        try:
            project.start(lambda: self._closed)
        except BaseException as ex:
            self._try_removal(project)
            self._report_failure(
                waiter, ex if isinstance(ex, SandboxError) else SandboxStartError(str(ex))
            )
            return
        with self._lock:
            self._ended_start(waiter)
            self._failures = 0
            if waiter is None:
                keep = not self._closed
                if keep:
                    self._idle.append(project)
            else:
                keep = waiter in self._waiters
                if keep:
                    self._waiters.remove(waiter)
                    self._leased.add(project)
                    keep = waiter.give(project)
                    if not keep:
                        self._leased.discard(project)
            if not keep:
                self._removing += 1
        if not keep:
            self._remove(project)
        self.pump()

    def _report_failure(self, waiter: Waiter | None, ex: SandboxError) -> None:
        with self._lock:
            self._ended_start(waiter)
            self._failures += 1
            delay = min(MAX_BACKOFF_SECONDS, 0.5 * 2 ** min(self._failures, 10))
            self._retry_at = time.monotonic() + delay
            # A caller gets the error immediately: the episode runner decides about retries.
            if waiter is None:
                waiter = next((w for w in self._waiters if w.image is None), None)
                gone = isinstance(ex, SandboxImageError)
            else:
                gone = False  # the snapshot is gone, not the pool's image
            if waiter is not None and waiter in self._waiters:
                self._waiters.remove(waiter)
        if gone:
            self._lost(self)
        if waiter is not None:
            waiter.fail(ex)
        self.pump()

    # Removing -----------------------------------------------------------------------

    def _dispose(self, project: Project) -> None:
        try:
            self._engine.removals.submit(self._remove, project)
        except RuntimeError:  # the interpreter is shutting down: no threads any more
            self._remove(project)

    def _remove(self, project: Project) -> None:
        self._try_removal(project)
        with self._lock:
            self._removing -= 1
        self.pump()

    def _try_removal(self, project: Project) -> None:
        if project.remove():
            self._give_networks()
        else:
            with self._lock:
                self._left.append(project)

    def _give_networks(self) -> None:
        if pool := self._networks.give(self._own):
            pool.pump()
