"""Finds, pulls or builds an image, and reads from it what a container needs to know."""

from __future__ import annotations

import hashlib
import threading
from collections import defaultdict
from dataclasses import dataclass
from typing import Any

from inspect_docker_pool.config import Build, ContainerConfig, HealthCheck
from inspect_docker_pool.engine import Engine, quietly, typed
from inspect_docker_pool.errors import SandboxConfigError, SandboxImageError

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
        return config.image or f"inspect-pool/{_slug(config.build)}:latest"
    return config.image or ""


class Images:
    """Images of one engine; each is made once, however many wait for it, and examined once."""

    def __init__(self, engine: Engine) -> None:
        self._engine = engine
        self._known: dict[str, Image] = {}
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
        reference = reference_of(config)
        if self._must_make(config, refresh):
            with self._lock:
                making = self._making[reference]
            with making, self._places:
                if self._must_make(config, refresh):  # nobody has made it in the meantime
                    self._make(config, reference)
        return self._examine(reference)

    def _make(self, config: ContainerConfig, reference: str) -> None:
        if config.build is None:
            self._pull(reference, config)
            return
        before = self._examine(reference).id if self._exists(reference) else None
        self._build(config, config.build, reference)
        if before not in (None, self._examine(reference).id) and config.image is None:
            # Without its name nobody finds the old one again. A container that runs keeps it.
            quietly(self._engine.api.remove_image, before)

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
