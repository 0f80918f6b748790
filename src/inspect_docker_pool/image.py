"""Finds, pulls or builds an image, and reads from it what a container needs to know.

The images that this process makes are kept within a disk budget: the least recently used one goes.
"""

from __future__ import annotations

import hashlib
import threading
from collections import OrderedDict, defaultdict
from collections.abc import Iterator
from contextlib import closing, contextmanager
from dataclasses import dataclass
from logging import getLogger
from typing import Any

from inspect_docker_pool.config import GIB, Build, ContainerConfig, HealthCheck, ProjectConfig
from inspect_docker_pool.engine import Engine, quietly, translate_error
from inspect_docker_pool.errors import SandboxConfigError, SandboxError, SandboxImageError

logger = getLogger(__name__)

DEFAULT_BYTES = 50 * GIB
"""Disk for the images that this process builds or pulls, unless a configuration says how much."""

BUILT = "inspect-pool/"
"""Start of the name of an image that is built for a task that gives it none."""

MADE_AT_ONCE = 4
"""Builds and pulls at once. They take processor time that running episodes need as well."""

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
        return config.image or f"{BUILT}{_slug(config.build)}:latest"
    return config.image or ""


class ImageBudget:
    """Keeps the images that this process built or pulled within their bytes of disk.

    Images that were there before are not counted and never removed. Layers that several images
    share count once. Thread-safe.
    """

    def __init__(self, engine: Engine) -> None:
        self._engine = engine
        self._made: OrderedDict[str, dict[str, int]] = OrderedDict()
        """By name, in the order of their last use: the bytes of each layer."""
        self._stated: int | None = None
        self._lock = threading.Lock()

    def note_use(self, config: ProjectConfig) -> None:
        """Note that a configuration's images are used, and its budget; the largest one counts."""
        with self._lock:
            for name in map(reference_of, config.services):
                if name in self._made:
                    self._made.move_to_end(name)
            if config.pool.images is not None:
                self._stated = max(self._stated or 0, config.pool.images)

    def counts(self, name: str) -> bool:
        """Return whether this process made an image."""
        with self._lock:
            return name in self._made

    def add(self, name: str, *, first_to_go: bool = False) -> None:
        """Count an image that was made just now, and make room, in this thread."""
        layers = self._layers(name)
        with self._lock:
            self._made[name] = layers
            self._made.move_to_end(name, last=not first_to_go)
            older = [each for each in self._made if each != name]
        for each in older:
            self._remove_if_over(each)

    def _layers(self, name: str) -> dict[str, int]:
        """Return the bytes of each layer, identified with all layers beneath it."""
        layers, beneath = {}, ""
        history = self._engine.api.history(name)  # type: ignore[no-untyped-call]  # the stubs miss it
        for entry in reversed(history):
            beneath = f"{hash((beneath, entry['Created'], entry['CreatedBy'], entry['Size']))}"
            layers[beneath] = int(entry["Size"])
        return layers

    def _measure_use(self) -> int:
        return sum({k: v for layers in self._made.values() for k, v in layers.items()}.values())

    def _remove_if_over(self, name: str) -> None:
        with self._lock:
            budget = DEFAULT_BYTES if self._stated is None else self._stated
            used = self._measure_use()
            if used <= budget or (layers := self._made.pop(name, None)) is None:
                return
            freed = used - self._measure_use()
        # Not by force: the engine refuses while a container runs from it.
        if not quietly(self._engine.api.remove_image, name):
            with self._lock:
                self._made.setdefault(name, layers)
                self._made.move_to_end(name, last=False)
            return
        logger.warning(
            "docker_pool: removed image %s, the least recently used one (%.1f MB), to keep images "
            "within %.1f GB; it is made again when it is needed. More room: x-docker-pool: "
            "{images: 200g}",
            name,
            freed / 1e6,
            budget / 1e9,
        )


class Images:
    """Images of one engine; each is made once, however many wait for it."""

    def __init__(self, engine: Engine) -> None:
        self.budget = ImageBudget(engine)
        self._engine = engine
        self._making: dict[str, threading.Lock] = defaultdict(threading.Lock)
        self._places = threading.Semaphore(MADE_AT_ONCE)
        self._lock = threading.Lock()

    def find(self, config: ContainerConfig, *, refresh: bool = False) -> Image:
        """Make sure that the image exists, in this thread.

        Args:
            config: names the image or how to build it.
            refresh: build or pull again as the configuration says, as at the start of a task.

        Raises:
            SandboxImageError: it is missing and not to be pulled, or its build failed.
            SandboxEngineError: the engine does not answer.
        """
        reference, renew = reference_of(config), refresh and _may_be_older(config)
        image = self._look_up(reference)
        if image is not None and not renew:
            return image
        with self._lock:
            making = self._making[reference]
        with making, self._places:
            image = self._look_up(reference)  # another thread may have made it
            if image is not None and not renew:
                return image
            return self._make(config, reference, image)

    def _make(self, config: ContainerConfig, reference: str, before: Image | None) -> Image:
        if config.build is None:
            self._pull(reference, config)
        else:
            self._build(config, config.build, reference)
        made = self._look_up(reference)
        if made is None:
            raise SandboxImageError(f"{config.source}: image {reference!r} was removed immediately")
        # An image that was there before is somebody else's, unless its name is the pool's.
        if before is None or reference.startswith(BUILT) or self.budget.counts(reference):
            quietly(self.budget.add, reference)
            # Without its name nobody finds the old one again. A container that runs keeps it.
            replaced = before.id if before is not None and before.id != made.id else None
            if replaced and not quietly(self._engine.api.remove_image, replaced):
                quietly(self.budget.add, replaced, first_to_go=True)
        return made

    def _build(self, config: ContainerConfig, build: Build, tag: str) -> None:
        log: list[str] = []
        client = self._engine.connect(BUILD_SILENCE_SECONDS)
        with closing(client), _image_errors(f"{config.source}: the build failed"):
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

    def _pull(self, reference: str, config: ContainerConfig) -> None:
        if config.pull == "never":
            raise SandboxImageError(
                f"{config.source}: image {reference!r} is not on the engine and may not be "
                "pulled; build or load it first"
            )
        client = self._engine.connect(PULL_SILENCE_SECONDS)
        failed = (
            f"{config.source}: image {reference!r} is not on the engine and could not be pulled"
        )
        with closing(client), _image_errors(failed):
            name, _, tag = reference.partition("@") if "@" in reference else (reference, "", "")
            for event in client.pull(
                name, tag=tag or None, platform=config.platform, stream=True, decode=True
            ):
                if "error" in event:
                    raise SandboxImageError(f"{failed}: {event['error']}")

    def _look_up(self, reference: str) -> Image | None:
        import docker

        try:
            return _describe(self._engine.api.inspect_image(reference))  # type: ignore[no-untyped-call]  # the stubs miss its signature
        except docker.errors.NotFound:
            return None
        except (OSError, docker.errors.DockerException) as ex:
            raise translate_error(ex, f"image {reference!r}") from ex


@contextmanager
def _image_errors(what: str) -> Iterator[None]:
    """Turn errors of a build or pull, which the SDK passes on as they are, into an image's."""
    try:
        yield
    except SandboxError:
        raise
    except ConnectionError as ex:  # of the socket: the engine is away
        raise translate_error(ex, what) from ex
    except Exception as ex:
        raise SandboxImageError(f"{what}: {getattr(ex, 'explanation', None) or ex}") from ex


def _may_be_older(config: ContainerConfig) -> bool:
    """Return whether an image that is there may differ from what a new build or pull makes."""
    return config.build is not None or config.pull == "always"


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
