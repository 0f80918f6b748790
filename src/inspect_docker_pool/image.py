"""Finds, pulls or builds an image, and reads from it what a container needs to know.

The images that this process makes are kept within a disk budget: the least recently used one goes.
"""

from __future__ import annotations

import hashlib
import threading
from collections import OrderedDict, defaultdict
from collections.abc import Callable
from concurrent.futures import Future
from dataclasses import dataclass
from logging import getLogger
from typing import Any

from inspect_docker_pool.config import GIB, Build, ContainerConfig, HealthCheck, ProjectConfig
from inspect_docker_pool.engine import Engine, Workers, quietly, typed
from inspect_docker_pool.errors import (
    SandboxConfigError,
    SandboxEngineError,
    SandboxImageError,
)

logger = getLogger(__name__)

DEFAULT_BYTES = 50 * GIB

CLOSED = "the sandbox pools were closed"

BUILD_SILENCE_SECONDS = 3600
"""Seconds that a build step may print nothing."""

PULL_SILENCE_SECONDS = 600
"""Seconds that a pull may make no progress."""


@dataclass(frozen=True)
class Image:
    """The pool's knowledge of an image."""

    id: str
    user: str
    working_dir: str
    entrypoint: tuple[str, ...]
    command: tuple[str, ...]
    environment: tuple[tuple[str, str], ...]
    volumes: tuple[str, ...]
    """Folders that containers get as volumes."""
    architecture: str
    """As the engine names it: ``amd64``, ``arm64``, …"""
    healthcheck: HealthCheck | None = None


def check_volumes(config: ContainerConfig, image: Image) -> None:
    """Refuse a limited disk beside volumes of the image, which nothing limits."""
    if config.is_server:  # what the policy does not work in
        return
    covered = {path for path, _ in config.tmpfs} | {mount.target for mount in config.mounts}
    free = [path for path in image.volumes if path.rstrip("/") not in covered]
    if free and config.limits.disk is not None:
        raise SandboxConfigError(
            f"{config.source}: the image has a VOLUME {free[0]}, which the limit of the disk does "
            f"not cover; mount memory there (tmpfs: ['{free[0]}:size=1g']), or lift the limit "
            "(x-docker-pool: {disk: 0})"
        )


def reference_of(config: ContainerConfig) -> str:
    """Return the name under which the engine knows a configuration's image."""
    if config.build is not None:
        return config.image or f"inspect-pool/{_slug(config.build)}:latest"
    return config.image or ""


@dataclass(frozen=True)
class _Made:
    id: str
    layers: tuple[tuple[str, int], ...]
    """The layers of the image, each identified with all layers beneath it, and their bytes."""


class ImageBudget:
    """The images that this process built or pulled, in the order of their last use.

    Images that were there before are not counted and never removed. Layers that several
    images share count once. Thread-safe.
    """

    def __init__(self, engine: Engine, evicted: Callable[[str], None]) -> None:
        self._engine = engine
        self._evicted = evicted
        self._made: OrderedDict[str, _Made] = OrderedDict()
        self._stated: int | None = None
        self._lock = threading.Lock()

    def record_use(self, config: ProjectConfig) -> None:
        """Record that the images of a configuration are used, and its budget, if it has one.

        The largest budget counts.
        """
        with self._lock:
            for reference in map(reference_of, config.services):
                if reference in self._made:
                    self._made.move_to_end(reference)
            if config.pool.images is not None:
                self._stated = max(self._stated or 0, config.pool.images)

    def counts(self, reference: str) -> bool:
        """Tell whether an image was made by this process."""
        with self._lock:
            return reference in self._made

    def count(self, reference: str, image: str, before: str | None = None) -> None:
        """Count an image that was built or pulled just now, and make room, in this thread.

        Args:
            reference: its name.
            image: its id.
            before: what had that name until now; it is removed, or counted while it is in use.
        """
        made = self._measure(image)
        if before is not None and before != image:
            self._remove_replaced(before)
        with self._lock:
            self._made[reference] = made
            self._made.move_to_end(reference)
            older = list(self._made)[:-1]
            budget = DEFAULT_BYTES if self._stated is None else self._stated
        for name in older:
            if self._sum_up() <= budget:
                return
            self._remove(name, budget)

    def _remove_replaced(self, image: str) -> None:
        # An image without its name cannot be found again. The engine keeps one that has another
        # name, or a container; the last of those may end before this process does.
        if quietly(self._engine.api.remove_image, image):
            self._evicted(image)
            return
        held = self._measure(image)
        with self._lock:
            self._made[image] = held
            self._made.move_to_end(image, last=False)  # the first to go

    def _measure(self, image: str) -> _Made:
        parts, beneath = [], ""
        history = self._engine.api.history(image)  # type: ignore[no-untyped-call]  # the stubs miss it
        for entry in reversed(history):
            beneath = f"{hash((beneath, entry['Created'], entry['CreatedBy'], entry['Size']))}"
            parts.append((beneath, int(entry["Size"])))
        return _Made(image, tuple(parts))

    def _sum_up(self) -> int:
        with self._lock:
            parts = {part for made in self._made.values() for part in made.layers}
        return sum(size for _, size in parts)

    def _remove(self, name: str, budget: int) -> None:
        with self._lock:
            made = self._made.get(name)
        before = self._sum_up()
        # Not by force: the engine refuses while a container runs from it.
        if made is None or not quietly(self._engine.api.remove_image, name):
            return
        with self._lock:
            if self._made.get(name) is not made:
                return  # another build has made room as well, or has made it again
            del self._made[name]
        self._evicted(made.id)
        logger.warning(
            "docker_pool: removed image %s, the least recently used one (%.1f MB), to keep images "
            "within %.1f GB; it is made again when it is needed. More room: x-docker-pool: "
            "{images: 200g}",
            name,
            (before - self._sum_up()) / 1e6,
            budget / 1e9,
        )


class Images:
    """Images of one engine; each is made once, however many wait for it, and examined once.

    Builds and pulls run in the engine's build threads, a few at once and one per image.
    """

    def __init__(self, engine: Engine, budget: ImageBudget) -> None:
        self._engine = engine
        self._budget = budget
        self._known: dict[str, Image] = {}
        self._searches: dict[tuple[object, ...], Future[Image]] = {}
        self._making: dict[str, threading.Lock] = defaultdict(threading.Lock)
        self._lock = threading.Lock()

    def resolve_all(self, config: ProjectConfig, *, refresh: bool) -> Future[list[Image]]:
        """Make sure that the images of all services exist; see :meth:`resolve`."""
        searches = [self.resolve(service, refresh=refresh) for service in config.services]
        found: Future[list[Image]] = Future()
        missing = threading.Semaphore(len(searches) - 1)

        def land(search: Future[Image]) -> None:
            if not missing.acquire(blocking=False):  # the last one
                try:
                    found.set_result([search.result() for search in searches])
                except BaseException as ex:  # the boundary: passed to all waiters
                    found.set_exception(ex)

        for search in searches:
            search.add_done_callback(land)
        return found

    def resolve(self, config: ContainerConfig, *, refresh: bool = False) -> Future[Image]:
        """Make sure that the image exists; returns immediately.

        Args:
            config: names the image or how to build it.
            refresh: build or pull again as the configuration says, as at the start of a task.

        Returns:
            The image to come, or a ``SandboxImageError`` (missing and not to be pulled, or
            the build failed) or ``SandboxEngineError`` (the engine does not answer).
        """
        key = (reference_of(config), config.build, config.pull, config.platform, refresh)
        with self._lock:
            search = self._searches.get(key)
            if search is not None:
                return search
            search = self._searches[key] = Future()
            # One waiter may give up; the others still want it.
            search.set_running_or_notify_cancel()

        def end(error: BaseException | None, found: Image | None) -> None:
            with self._lock:
                del self._searches[key]
            if found is not None:
                search.set_result(found)
            elif error is not None:
                made = typed(error, "image")
                made.__cause__ = made.__cause__ or (None if made is error else error)
                search.set_exception(made)

        def land(job: Future[Image | None]) -> None:
            error = SandboxEngineError(CLOSED) if job.cancelled() else job.exception()
            found = None if error else job.result()
            if error or found:  # else it is made now
                end(error, found)

        def run(workers: Workers, step: Callable[[], Image | None]) -> None:
            try:
                workers.submit(step).add_done_callback(land)
            except RuntimeError as ex:  # the interpreter is shutting down
                end(SandboxEngineError(f"image: {ex}"), None)

        def look() -> Image | None:
            if not self._must_make(config, refresh):
                return self._examine(reference_of(config))
            run(self._engine.builds, lambda: self._make(config))
            return None

        run(self._engine.starts, look)
        return search

    def _make(self, config: ContainerConfig) -> Image:
        reference = reference_of(config)
        with self._lock:
            making = self._making[reference]
        with making:  # another configuration may build or pull under the same name
            # An image that was there before is somebody else's, unless its name is the pool's.
            before = self._examine(reference).id if self._exists(reference) else None
            ours = before is None or reference.startswith("inspect-pool/")
            if config.build is not None:
                self._build(config, config.build, reference)
            else:
                self._pull(reference, config)
            image = self._examine(reference)
            if ours or self._budget.counts(reference):
                quietly(self._budget.count, reference, image.id, before=before)
        return image

    def _must_make(self, config: ContainerConfig, refresh: bool) -> bool:
        reference = reference_of(config)
        missing = not self._exists(reference)
        if config.build is not None:
            return missing or refresh
        if missing and config.pull == "never":
            raise SandboxImageError(
                f"{config.source}: image {reference!r} is not on the engine and may not be "
                "pulled; build or load it first"
            )
        return missing or (refresh and config.pull == "always")

    def _build(self, config: ContainerConfig, build: Build, tag: str) -> None:
        log: list[str] = []
        client = self._engine.connect(BUILD_SILENCE_SECONDS)
        try:
            for event in client.build(
                path=build.context,
                dockerfile=build.dockerfile,
                buildargs=dict(build.args),
                target=build.target or "",
                nocache=build.no_cache,
                pull=build.pull,
                tag=tag,
                rm=True,
                forcerm=True,
                decode=True,
            ):
                log.append(str(event.get("stream") or event.get("error") or ""))
                if "error" in event:
                    raise SandboxImageError(
                        f"{config.source}: the build failed: {event['error']}\n"
                        + "".join(log)[-4000:]
                    )
        except SandboxImageError:
            raise
        except ConnectionError as ex:
            raise typed(ex, "build") from ex
        except Exception as ex:  # the boundary to the SDK, which passes errors of its transport on
            raise SandboxImageError(f"{config.source}: the build failed: {ex}") from ex
        finally:
            client.close()

    def _pull(self, reference: str, config: ContainerConfig) -> None:
        import docker

        client = self._engine.connect(PULL_SILENCE_SECONDS)
        try:
            name, _, tag = reference.partition("@") if "@" in reference else (reference, "", "")
            for event in client.pull(
                name, tag=tag or None, platform=config.platform, stream=True, decode=True
            ):
                if "error" in event:
                    raise SandboxImageError(
                        f"{config.source}: pulling {reference!r} failed: {event['error']}"
                    )
        except docker.errors.APIError as ex:
            raise SandboxImageError(
                f"{config.source}: image {reference!r} is not on the engine and could not be "
                f"pulled: {ex.explanation or ex}"
            ) from ex
        except SandboxImageError:
            raise
        except Exception as ex:  # the boundary to the SDK, which passes errors of its transport on
            raise typed(ex, f"{config.source}: the pull of {reference}") from ex
        finally:
            client.close()

    def _exists(self, reference: str) -> bool:
        import docker

        try:
            self._inspect(reference)
        except docker.errors.NotFound:
            return False
        except (OSError, docker.errors.DockerException) as ex:
            raise typed(ex, "image") from ex
        return True

    def _inspect(self, reference: str) -> dict[str, Any]:
        facts: dict[str, Any] = self._engine.api.inspect_image(reference)  # type: ignore[no-untyped-call]  # the stubs miss its signature
        return facts

    def _examine(self, reference: str) -> Image:
        import docker

        try:
            facts = self._inspect(reference)
            with self._lock:
                known = self._known.get(facts["Id"])
            if known is None:
                known = _describe(facts)
                with self._lock:
                    self._known[known.id] = known
            return known
        except (OSError, docker.errors.DockerException) as ex:
            raise typed(ex, f"image {reference!r}") from ex


def _describe(facts: dict[str, Any]) -> Image:
    config = facts.get("Config") or {}
    if facts.get("Os", "linux") != "linux":
        raise SandboxConfigError(f"docker_pool runs Linux images, not {facts['Os']}")
    return Image(
        id=facts["Id"],
        user=config.get("User") or "",
        working_dir=config.get("WorkingDir") or "/",
        entrypoint=tuple(config.get("Entrypoint") or ()),
        command=tuple(config.get("Cmd") or ()),
        environment=tuple(
            (key, value) for key, _, value in (v.partition("=") for v in config.get("Env") or ())
        ),
        volumes=tuple(config.get("Volumes") or ()),
        architecture=str(facts.get("Architecture") or "amd64"),
        healthcheck=_healthcheck(config.get("Healthcheck") or {}),
    )


def _healthcheck(given: dict[str, Any]) -> HealthCheck | None:
    if not given.get("Test"):
        return None
    default = HealthCheck(())
    return HealthCheck(
        test=tuple(given["Test"]),
        interval=(given.get("Interval") or 0) / 1e9 or default.interval,
        timeout=(given.get("Timeout") or 0) / 1e9 or default.timeout,
        start_period=(given.get("StartPeriod") or 0) / 1e9,
        retries=given.get("Retries") or default.retries,
    )


def _slug(build: Build) -> str:
    return hashlib.sha256(repr(build).encode()).hexdigest()[:16]
