"""The configuration of a container: the types shared by parser, pool and engine."""

from __future__ import annotations

import hashlib
import json
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any, Literal

from pydantic import BaseModel, ConfigDict, Field

KEEP_ALIVE = ("tail", "-f", "/dev/null")
"""The command of a container that only has to stay up."""

DEFAULT_IMAGE = "aisiuk/inspect-tool-support"
"""The image of Inspect's own Docker provider for tasks that name none."""

EXTENSIONS = ("warm", "max", "disk", "snapshot", "images")
"""Keys that a task may set under ``x-docker-pool``."""

GIB = 1024**3
MIB = 1024**2


@dataclass(frozen=True)
class Build:
    """An image that is built before the first container starts."""

    context: str
    """Absolute path of the build context."""
    dockerfile: str = "Dockerfile"
    """Path of the Dockerfile, relative to the context."""
    args: tuple[tuple[str, str], ...] = ()
    target: str | None = None
    no_cache: bool = False
    pull: bool = False


@dataclass(frozen=True)
class Mount:
    """A read-only volume or host folder."""

    source: str
    target: str
    kind: str = "bind"
    """``bind`` or ``volume``."""


@dataclass(frozen=True)
class Network:
    """A network created for the container and removed with it; or an existing one by name."""

    name: str
    external: bool = False
    internal: bool = False


@dataclass(frozen=True)
class Limits:
    """Resource limits; ``None`` is unlimited, and occurs only because the task said so."""

    cpus: float | None = 1.0
    memory: int | None = 2 * GIB
    """Bytes of memory and swap together."""
    pids: int | None = 512
    disk: int | None = 4 * GIB
    """Bytes written to the container's own layer."""
    shm: int | None = None
    ulimits: tuple[tuple[str, int, int], ...] = ()
    """Name, soft and hard value."""


@dataclass(frozen=True)
class Hardening:
    """How a policy's commands are confined. A task can turn each of these off."""

    network: str = "none"
    """``none``, ``bridge``, or the name of an existing network."""
    cap_drop: tuple[str, ...] = ("ALL",)
    cap_add: tuple[str, ...] = ()
    no_new_privileges: bool = True
    seccomp: bool = True
    """Whether system calls are filtered."""
    seccomp_profile: str | None = None
    """A filter as JSON, in place of the engine's default."""
    read_only: bool = False


@dataclass(frozen=True)
class PoolSize:
    """How many containers a pool keeps."""

    warm: int = 2
    """Containers kept ready; if configurations share a pool, the largest number counts."""
    images: int | None = None
    """Bytes of disk for the images that this process builds or pulls; ``None``: 50 GiB."""
    max: int | None = None
    """Maximum containers, warm, starting and in use together; ``None`` is no limit. Part of the
    key: a configuration with another bound, or with none, has its own pool."""


@dataclass(frozen=True)
class ContainerConfig:
    """Everything that determines how a container starts, after parsing and validation."""

    image: str | None = None
    build: Build | None = None
    pull: str = "missing"
    """``missing``, ``always`` or ``never``."""
    command: tuple[str, ...] | None = KEEP_ALIVE
    """``None`` runs the image's own command."""
    entrypoint: tuple[str, ...] | None = None
    environment: tuple[tuple[str, str], ...] = ()
    working_dir: str | None = None
    user: str | None = None
    hostname: str | None = None
    init: bool = False
    platform: str | None = None
    runtime: str | None = None
    """A runtime of the engine in place of its default: ``runsc``, ``kata``, …"""
    mounts: tuple[Mount, ...] = ()
    tmpfs: tuple[tuple[str, str], ...] = ()
    """Path and mount options."""
    networks: tuple[Network, ...] = ()
    limits: Limits = field(default_factory=Limits)
    hardening: Hardening = field(default_factory=Hardening)
    service: str = "default"
    """Name of the sandbox, as in the compose file."""
    pool: PoolSize = field(default_factory=PoolSize)
    snapshot: str = "auto"
    """Whether episodes with the same set-up start from a snapshot: ``auto`` (where it pays),
    ``always`` (where it is faithful) or ``never``. Not part of the key."""
    source: str = "the default configuration"
    """The origin of this configuration, for messages."""

    def key(self, image_id: str) -> str:
        """Return the key of the pool that may serve this configuration."""
        content = asdict(self)
        for name in ("pool", "source", "snapshot", "build", "pull", "image"):
            del content[name]
        text = json.dumps([image_id, content, self.pool.max], sort_keys=True)
        return hashlib.sha256(text.encode()).hexdigest()[:16]

    @property
    def digest(self) -> str:
        """Return a key of the containers of this configuration, before their image is known."""
        content = asdict(self)
        for name in ("pool", "source", "snapshot"):
            del content[name]
        return hashlib.sha256(json.dumps(content, sort_keys=True).encode()).hexdigest()[:24]


class DockerPoolConfig(BaseModel):
    """Configuration in Python: ``SandboxEnvironmentSpec("docker_pool", DockerPoolConfig(...))``.

    Name an ``image``, or a ``file`` (a Dockerfile or a compose file); everything else
    overrides what the file says. Sizes are bytes or strings like ``512m``.
    """

    model_config = ConfigDict(extra="forbid", frozen=True)

    image: str | None = None
    file: str | None = None
    warm: int | None = Field(default=None, ge=0)
    max: int | None = Field(default=None, ge=1)
    command: list[str] | None = None
    environment: dict[str, str] | None = None
    working_dir: str | None = None
    user: str | None = None
    network: str | None = None
    cap_add: list[str] | None = None
    cap_drop: list[str] | None = None
    no_new_privileges: bool | None = None
    read_only: bool | None = None
    runtime: str | None = None
    seccomp: str | None = None
    """Path of a profile, or ``unconfined``."""
    cpus: float | None = None
    memory: int | str | None = None
    pids: int | None = None
    disk: int | str | None = None
    volumes: list[str] | None = None
    tmpfs: list[str] | None = None
    snapshot: bool | Literal["always"] | None = None
    images: int | str | None = None

    def __hash__(self) -> int:
        """Hash the content: Inspect keeps configurations in sets, and dicts have no hash."""
        return hash(self.model_dump_json(exclude_none=True))

    def compose(self) -> dict[str, Any]:
        """Return the service, in compose's terms, that this configuration adds or overrides."""
        given = self.model_dump(exclude_none=True, exclude=set(EXTENSIONS) | {"file"})
        words = {"network": "network_mode", "memory": "mem_limit", "pids": "pids_limit"}
        service = {words.get(name, name): value for name, value in given.items()}
        privileges, seccomp = service.pop("no_new_privileges", None), service.pop("seccomp", None)
        options = []
        if privileges is not None:
            options.append(f"no-new-privileges:{str(privileges).lower()}")
        if seccomp is not None:
            options.append(f"seccomp:{seccomp}")
        if options:
            service["security_opt"] = options
        extension = self.model_dump(exclude_none=True, include=set(EXTENSIONS))
        return {**service, "x-docker-pool": extension} if extension else service


def is_keep_alive(command: tuple[str, ...] | None) -> bool:
    """Return whether a command does nothing but keep a container up."""
    if command is None:
        return False
    words = command
    if len(words) == 3 and Path(words[0]).name in ("sh", "bash") and words[1] in ("-c", "-lc"):
        words = tuple(words[2].removeprefix("exec ").split())
    if not words:
        return True
    name = Path(words[0]).name
    return (
        (name == "tail" and set(words[1:]) <= {"-f", "-F", "/dev/null"})
        or (name == "sleep" and len(words) == 2)
        or (name in ("sh", "bash", "ash", "dash", "cat") and len(words) == 1)
        or (name in ("python", "python3", "node", "irb", "R") and len(words) == 1)
    )
