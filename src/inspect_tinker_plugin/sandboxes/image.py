"""Find, pull or build an image, and learn from it what a container needs to know."""

from __future__ import annotations

import io
import tarfile
import threading
from dataclasses import dataclass, replace
from typing import Any

from inspect_tinker_plugin.errors import SandboxConfigError, SandboxImageError
from inspect_tinker_plugin.sandboxes.config import Build, ContainerConfig
from inspect_tinker_plugin.sandboxes.engine import Engine, quietly, typed
from inspect_tinker_plugin.sandboxes.owner import Owner

_LINKS = 8


@dataclass(frozen=True)
class Image:
    """What the pool knows about an image."""

    id: str
    user: str
    working_dir: str
    entrypoint: tuple[str, ...]
    command: tuple[str, ...]
    environment: tuple[tuple[str, str], ...]
    shell: bytes
    """The file behind ``/bin/sh``."""


class Images:
    """Images of one engine; each is examined once."""

    def __init__(self, engine: Engine, owner: Owner) -> None:
        self._engine = engine
        self._owner = owner
        self._known: dict[str, Image] = {}
        self._lock = threading.Lock()

    def resolve(self, config: ContainerConfig, *, refresh: bool = False) -> Image:
        """Make sure that the image exists, in this thread.

        Args:
            config: names the image or how to build it.
            refresh: build or pull again as the configuration says, as when a task starts.

        Raises:
            SandboxImageError: missing and not to be pulled, or the build failed.
            SandboxEngineError: the engine does not answer.
        """
        with self._lock:
            if config.build is not None:
                reference = self._build(config, config.build, refresh=refresh)
            else:
                reference = config.image or ""
                self._fetch(reference, config, refresh=refresh)
            return self._examine(reference)

    def _build(self, config: ContainerConfig, build: Build, *, refresh: bool) -> str:
        import docker

        tag = config.image or f"inspect-pool/{_slug(build)}:latest"
        api = self._engine.api
        if not refresh and self._exists(tag):
            return tag
        log: list[str] = []
        try:
            for event in api.build(
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
        except (docker.errors.APIError, TypeError, OSError) as ex:
            if isinstance(ex, ConnectionError):
                raise typed(ex, "build") from ex
            raise SandboxImageError(f"{config.source}: the build failed: {ex}") from ex
        except docker.errors.DockerException as ex:
            raise SandboxImageError(f"{config.source}: the build failed: {ex}") from ex
        return tag

    def _fetch(self, reference: str, config: ContainerConfig, *, refresh: bool) -> None:
        import docker

        missing = not self._exists(reference)
        if not missing and not (refresh and config.pull == "always"):
            return
        if config.pull == "never":
            raise SandboxImageError(
                f"{config.source}: image {reference!r} is not on the engine and may not be "
                "pulled; build or load it first"
            )
        try:
            name, _, tag = reference.partition("@") if "@" in reference else (reference, "", "")
            self._engine.api.pull(name, tag=tag or None, platform=config.platform)
        except docker.errors.APIError as ex:
            raise SandboxImageError(
                f"{config.source}: image {reference!r} is not on the engine and could not be "
                f"pulled: {ex.explanation or ex}"
            ) from ex
        except (OSError, docker.errors.DockerException) as ex:
            raise typed(ex, "pull") from ex

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
            known = self._known.get(facts["Id"])
            if known is None:
                known = _describe(facts)
                known = replace(known, shell=self._shell(known.id, reference))
                self._known[known.id] = known
            return known
        except (OSError, docker.errors.DockerException) as ex:
            raise typed(ex, f"image {reference!r}") from ex

    def _shell(self, image: str, reference: str) -> bytes:
        import docker

        api = self._engine.api
        probe = api.create_container(image, ["/bin/sh"], labels=self._owner.labels())["Id"]
        try:
            path = "/bin/sh"
            for _ in range(_LINKS):
                try:
                    stream, stat = api.get_archive(probe, path)
                except docker.errors.NotFound:
                    break
                archive = b"".join(stream)
                if not stat["linkTarget"]:
                    with tarfile.open(fileobj=io.BytesIO(archive)) as tar:
                        member = tar.next()
                        file = tar.extractfile(member) if member and member.isreg() else None
                        return file.read() if file is not None else b""
                path = stat["linkTarget"]
        finally:
            quietly(api.remove_container, probe, force=True, v=True)
        raise SandboxImageError(
            f"image {reference!r} has no /bin/sh, which docker_pool needs to run commands; use "
            "Inspect's plain 'docker' sandbox"
        )


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
        shell=b"",
    )


def _slug(build: Build) -> str:
    import hashlib

    return hashlib.sha256(repr(build).encode()).hexdigest()[:16]
