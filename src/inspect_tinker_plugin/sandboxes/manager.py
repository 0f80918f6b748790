"""The pools of this process on one engine: make, tend, reap, and leave nothing behind."""

from __future__ import annotations

import atexit
import os
import threading
import time
from concurrent.futures import ThreadPoolExecutor

from inspect_tinker_plugin.errors import SandboxError
from inspect_tinker_plugin.sandboxes.config import ContainerConfig
from inspect_tinker_plugin.sandboxes.container import Container
from inspect_tinker_plugin.sandboxes.engine import Engine, engine_address, typed
from inspect_tinker_plugin.sandboxes.image import Images
from inspect_tinker_plugin.sandboxes.owner import BEAT_SECONDS, Beat, Owner, reap
from inspect_tinker_plugin.sandboxes.pool import Pool

_TEND_SECONDS = 1.0
_DISK_SECONDS = 5.0
_CLOSE_SECONDS = 60.0


class PoolManager:
    """All pools of this process on one engine. Thread-safe."""

    def __init__(self) -> None:
        self.engine = Engine()
        self.owner = Owner.current()
        self._images = Images(self.engine, self.owner)
        self._beat = Beat(self.engine, self.owner)
        self._pools: dict[str, Pool] = {}
        self._known: dict[ContainerConfig, Pool] = {}
        self._lock = threading.Lock()
        self._stop = threading.Event()
        self._keeper: threading.Thread | None = None
        self._pid = os.getpid()

    def prepare(self, config: ContainerConfig, *, refresh: bool = False) -> Pool:
        """Find or build the image and give the pool for it, in this thread.

        Args:
            config: what the containers are.
            refresh: build or pull again, as when a task starts.

        Raises:
            SandboxEngineError: the engine cannot be reached.
            SandboxImageError: the image is missing or its build failed.
        """
        known = None if refresh else self.known(config)
        if known is not None:
            return known
        self._open()
        image = self._images.resolve(config, refresh=refresh)
        key = config.key(image.id)
        with self._lock:
            pool = self._pools.get(key)
            if pool is None:
                pool = Pool(
                    self.engine,
                    config,
                    lambda: Container.start(self.engine, self.owner, config, image),
                )
                self._pools[key] = pool
            self._known[config] = pool
        pool.grow(config.pool)
        return pool

    def known(self, config: ContainerConfig) -> Pool | None:
        """Give the pool of a configuration that was prepared before, without waiting."""
        with self._lock:
            return self._known.get(config)

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
        self._stop.set()
        with self._lock:
            pools, self._pools = list(self._pools.values()), {}
            self._known.clear()
            keeper, self._keeper = self._keeper, None
        rest = [container for pool in pools for container in pool.close()]
        _remove_all(rest)
        deadline = time.monotonic() + _CLOSE_SECONDS
        while any(p.state.starting or p.state.removing for p in pools):
            if time.monotonic() > deadline:
                break
            time.sleep(0.02)
        if keeper is not None and keeper is not threading.current_thread():
            keeper.join(timeout=30)
        self._beat.stop()
        self.engine.close()

    def _open(self) -> None:
        with self._lock:
            if self._keeper is not None:
                return
            try:
                # The proof of life comes before anything that could be taken for dead.
                self._beat.renew()
            except SandboxError:
                raise
            except Exception as ex:
                raise typed(ex, "start-up") from ex
            self._stop.clear()
            self._keeper = threading.Thread(
                target=self._keep, name="docker_pool_keeper", daemon=True
            )
            self._keeper.start()
        self.reap()

    def _keep(self) -> None:
        beat = disk = time.monotonic()
        while not self._stop.wait(_TEND_SECONDS):
            now = time.monotonic()
            for pool in self.pools():
                pool.tend()
            try:
                if now - beat >= BEAT_SECONDS:
                    beat = now
                    self._beat.renew()
                if now - disk >= _DISK_SECONDS:
                    disk = now
                    self._guard_disks()
            except Exception:
                continue  # the engine is away; callers get the typed error

    def _guard_disks(self) -> None:
        """Stop containers whose layer outgrew its limit, where the engine cannot limit it."""
        watched = {
            container.id: container
            for pool in self.pools()
            for container in pool.containers()
            if container.config.limits.disk is not None
        }
        if not watched or self.engine.storage_quota(next(iter(watched.values())).image.id):
            return
        filters = {"label": f"inspect-tinker-plugin.owner={self.owner.id}"}
        for facts in self.engine.api.containers(filters=filters, size=True):
            container = watched.get(facts["Id"])
            if container is None:
                continue
            limit = container.config.limits.disk or 0
            if facts.get("SizeRw", 0) > limit:
                container.kill(f"its disk limit of {limit} bytes was exceeded")


def _remove_all(containers: list[Container]) -> None:
    try:
        with ThreadPoolExecutor(8, thread_name_prefix="docker_pool_close") as threads:
            list(threads.map(Container.remove, containers))
    except RuntimeError:  # at interpreter exit there are no new threads
        for container in containers:
            container.remove()


_managers: dict[tuple[int, str], PoolManager] = {}
_guard = threading.Lock()


def pool_manager() -> PoolManager:
    """Give this process's manager for the engine that the environment names."""
    key = (os.getpid(), engine_address())
    with _guard:
        manager = _managers.get(key)
        if manager is None:
            if not _managers:
                atexit.register(close_all)
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
