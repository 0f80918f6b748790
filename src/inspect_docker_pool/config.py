"""The configuration of a project's containers, and the engine's request to create one."""

from __future__ import annotations

import hashlib
import json
import re
from collections.abc import Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any, Literal

from pydantic import BaseModel, ConfigDict, Field

from inspect_docker_pool.errors import SandboxConfigError

KEEP_ALIVE = ("tail", "-f", "/dev/null")
"""The command of a container that only has to stay up."""

DEFAULT_IMAGE = "aisiuk/inspect-tool-support"
"""The image of Inspect's own Docker provider for tasks that name none."""

GIB = 1024**3
MIB = 1024**2

_SIZE = re.compile(r"^\s*(\d+(?:\.\d+)?)\s*([kmgt]?)i?b?\s*$", re.IGNORECASE)


def parse_size(value: Any, key: str = "size") -> int:
    """Read a size in bytes: a number, or a string such as ``512m`` or ``2GiB``."""
    if isinstance(value, int) and not isinstance(value, bool):
        return value
    match = _SIZE.match(str(value))
    if match is None:
        raise SandboxConfigError(f"{key!r} is not a size: {value!r}")
    return int(float(match[1]) * 1024 ** " kmgt".index(match[2].lower() or " "))


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
    """A volume or host folder."""

    source: str
    """Empty for a volume without a name."""
    target: str
    kind: str = "bind"
    """``bind`` or ``volume``."""
    read_only: bool = True
    own: bool = False
    """Whether the volume is created for the project and removed with it."""


@dataclass(frozen=True)
class Network:
    """A service's network: created for the project and removed with it, or an existing one."""

    name: str
    external: bool = False
    internal: bool = False
    aliases: tuple[str, ...] = ()
    """Names of the service on it."""


@dataclass(frozen=True)
class HealthCheck:
    """The command that tells whether a service is ready. Times are seconds."""

    test: tuple[str, ...]
    """``CMD`` and words, ``CMD-SHELL`` and a line for the shell, or ``NONE``."""
    interval: float = 30.0
    timeout: float = 30.0
    start_period: float = 0.0
    retries: int = 3

    @property
    def seconds(self) -> float:
        """The time after which a service that is not healthy counts as unhealthy."""
        return self.start_period + self.retries * (self.interval + self.timeout)


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
    """How many projects a pool keeps, which is part of its key; mostly they have one container."""

    warm: int = 2
    """Projects kept ready."""
    images: int | None = None
    """Bytes of disk for the images that this process builds or pulls; ``None``: 50 GiB."""
    max: int | None = None
    """Maximum projects, warm, starting and in use together; ``None`` is no limit."""


@dataclass(frozen=True)
class ContainerConfig:
    """Everything that determines how one service's container starts."""

    image: str | None = None
    build: Build | None = None
    pull: str = "missing"
    """``missing``, ``always`` or ``never``."""
    command: tuple[str, ...] | None = KEEP_ALIVE
    """``None`` runs the image's own command."""
    entrypoint: tuple[str, ...] | None = None
    environment: tuple[tuple[str, str | None], ...] = ()
    """``None`` takes a variable of the image away."""
    working_dir: str | None = None
    user: str | None = None
    hostname: str | None = None
    platform: str | None = None
    runtime: str | None = None
    """A runtime of the engine in place of its default: ``runsc``, ``kata``, …"""
    mounts: tuple[Mount, ...] = ()
    tmpfs: tuple[tuple[str, str], ...] = ()
    """Path and mount options."""
    networks: tuple[Network, ...] = ()
    ports: tuple[str, ...] = ()
    """Ports that get a free port of the engine's host, as ``80/tcp``."""
    extra_hosts: tuple[str, ...] = ()
    healthcheck: HealthCheck | None = None
    """``None`` leaves it to a server's image."""
    depends_on: tuple[tuple[str, str], ...] = ()
    """Services to start before, and the conditions to wait for."""
    completes: bool = False
    """Whether the service is ready when its command has ended."""
    limits: Limits = field(default_factory=Limits)
    hardening: Hardening = field(default_factory=Hardening)
    service: str = "default"
    """Name of the sandbox, as in the compose file."""
    is_server: bool = False
    """Whether it stands beside the policy's sandbox."""
    source: str = "the default configuration"
    """The origin of this configuration, for messages."""

    @property
    def label(self) -> str:
        """Where it is configured, and as which service, for messages."""
        return f"{self.source}: service {self.service!r}"


@dataclass(frozen=True)
class ProjectConfig:
    """The services of one episode, after parsing and validation."""

    services: tuple[ContainerConfig, ...]
    """The default service first."""
    pool: PoolSize = field(default_factory=PoolSize)
    snapshot: str = "auto"
    """Whether episodes with the same set-up start from a snapshot: ``auto`` (where it pays),
    ``always`` (where it is faithful) or ``never``. Not part of the key."""

    @property
    def default(self) -> ContainerConfig:
        """The service that the policy works in."""
        return self.services[0]

    @property
    def source(self) -> str:
        return self.default.source

    @property
    def networks(self) -> dict[str, Network]:
        """The networks that a project has for itself."""
        used = [network for service in self.services for network in service.networks]
        return {network.name: network for network in used if not network.external}

    def key(self, images: Sequence[str]) -> str:
        """Return the key of the pool that may serve this configuration."""
        own = [*images, self.pool.warm, self.pool.max]
        return self._hash("source", "build", "pull", "image", and_also=own)

    @property
    def digest(self) -> str:
        """Return a key of the containers of this configuration, before their images are known."""
        return self._hash("source")

    def _hash(self, *left_out: str, and_also: Sequence[object] = ()) -> str:
        services = [asdict(service) for service in self.services]
        content = [{k: v for k, v in each.items() if k not in left_out} for each in services]
        text = json.dumps([content, and_also], sort_keys=True)
        return hashlib.sha256(text.encode()).hexdigest()[:24]


class PoolSettings(BaseModel):
    """What a task may set under ``x-docker-pool``."""

    model_config = ConfigDict(extra="forbid", frozen=True)

    warm: int | None = Field(default=None, ge=0)
    max: int | None = Field(default=None, ge=1)
    disk: int | str | None = None
    snapshot: bool | Literal["always"] | None = None
    images: int | str | None = None


class DockerPoolConfig(PoolSettings):
    """Configuration in Python: ``SandboxEnvironmentSpec("docker_pool", DockerPoolConfig(...))``.

    Name an ``image``, or a ``file`` (a Dockerfile or a compose file); everything else
    overrides what the file says. Sizes are bytes or strings like ``512m``.
    """

    image: str | None = None
    file: str | None = None
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
    volumes: list[str] | None = None
    """``source:target:ro``: a folder of this host, or the name of a volume."""
    tmpfs: list[str] | None = None

    def __hash__(self) -> int:
        """Hash the content: Inspect keeps configurations in sets, and dicts have no hash."""
        return hash(self.model_dump_json(exclude_none=True))

    def compose(self) -> dict[str, Any]:
        """Return the service, as compose describes one, that this adds or overrides."""
        extension = set(PoolSettings.model_fields)
        service = self.model_dump(exclude_none=True, exclude={*extension, "file"})
        words = {"network": "network_mode", "memory": "mem_limit", "pids": "pids_limit"}
        service = {words.get(name, name): value for name, value in service.items()}
        if self.volumes is not None:
            service["volumes"] = [_describe_volume(volume) for volume in self.volumes]
        privileges, seccomp = service.pop("no_new_privileges", None), service.pop("seccomp", None)
        options = []
        if privileges is not None:
            options.append(f"no-new-privileges:{str(privileges).lower()}")
        if seccomp is not None:
            options.append(f"seccomp:{seccomp}")
        if options:
            service["security_opt"] = options
        return {
            **service,
            "x-docker-pool": self.model_dump(exclude_none=True, include=extension),
        }


def _describe_volume(volume: str) -> dict[str, Any]:
    source, _, rest = volume.partition(":")
    target, _, mode = rest.partition(":")
    kind = "bind" if source.startswith((".", "/", "~")) else "volume"
    if kind == "bind":
        source = str(Path(source).expanduser().resolve())
    return {"type": kind, "source": source, "target": target, "read_only": mode == "ro"}


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


_CAPABILITIES = (
    *("CHOWN", "DAC_OVERRIDE", "DAC_READ_SEARCH", "FOWNER", "FSETID", "KILL", "SETGID"),
    *("SETUID", "SETPCAP", "LINUX_IMMUTABLE", "NET_BIND_SERVICE", "NET_BROADCAST"),
    *("NET_ADMIN", "NET_RAW", "IPC_LOCK", "IPC_OWNER", "SYS_MODULE", "SYS_RAWIO"),
    *("SYS_CHROOT", "SYS_PTRACE", "SYS_PACCT", "SYS_ADMIN", "SYS_BOOT", "SYS_NICE"),
    *("SYS_RESOURCE", "SYS_TIME", "SYS_TTY_CONFIG", "MKNOD", "LEASE", "AUDIT_WRITE"),
    *("AUDIT_CONTROL", "SETFCAP", "MAC_OVERRIDE", "MAC_ADMIN", "SYSLOG", "WAKE_ALARM"),
    *("BLOCK_SUSPEND", "AUDIT_READ", "PERFMON", "BPF", "CHECKPOINT_RESTORE"),
)
"""In the order of the kernel's numbers."""

ENGINE_CAPABILITIES = frozenset(
    [
        *("CHOWN", "DAC_OVERRIDE", "FSETID", "FOWNER", "MKNOD", "NET_RAW", "SETGID", "SETUID"),
        *("SETFCAP", "SETPCAP", "NET_BIND_SERVICE", "SYS_CHROOT", "KILL", "AUDIT_WRITE"),
    ]
)
"""Capabilities that engines give unless told otherwise."""

EXECUTOR_CAPABILITIES = frozenset(
    ["SETUID", "SETGID", "SETPCAP", "KILL", "IPC_LOCK", "DAC_OVERRIDE"]
)
"""Capabilities that the executor itself needs, to start commands as their users, to stop them, and
to read files whoever owns them.

None of them makes the engine's filter allow a system call that it would refuse otherwise."""


def command_capabilities(config: ContainerConfig) -> frozenset[str]:
    """Return the capabilities of commands that run as root."""
    added, dropped = _names(config.hardening.cap_add), _names(config.hardening.cap_drop)
    everything = frozenset(_CAPABILITIES)
    if "ALL" in added:
        return everything - dropped
    for name in (added | dropped) - everything - {"ALL"}:
        raise SandboxConfigError(f"{config.source}: there is no capability {name!r}")
    return (frozenset() if "ALL" in dropped else ENGINE_CAPABILITIES - dropped) | added


def capability_mask(names: frozenset[str]) -> int:
    """Return capabilities as the kernel's bit mask."""
    return sum(1 << _CAPABILITIES.index(name) for name in names)


def _names(capabilities: tuple[str, ...]) -> frozenset[str]:
    return frozenset(name.upper().removeprefix("CAP_") for name in capabilities)


def host_options(config: ContainerConfig, *, storage_quota: bool) -> dict[str, Any]:
    """Return the keyword arguments of the SDK's ``create_host_config``.

    Args:
        config: the container.
        storage_quota: whether the engine's storage driver can limit a container's layer.
            If it cannot, a single file cannot grow past the limit, and the pool stops a
            container whose layer does (see ``disk_guard.py``).
    """
    limits, hardening = config.limits, config.hardening
    options: dict[str, Any] = {
        "network_mode": hardening.network or None,
        "cap_drop": ["ALL"],
        "cap_add": sorted(command_capabilities(config) | EXECUTOR_CAPABILITIES),
        "security_opt": _security_options(config),
        "read_only": hardening.read_only,
        # The engine keeps no log: the executor's output is not meant for one, and a policy
        # could fill the engine's disk with it.
        "log_config": {"Type": "none"},
        "tmpfs": dict(config.tmpfs) or None,
        # When the host runs short of memory, a container goes before the trainer.
        "oom_score_adj": 500,
        "restart_policy": None,
        "ipc_mode": "private",
    }
    if config.runtime is not None:
        options["runtime"] = config.runtime
    if limits.memory is not None:
        options["mem_limit"] = limits.memory
        options["memswap_limit"] = limits.memory
    if limits.cpus is not None:
        options["nano_cpus"] = int(limits.cpus * 1e9)
    if limits.pids is not None:
        options["pids_limit"] = limits.pids
    if limits.shm is not None:
        options["shm_size"] = limits.shm
    ulimits = [{"Name": name, "Soft": soft, "Hard": hard} for name, soft, hard in limits.ulimits]
    if limits.disk is not None:
        if storage_quota:
            options["storage_opt"] = {"size": str(limits.disk)}
        elif "fsize" not in {name for name, _, _ in limits.ulimits}:
            ulimits.append({"Name": "fsize", "Soft": limits.disk, "Hard": limits.disk})
    options["ulimits"] = ulimits or None
    options["extra_hosts"] = list(config.extra_hosts) or None
    options["port_bindings"] = {port: ("127.0.0.1", None) for port in config.ports} or None
    return {name: value for name, value in options.items() if value is not None}


def _security_options(config: ContainerConfig) -> list[str] | None:
    options = []
    if config.hardening.no_new_privileges:
        options.append("no-new-privileges:true")
    if not config.hardening.seccomp:
        options.append("seccomp=unconfined")
    elif config.hardening.seccomp_profile is not None:
        options.append(f"seccomp={config.hardening.seccomp_profile}")
    return options or None
