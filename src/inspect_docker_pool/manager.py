"""The pools of this process on one engine: made, tended, and removed without leaving anything."""

from __future__ import annotations

import atexit
import os
import threading
import time
from collections import deque
from collections.abc import Sequence
from concurrent.futures import Future, wait
from dataclasses import dataclass, field
from logging import getLogger
from queue import SimpleQueue

from inspect_docker_pool.config import ProjectConfig
from inspect_docker_pool.container import Container
from inspect_docker_pool.disk_guard import DiskGuard
from inspect_docker_pool.engine import (
    Engine,
    Ticker,
    engine_address,
    settled,
    typed,
    undo_postponed,
)
from inspect_docker_pool.errors import (
    SandboxEngineError,
    SandboxError,
    SandboxImageError,
    SandboxStartError,
)
from inspect_docker_pool.image import (
    CLOSED,
    Image,
    ImageBudget,
    Images,
    check_volumes,
)
from inspect_docker_pool.lease import (
    BEAT_SECONDS,
    Beat,
    Lease,
    Watch,
    close_before_signals_end_it,
    reap,
)
from inspect_docker_pool.pool import Pool, Waiter, served
from inspect_docker_pool.project import Project
from inspect_docker_pool.snapshot import Snapshots

logger = getLogger(__name__)

_TEND_SECONDS = 1.0
_DISK_SECONDS = 5.0
_CLOSE_SECONDS = 60.0
_SEARCHES = 3
"""How often a caller's image is looked for, or made again, if it disappears in the meantime."""

MOST_WARM = 32
"""Maximum warm containers of a process with many pools (one image per sample): the pools
that were used last keep theirs. A single pool keeps as many as it asks for."""


@dataclass(eq=False)
class _Use:
    """One configuration, from its first caller on."""

    config: ProjectConfig
    pool: Pool | None = None
    """The pool for its callers, once the image is known."""
    early: deque[Waiter] = field(default_factory=deque)
    """Callers that came before the image was known."""
    ahead: Future[Pool] | None = None
    """The image as it was made ahead of need, until a task starts with it."""


class PoolManager:
    """All pools of this process on one engine.

    Thread-safe; never waits for the engine in a caller's event loop.
    """

    def __init__(self) -> None:
        self.engine = Engine()
        self.owner = Lease.current()
        self._budget = ImageBudget(self.engine, self._forget_image)
        self._images = Images(self.engine, self._budget)
        self._beat = Beat(self.engine, self.owner)
        self._guard = DiskGuard(self.engine, self.owner, self._in_use)
        self.snapshots = Snapshots(self.engine, self.owner, self.acquire, self.known)
        self._pools: dict[str, Pool] = {}
        self._uses: dict[ProjectConfig, _Use] = {}
        self.dropped: SimpleQueue[tuple[Pool, Project]] = SimpleQueue()
        """Projects whose sandboxes nothing refers to any more; released by the keeper."""
        self._lock = threading.Lock()
        self._opening = threading.Lock()
        self._tickers: list[Ticker] = []
        self._watch: Watch | None = None
        self._closed = False
        self._pid = os.getpid()

    async def prepare(self, config: ProjectConfig) -> Pool:
        """Build or pull the image again, as at the start of a task, and return its pool."""
        self._budget.record_use(config)
        with self._lock:
            use = self._uses.setdefault(config, _Use(config))
            ahead, use.ahead = use.ahead, None
        fresh = ahead is not None and ahead.done() and ahead.exception() is None
        return await settled(self._resolve(use, refresh=not fresh))

    def make_ahead(self, config: ProjectConfig) -> Future[Pool]:
        """Build or pull an image before it is needed; returns immediately.

        The next :meth:`prepare` uses it as it is. The pool keeps no containers ready until
        somebody wants them.

        Returns:
            The pool to come, cancelled if the pools are closed.
        """
        self._budget.record_use(config)
        made: Future[Pool] = Future()
        with self._lock:
            use = self._uses.setdefault(config, _Use(config))
            if self._closed:
                made.cancel()
                return made
            if use.pool is not None:
                made.set_result(use.pool)
                return made
        made = self._resolve(use, refresh=True, wanted=False)
        with self._lock:
            use.ahead = made
        return made

    async def acquire(self, config: ProjectConfig) -> tuple[Pool, Project]:
        """Wait for a container; first come, first served.

        The order holds from the first use on, also while the image is still being looked for.
        """
        self._budget.record_use(config)
        for _ in range(_SEARCHES - 1):
            waiter = Waiter()
            try:
                return await self._acquire(config, waiter)
            except SandboxImageError:
                if not waiter.lost:
                    raise
        # Its image was removed, to make room or by another program, while this caller joined.
        return await self._acquire(config, Waiter())

    async def _acquire(self, config: ProjectConfig, waiter: Waiter) -> tuple[Pool, Project]:
        with self._lock:
            use = self._uses.setdefault(config, _Use(config))
            pool = use.pool
            if pool is None:
                use.early.append(waiter)
                first = len(use.early) == 1
            else:
                pool.join(waiter)
        if pool is not None:
            return pool, await pool.wait(waiter)
        if first:
            self._resolve(use, refresh=False)
        project = await served(waiter, lambda waiter: self._withdraw(use, waiter))
        assert waiter.pool is not None
        return waiter.pool, project

    def _withdraw(self, use: _Use, waiter: Waiter) -> None:
        with self._lock:
            if waiter in use.early:
                use.early.remove(waiter)
                waiter.future.cancel()
            pool = waiter.pool
        if pool is not None:
            pool.withdraw(waiter)

    def known(self, config: ProjectConfig) -> Pool | None:
        """Return the pool of a configuration that was used before, without waiting."""
        with self._lock:
            use = self._uses.get(config)
            return use.pool if use is not None else None

    def pools(self) -> list[Pool]:
        with self._lock:
            return list(self._pools.values())

    def reap(self) -> int:
        """Remove what dead owners left; return how many containers."""
        try:
            return reap(self.engine, spare=[self.owner.id])
        except SandboxError:
            raise
        except Exception as ex:
            raise typed(ex, "reaping") from ex

    def close(self) -> None:
        """Remove every container, network and volume of this process and end its threads."""
        if os.getpid() != self._pid:
            return  # a forked child owns nothing
        with self._lock:
            self._closed = True
            pools, self._pools = list(self._pools.values()), {}
            early = [waiter for use in self._uses.values() for waiter in use.early]
            self._uses.clear()
            tickers, self._tickers = self._tickers, []
        for waiter in early:
            waiter.fail(SandboxStartError(CLOSED))
        for ticker in tickers:
            ticker.stop(0)
        deadline = time.monotonic() + _CLOSE_SECONDS
        rest = [project for pool in pools for project in pool.close()]
        left = self._remove(rest, deadline)
        while any(p.state.starting or p.state.removing for p in pools):
            if time.monotonic() > deadline:
                break
            time.sleep(0.02)
        left += self._remove([self.snapshots], deadline)
        left += self._remove([self._beat], deadline)
        for ticker in tickers:
            ticker.stop(max(1.0, deadline - time.monotonic()))
        self.engine.close()
        if self._watch is not None and not left:
            self._watch.stop()
        if left:
            logger.warning(
                "docker_pool: the Docker engine at %s does not answer; what this process leaves "
                "on it is removed by the next one, or by: inspect sandbox cleanup docker_pool",
                engine_address(),
            )

    def _remove(self, things: Sequence[Project | Snapshots | Beat], deadline: float) -> int:
        """Remove all of these concurrently; return how many are left at the deadline."""
        try:
            removals = [self.engine.removals.submit(thing.remove) for thing in things]
        except RuntimeError:  # at interpreter exit there are no new threads
            return sum(not thing.remove() for thing in things)
        done, _ = wait(removals, max(0.0, deadline - time.monotonic()))
        return len(removals) - sum(removal.result() for removal in done)

    def _resolve(self, use: _Use, *, refresh: bool, wanted: bool = True) -> Future[Pool]:
        """Find the image of a configuration and, with it, the pool; returns immediately."""
        found: Future[Pool] = Future()
        found.set_running_or_notify_cancel()  # others wait for it when one caller gives up

        def fail(ex: BaseException) -> None:
            error = ex if isinstance(ex, SandboxError) else typed(ex, "start-up")
            with self._lock:
                early = list(use.early)
                use.early.clear()
            for waiter in early:
                waiter.fail(error)
            found.set_exception(error)

        def look() -> None:
            try:
                self._open()
                images = self._images.resolve_all(use.config, refresh=refresh)
            except BaseException as ex:  # the boundary: passed to all waiters
                fail(ex)
            else:
                images.add_done_callback(arrived)

        def arrived(images: Future[list[Image]]) -> None:
            try:
                pool = self._publish(use, images.result())
                if wanted:
                    pool.used()
            except BaseException as ex:  # the boundary: passed to all waiters
                fail(ex)
            else:
                found.set_result(pool)

        try:
            self.engine.starts.submit(look)
        except RuntimeError as ex:  # the interpreter is shutting down
            fail(ex)
        return found

    def _publish(self, use: _Use, images: Sequence[Image]) -> Pool:
        """Return the pool of a configuration whose images exist, also to its early callers."""
        config = use.config
        check_volumes(config.default, images[0])
        key = config.key([image.id for image in images])

        def start(snapshot: Image | None) -> Project:
            used = images if snapshot is None else [snapshot]
            return Project.start(self.engine, self.owner, config, used, lambda: self._closed)

        with self._lock:
            if self._closed:
                raise SandboxEngineError(CLOSED)
            pool = self._pools.get(key)
            if pool is None:
                pool = Pool(self.engine, config, images, start, self._forget)
                pool.rest(sum(p.wanted_warm for p in self._pools.values()) >= MOST_WARM)
                self._pools[key] = pool
            pool.grow(config.pool)
            use.pool = pool
            while use.early:
                pool.join(use.early.popleft())
        return pool

    def _forget(self, pool: Pool) -> None:
        """Look for the image again at the next use, because it is gone from the engine."""
        with self._lock:
            for use in self._uses.values():
                if use.pool is pool:
                    use.pool = None

    def _forget_image(self, image: str) -> None:
        """Make an image again at its next use, because it was removed to make room."""
        with self._lock:
            for use in self._uses.values():
                if use.pool and image in [used.id for used in use.pool.images]:
                    use.pool = None

    def _open(self) -> None:
        with self._opening:
            if self._tickers or self._closed:
                return
            try:
                # The proof of life must exist before anything that could be taken for dead.
                self._beat.renew()
                if self._watch is None:
                    self._watch = Watch(self.owner)
                self.reap()
            except SandboxError:
                raise
            except Exception as ex:
                raise typed(ex, "start-up") from ex
            if not self.engine.filters_calls:
                logger.warning(
                    "docker_pool: the Docker engine at %s filters no system calls; containers are "
                    "less isolated than docs/sandboxes.md says",
                    engine_address(),
                )
            tickers = [
                Ticker("docker_pool_keeper", _TEND_SECONDS, self._tend),
                Ticker("docker_pool_beat", BEAT_SECONDS, self._beat.renew),
                Ticker("docker_pool_guard", _DISK_SECONDS, self._guard.look),
            ]
            with self._lock:
                if self._closed:
                    return
                self._tickers = tickers
            for ticker in tickers:
                ticker.start()

    def _tend(self) -> None:
        undo_postponed()
        while not self.dropped.empty():
            pool, project = self.dropped.get()
            pool.release(project)
        places = MOST_WARM
        for pool in sorted(self.pools(), key=lambda pool: pool.last_used, reverse=True):
            pool.rest(places < pool.wanted_warm and places < MOST_WARM)
            places -= pool.wanted_warm
            pool.tend()

    def _in_use(self) -> list[Container]:
        projects = [project for pool in self.pools() for project in pool.projects_in_use()]
        return [container for project in projects for container in project.containers]


_managers: dict[tuple[int, str], PoolManager] = {}
_guard = threading.Lock()


def pool_manager() -> PoolManager:
    """Return this process's manager for the engine that the environment names."""
    key = (os.getpid(), engine_address())
    with _guard:
        manager = _managers.get(key)
        if not _managers:
            atexit.register(close_all)
        close_before_signals_end_it(close_all)
        if manager is None:
            manager = PoolManager()
            _managers[key] = manager
        return manager


def close_all() -> None:
    """Release everything that this process holds on any engine. Safe to call again."""
    with _guard:
        managers = [m for (pid, _), m in _managers.items() if pid == os.getpid()]
        _managers.clear()
    for manager in managers:
        manager.close()
