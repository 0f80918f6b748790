"""The pools of this process on one engine: made, tended, and removed without leaving anything."""

from __future__ import annotations

import atexit
import contextlib
import os
import threading
import time
from collections.abc import Callable, Sequence
from concurrent.futures import Future, wait
from functools import partial
from logging import getLogger

from inspect_docker_pool.config import ProjectConfig
from inspect_docker_pool.container import Container
from inspect_docker_pool.disk_guard import DiskGuard
from inspect_docker_pool.engine import (
    CLOSED,
    Engine,
    Ticker,
    do_postponed,
    engine_address,
    engine_errors,
    quietly,
    wait_for_thread,
)
from inspect_docker_pool.errors import (
    SandboxEngineError,
    SandboxImageError,
)
from inspect_docker_pool.image import Image, Images, check_volumes
from inspect_docker_pool.lease import Lease, Watch, reap, remove_owned
from inspect_docker_pool.pool import Networks, Pool
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


class PoolManager:
    """All pools of this process on one engine.

    Thread-safe; never waits for the engine in a caller's event loop.
    """

    def __init__(self) -> None:
        self.engine = Engine()
        self.owner = Lease.current()
        self._images = Images(self.engine)
        self._guard = DiskGuard(self.engine, self.owner, self._in_use)
        self.snapshots = Snapshots(self.engine, self.owner, self.acquire, self.known)
        self._networks = Networks()
        self._pools: dict[str, Pool] = {}
        self._found: dict[ProjectConfig, Future[Pool]] = {}
        """The pools of configurations, now or when their images are there."""
        self._ahead: set[ProjectConfig] = set()
        """Configurations whose images were made ahead of need, until a task starts with them."""
        self._lock = threading.Lock()
        self._opening = threading.Lock()
        self._tickers: list[Ticker] = []
        self._watch: Watch | None = None
        self._closed = False
        self._pid = os.getpid()

    async def prepare(self, config: ProjectConfig) -> Pool:
        """Build or pull the image again, as at the start of a task, and return its pool.

        One that was made ahead is used as it is.
        """
        with self._lock:
            made = config in self._ahead and config in self._found
            self._ahead.discard(config)
        pool = await wait_for_thread(self._find(config, refresh=not made))
        pool.note_use()
        return pool

    def make_ahead(self, config: ProjectConfig) -> Future[Pool]:
        """Build or pull an image before it is needed; returns immediately.

        The pool keeps no containers ready until somebody wants them.

        Returns:
            The pool to come, cancelled if the pools were closed.
        """
        if self._closed:
            made: Future[Pool] = Future()
            made.cancel()
            return made
        with self._lock:
            new = config not in self._found
            if new:
                self._ahead.add(config)
        return self._find(config, refresh=new)

    async def acquire(self, config: ProjectConfig) -> tuple[Pool, Project]:
        """Wait for a container; first come, first served.

        The order holds from the first use on, also while the image is still being looked for.
        """
        begun = time.monotonic()
        for _ in range(_SEARCHES - 1):
            pool = await wait_for_thread(self._find(config))
            with contextlib.suppress(SandboxImageError):  # another program removed the image
                return pool, await pool.acquire(begun=begun)
        pool = await wait_for_thread(self._find(config))
        return pool, await pool.acquire(begun=begun)

    def known(self, config: ProjectConfig) -> Pool | None:
        """Return the pool of a configuration that was used before, without waiting."""
        with self._lock:
            found = self._found.get(config)
        done = found is not None and found.done() and found.exception() is None
        return found.result() if found is not None and done else None

    def pools(self) -> list[Pool]:
        with self._lock:
            return list(self._pools.values())

    def reap(self) -> int:
        """Remove what dead owners left; return how many containers."""
        return reap(self.engine, spare=self.owner.id)

    def close(self) -> None:
        """Remove every container, network and volume of this process and end its threads."""
        if os.getpid() != self._pid:
            return  # a forked child owns nothing
        with self._lock:
            self._closed = True
            pools, self._pools = list(self._pools.values()), {}
            self._found.clear()
            tickers, self._tickers = self._tickers, []
        for ticker in tickers:
            ticker.stop(0)
        deadline = time.monotonic() + _CLOSE_SECONDS
        left = self._run_all([each.remove for pool in pools for each in pool.close()], deadline)
        while any(p.state.starting or p.state.removing for p in pools):
            if time.monotonic() > deadline:
                break
            time.sleep(0.02)
        self.snapshots.close()
        left += self._run_all([self._sweep], deadline)
        for ticker in tickers:
            ticker.stop(max(1.0, deadline - time.monotonic()))
        self.engine.close()
        if self._watch is not None and not left:
            self._watch.stop()
        if left:
            logger.warning(
                "docker_pool: the Docker engine at %s does not answer, or cannot remove something; "
                "what this process leaves on it is removed by the next one, or by: inspect sandbox "
                "cleanup docker_pool",
                engine_address(),
            )

    def _sweep(self) -> bool:
        """Remove what the engine has made of requests whose answers were lost, and snapshots."""
        return quietly(remove_owned, self.engine, self.owner.id, keep_kept=True)

    def _run_all(self, works: Sequence[Callable[[], bool]], deadline: float) -> int:
        """Run removals concurrently; return how many have not succeeded by the deadline."""
        try:
            removals = [self.engine.removals.submit(work) for work in works]
        except RuntimeError:  # at interpreter exit there are no new threads
            return sum(not work() for work in works)
        done, _ = wait(removals, max(0.0, deadline - time.monotonic()))
        return len(removals) - sum(removal.result() for removal in done)

    def _find(self, config: ProjectConfig, *, refresh: bool = False) -> Future[Pool]:
        """Find the images of a configuration and, with them, the pool; returns immediately.

        Args:
            config: the configuration.
            refresh: build or pull again, even if the pool is known.
        """
        self._images.budget.note_use(config)
        with self._lock:
            found = self._found.get(config)
            if found is not None and not refresh:
                return found
            try:
                found = self.engine.images.submit(self._search, config, refresh)
            except RuntimeError as ex:  # the interpreter is shutting down
                raise SandboxEngineError(f"start-up: {ex}") from ex
            self._found.setdefault(config, found)  # known pools serve until it has succeeded
        found.add_done_callback(partial(self._keep_found, config))
        return found

    def _search(self, config: ProjectConfig, refresh: bool) -> Pool:
        with engine_errors("start-up"):
            self._open()
            images = [self._images.find(each, refresh=refresh) for each in config.services]
            return self._pool_of(config, images)

    def _keep_found(self, config: ProjectConfig, found: Future[Pool]) -> None:
        with self._lock:
            if found.exception() is None:
                self._found[config] = found
            elif self._found.get(config) is found:
                del self._found[config]

    def _pool_of(self, config: ProjectConfig, images: Sequence[Image]) -> Pool:
        """Return the pool of a configuration whose images exist."""
        check_volumes(config.default, images[0])
        key = config.key([image.id for image in images])

        def make(snapshot: Image | None) -> Project:
            return Project(self.engine, self.owner, config, [snapshot] if snapshot else images)

        with self._lock:
            if self._closed:
                raise SandboxEngineError(CLOSED)
            pool = self._pools.get(key)
            if pool is None:
                pool = Pool(self.engine, config, images, self._networks, make, self._forget)
                pool.rest(sum(p.config.pool.warm for p in self._pools.values()) >= MOST_WARM)
                self._pools[key] = pool
        return pool

    def _forget(self, pool: Pool) -> None:
        """Look for the image again at the next use, because it is gone from the engine."""
        with self._lock:
            known = [(config, found) for config, found in self._found.items() if found.done()]
            for config, found in known:
                if found.exception() is None and found.result() is pool:
                    del self._found[config]

    def _open(self) -> None:
        with self._opening:
            if self._tickers or self._closed:
                return
            if self._watch is None:
                self._watch = Watch(self.owner)
            self.reap()
            if not self.engine.filters_calls:
                logger.warning(
                    "docker_pool: the Docker engine at %s filters no system calls; containers are "
                    "less isolated than docs/sandboxes.md says",
                    engine_address(),
                )
            tickers = [
                Ticker("docker_pool_keeper", _TEND_SECONDS, self._tend),
                Ticker("docker_pool_guard", _DISK_SECONDS, self._guard.look),
            ]
            with self._lock:
                if self._closed:
                    return
                self._tickers = tickers
            for ticker in tickers:
                ticker.start()

    def _tend(self) -> None:
        do_postponed()
        places = MOST_WARM
        for pool in sorted(self.pools(), key=lambda pool: pool.last_used, reverse=True):
            warm = pool.config.pool.warm
            pool.rest(places < warm and places < MOST_WARM)
            places -= warm
            pool.tend()
        self.snapshots.tend()

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
