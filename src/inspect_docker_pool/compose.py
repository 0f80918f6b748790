"""Reads a compose file, Dockerfile, image name or model into one container configuration.

A compose file is read by ``docker compose config`` itself. What the pool cannot honour of it is
refused by its name: a key that is silently dropped would give the policy another sandbox than
the one the task asked for.
"""

from __future__ import annotations

import json
import os
import re
import subprocess
from collections.abc import Callable, Mapping
from dataclasses import replace
from functools import lru_cache
from logging import getLogger
from pathlib import Path
from typing import Any

import yaml
from inspect_ai.util import ComposeConfig, is_compose_yaml, is_dockerfile
from pydantic import BaseModel

from inspect_docker_pool.config import (
    DEFAULT_IMAGE,
    Build,
    ContainerConfig,
    DockerPoolConfig,
    Hardening,
    Limits,
    Mount,
    Network,
    PoolSettings,
    PoolSize,
    command_capabilities,
    is_keep_alive,
    parse_size,
)
from inspect_docker_pool.errors import SandboxConfigError

logger = getLogger(__name__)

CONFIG_FILES = [
    "compose.yaml",
    "compose.yml",
    "docker-compose.yaml",
    "docker-compose.yml",
    "Dockerfile",
]

HONOURED = frozenset(
    {
        "image", "build", "command", "entrypoint", "environment", "working_dir", "user",
        "hostname", "init", "platform", "volumes", "tmpfs", "networks", "network_mode", "cpus",
        "mem_limit", "memswap_limit", "pids_limit", "shm_size", "ulimits", "deploy", "cap_add",
        "cap_drop", "security_opt", "read_only", "pull_policy", "stdin_open", "tty", "privileged",
        "runtime", "healthcheck",
    }
)  # fmt: skip

WITHOUT_EFFECT = frozenset({"expose", "labels", "restart", "stop_grace_period", "stop_signal"})
"""Keys that change nothing for an episode: one whose container ends has failed."""

_COMPOSE_SECONDS = 60
_SNAPSHOT: Mapping[bool | str | None, str] = {
    None: "auto",
    True: "auto",
    False: "never",
    "always": "always",
}
_OWNING = frozenset(["CHOWN", "DAC_OVERRIDE", "FOWNER", "SETUID"])
_WORD = re.compile(r"[A-Za-z_]\w*")
_warned: set[str] = set()

Refuse = Callable[..., SandboxConfigError]


def parse_config(
    config: BaseModel | str | None, variables: Mapping[str, str] | None = None
) -> ContainerConfig:
    """Turn an Inspect sandbox configuration into a container configuration.

    Args:
        config: path of a compose file or Dockerfile, an image name, a ``ComposeConfig``,
            a :class:`DockerPoolConfig`, or ``None`` (a compose file or Dockerfile in the
            current folder, else Inspect's own default image).
        variables: values for ``${NAME}`` in a compose file, before the process environment.

    Raises:
        SandboxConfigError: the file is missing, malformed, or asks for what the pool
            cannot honour.
    """
    scope = {**os.environ, **(variables or {})}
    if isinstance(config, DockerPoolConfig):
        if config.file is not None and config.image is not None:
            raise SandboxConfigError("DockerPoolConfig takes an image or a file, not both")
        if config.file is not None:
            return _parse_file(Path(config.file), scope, config.compose())
        service = {"image": DEFAULT_IMAGE, "command": ["tail", "-f", "/dev/null"]}
        return parse_service({**service, **config.compose()}, Path.cwd(), "DockerPoolConfig")
    if isinstance(config, ComposeConfig):
        data = config.model_dump(mode="json", by_alias=True, exclude_none=True)
        return _parse_compose(json.dumps(data), Path.cwd(), "ComposeConfig", scope, {})
    if isinstance(config, BaseModel):
        raise SandboxConfigError(
            f"docker_pool cannot use a {type(config).__name__}; give a compose file, a "
            "Dockerfile, an image name, a ComposeConfig or a DockerPoolConfig"
        )
    if config is None:
        config = next((name for name in CONFIG_FILES if Path(name).is_file()), None)
        if config is None:
            return ContainerConfig(image=DEFAULT_IMAGE, source="Inspect's default image")
    path = Path(config)
    is_file = is_compose_yaml(config) or is_dockerfile(path.name)
    if path.is_file() or is_file or path.suffix in (".yaml", ".yml"):
        return _parse_file(path, scope, {})
    return ContainerConfig(image=_image_name(path), source=f"image {_image_name(path)!r}")


def forget_compose_files() -> None:
    """Read compose files again, as at the start of a task."""
    _run_compose.cache_clear()


def sample_variables(metadata: Mapping[str, object]) -> dict[str, str]:
    """Name a sample's metadata as compose variables: ``SAMPLE_METADATA_<KEY>``."""
    return {
        f"SAMPLE_METADATA_{key.replace(' ', '_').upper()}": str(value)
        for key, value in metadata.items()
    }


def used_variables(config: BaseModel | str | None, variables: Mapping[str, str]) -> dict[str, str]:
    """Select the variables that a compose file mentions."""
    if not isinstance(config, str) or not is_compose_yaml(config) or not Path(config).is_file():
        return {}
    text = Path(config).read_text()
    return {name: value for name, value in variables.items() if name in text}


def _parse_file(path: Path, scope: Mapping[str, str], overrides: dict[str, Any]) -> ContainerConfig:
    if not path.is_file():
        raise SandboxConfigError(f"sandbox configuration {str(path)!r} does not exist")
    path = path.resolve()
    if is_dockerfile(path.name):
        service = {
            "build": {"context": str(path.parent), "dockerfile": path.name},
            "command": ["tail", "-f", "/dev/null"],
        }
        return parse_service({**service, **overrides}, path.parent, str(path))
    return _parse_compose(path.read_text(), path.parent, str(path), scope, overrides)


def _image_name(path: Path) -> str:
    # Inspect makes every string configuration absolute, from the folder of the task.
    if not path.is_absolute():
        return path.as_posix()
    try:
        return path.relative_to(Path.cwd()).as_posix()
    except ValueError:
        raise SandboxConfigError(
            f"sandbox configuration {path.as_posix()!r} does not exist; to name an image "
            "from another folder use DockerPoolConfig(image=...)"
        ) from None


def _parse_compose(
    text: str, folder: Path, source: str, scope: Mapping[str, str], overrides: dict[str, Any]
) -> ContainerConfig:
    words = set(_WORD.findall(text))
    named = frozenset((name, value) for name, value in scope.items() if name in words)
    try:
        data: dict[str, Any] = json.loads(_run_compose(text, str(folder), named))
        written = yaml.safe_load(text)  # for what compose leaves out, and adds
    except (OSError, ValueError, yaml.YAMLError, subprocess.SubprocessError) as ex:
        raise SandboxConfigError(f"{source}: {ex}") from ex
    for key in (*data, *written):
        allowed = ("services", "networks", "volumes", "version", "name")
        if key not in allowed and not key.startswith("x-"):
            raise SandboxConfigError(f"{source}: docker_pool cannot honour top-level {key!r}")
    services = data.get("services") or {}
    if len(services) != 1:
        raise SandboxConfigError(
            f"{source}: docker_pool runs one service, found {len(services)} "
            f"({', '.join(services)}); use Inspect's plain 'docker' sandbox for several"
        )
    ((name, service),) = services.items()
    as_written = written["services"][name]
    if "extends" in as_written:
        raise SandboxConfigError(f"{source}: docker_pool cannot honour 'extends'")
    if not as_written.get("networks"):
        service.pop("networks", None)
        if "network_mode" not in {**service, **overrides} and source not in _warned:
            _warned.add(source)
            logger.warning(
                "docker_pool: %s names no network, and its containers get none. Under plain "
                "'docker' they reach the internet: that is 'network_mode: bridge'",
                source,
            )
    if as_written.get("cap_drop") == []:
        service["cap_drop"] = []
    extension: dict[str, Any] = {}
    for layer in (data, as_written, overrides):
        extension.update(layer.get("x-docker-pool") or {})
    merged = {**service, **overrides, "x-docker-pool": extension}
    merged["x-local"] = as_written.get("x-local")
    config = parse_service(merged, folder, source)
    networks = _networks(config.networks, data.get("networks") or {}, source)
    return replace(config, networks=networks, service=name)


@lru_cache(maxsize=1024)
def _run_compose(text: str, folder: str, variables: frozenset[tuple[str, str]]) -> str:
    """Return what ``docker compose config`` makes of a file: episodes ask for it again and again.

    Raises:
        OSError, ValueError, subprocess.SubprocessError: it cannot be read, or not here.
    """
    command = ["docker", "compose", "--project-directory", folder, "--file", "-", "config"]
    try:
        done = subprocess.run(
            [*command, "--format", "json"],
            input=text,
            env={**os.environ, **dict(variables)},
            capture_output=True,
            text=True,
            timeout=_COMPOSE_SECONDS,
            cwd=folder,
        )
    except FileNotFoundError as ex:
        raise OSError("compose files are read by the program 'docker', which is missing") from ex
    if done.returncode:
        raise ValueError(
            f"'docker compose config' refuses it: {done.stderr.strip()} (without the plugin "
            "'compose', give a Dockerfile, an image or a DockerPoolConfig)"
        )
    return done.stdout.replace("$$", "$")  # its output could be its input again


def parse_service(service: dict[str, Any], base: Path, source: str) -> ContainerConfig:
    """Turn a service into a container configuration.

    Args:
        service: as ``docker compose config`` describes it.
        base: folder that the path of a filter of system calls starts from.
        source: where the service came from, for messages.

    Raises:
        SandboxConfigError: a key or value that the pool cannot honour, or a malformed one.
    """

    def refuse(key: str, why: str = "") -> SandboxConfigError:
        return SandboxConfigError(
            f"{source}: docker_pool cannot honour {key!r}{': ' + why if why else ''}; remove it "
            "or use Inspect's plain 'docker' sandbox"
        )

    for key in service:
        if key not in HONOURED | WITHOUT_EFFECT and not key.startswith("x-"):
            raise refuse(key)
    if service.get("privileged"):
        raise refuse("privileged", "a privileged container is not isolated")
    if not service.get("image") and not service.get("build"):
        raise SandboxConfigError(f"{source}: the service needs an 'image' or a 'build'")
    command = _words(service.get("command"))
    for key in ("stdin_open", "tty", "healthcheck"):
        if service.get(key) and not (command is None or is_keep_alive(command)):
            raise refuse(key, "only beside a command that does nothing")
    try:
        settings = PoolSettings.model_validate(service.get("x-docker-pool") or {})
        limits = _limits(service, settings, refuse)
    except ValueError as ex:
        raise SandboxConfigError(f"{source}: {ex}") from ex
    if service.get("runtime") == "nvidia":
        raise refuse("runtime nvidia", "it gives access to the host's GPUs")
    hardening = _hardening(service, base, refuse)
    given = service.get("environment") or {}
    config = ContainerConfig(
        image=service.get("image"),
        build=_build(service, refuse),
        pull=_pull(service, refuse),
        command=command,
        entrypoint=_words(service.get("entrypoint")),
        environment=tuple(sorted((k, str(v)) for k, v in given.items() if v is not None)),
        working_dir=service.get("working_dir"),
        user=service.get("user"),
        hostname=service.get("hostname"),
        platform=service.get("platform"),
        runtime=service.get("runtime"),
        mounts=tuple(_mount(item, refuse) for item in service.get("volumes") or []),
        tmpfs=tuple(
            (path, options)
            for path, _, options in (item.partition(":") for item in service.get("tmpfs") or [])
        ),
        networks=_network_names(service, refuse),
        limits=limits,
        hardening=hardening,
        pool=PoolSize(
            warm=PoolSize.warm if settings.warm is None else settings.warm,
            max=settings.max,
            images=None if settings.images is None else parse_size(settings.images, "images"),
        ),
        snapshot=_SNAPSHOT[settings.snapshot],
        source=source,
    )
    if hardening.read_only and limits.disk and command_capabilities(config) & _OWNING:
        # The executor's program is on a volume then, which its owner can write to.
        raise refuse("read_only", "with capabilities that reach a volume; lift the disk's limit")
    return config


def _words(value: list[str] | None) -> tuple[str, ...] | None:
    return None if value is None else tuple(value)


def _build(service: dict[str, Any], refuse: Refuse) -> Build | None:
    build = service.get("build")
    if not build:
        return None
    for key in build:
        if key not in ("context", "dockerfile", "args", "target", "no_cache", "pull"):
            raise refuse(f"build.{key}")
    args = build.get("args") or {}
    return Build(
        context=build["context"],
        dockerfile=build.get("dockerfile") or "Dockerfile",
        args=tuple(sorted((key, str(value)) for key, value in args.items() if value is not None)),
        target=build.get("target"),
        no_cache=bool(build.get("no_cache", False)),
        pull=bool(build.get("pull", False)),
    )


def _pull(service: dict[str, Any], refuse: Refuse) -> str:
    policy = service.get("pull_policy")
    if service.get("x-local"):
        return "never"
    if policy in (None, "missing", "if_not_present", "build"):
        return "missing"
    if policy in ("always", "never"):
        return str(policy)
    raise refuse("pull_policy", f"{policy!r}")


def _mount(item: dict[str, Any], refuse: Refuse) -> Mount:
    kind, source, target = item["type"], item.get("source") or "", item["target"]
    if kind not in ("bind", "volume"):
        raise refuse(f"volumes.type {kind}")
    if not source:
        raise refuse(f"volumes {target}", "an anonymous volume")
    for key, value in item.items():
        if key not in ("type", "source", "target", "read_only", "bind", "volume"):
            raise refuse(f"volumes.{key}")
        if isinstance(value, dict) and set(value) - {"create_host_path"}:
            raise refuse(f"volumes.{key}", ", ".join(value))
    if not item.get("read_only"):
        raise refuse(f"volumes {source}:{target}", "mounts must be read-only (':ro')")
    if kind == "bind":
        if any(socket.is_relative_to(Path(source).resolve()) for socket in _engine_sockets()):
            raise refuse(f"volumes {source}", "it would give access to the Docker engine")
        source = str(Path(source).resolve())
    return Mount(source=source, target=target, kind=kind)


def _engine_sockets() -> list[Path]:
    paths = ["/var/run/docker.sock", "/run/docker.sock", "/run/containerd/containerd.sock"]
    scheme, _, path = os.environ.get("DOCKER_HOST", "").partition("://")
    return [Path(item).resolve() for item in [*paths, *([path] if scheme == "unix" else [])]]


def _network_names(service: dict[str, Any], refuse: Refuse) -> tuple[Network, ...]:
    networks = service.get("networks") or {}
    if networks and service.get("network_mode"):
        raise refuse("networks", "together with network_mode")
    for name, options in networks.items():
        if options:
            raise refuse(f"networks.{name}.{next(iter(options))}")
    return tuple(Network(name=name) for name in networks)


def _networks(
    used: tuple[Network, ...], defined: dict[str, Any], source: str
) -> tuple[Network, ...]:
    found = []
    for network in used:
        given = defined.get(network.name) or {}
        for key, value in given.items():
            honoured = key in ("external", "internal", "name")
            if value and not honoured and (key, value) != ("driver", "bridge"):
                raise SandboxConfigError(
                    f"{source}: docker_pool cannot honour {key!r} of network {network.name!r}"
                )
        external = bool(given.get("external"))
        # The name of a network of its own says which project it belongs to.
        name = given["name"] if external else network.name
        found.append(Network(name, external=external, internal=bool(given.get("internal"))))
    return tuple(found)


def _limits(service: dict[str, Any], settings: PoolSettings, refuse: Refuse) -> Limits:
    deploy = service.get("deploy") or {}
    resources = deploy.get("resources") or {}
    reserved = resources.get("reservations") or {}
    for key in (*(key for key, value in deploy.items() if value), *resources, *reserved):
        if key not in ("resources", "limits", "reservations", "cpus", "memory"):
            raise refuse(f"deploy.{key}")
    deployed = resources.get("limits") or {}
    default = Limits()
    cpus = service.get("cpus", deployed.get("cpus", default.cpus))
    memory = service.get("mem_limit", deployed.get("memory", default.memory))
    swap = service.get("memswap_limit")
    if swap is not None and parse_size(swap, "memswap_limit") != parse_size(memory, "mem_limit"):
        raise refuse("memswap_limit", "containers get no swap; make it equal to mem_limit")
    pids = int(service.get("pids_limit", deployed.get("pids", default.pids)) or 0)
    disk = default.disk if settings.disk is None else settings.disk
    shm = service.get("shm_size")
    return Limits(
        cpus=float(cpus or 0) or None,
        memory=_limited(parse_size(memory, "mem_limit")),
        pids=_limited(pids),
        disk=_limited(parse_size(disk or 0, "disk")),
        shm=None if shm is None else parse_size(shm, "shm_size"),
        ulimits=tuple(
            (name, *_soft_and_hard(value))
            for name, value in sorted((service.get("ulimits") or {}).items())
        ),
    )


def _limited(value: int) -> int | None:
    return value if value > 0 else None


def _soft_and_hard(value: Any) -> tuple[int, int]:
    if isinstance(value, dict):  # compose leaves out zeros
        return int(value.get("soft", 0)), int(value.get("hard", 0))
    return int(value), int(value)


def _read_profile(value: str, base: Path, refuse: Refuse) -> str:
    """Read a task's own filter of system calls, as compose does: the engine needs its text."""
    path = base / Path(value).expanduser()
    try:
        profile = json.loads(path.read_text())
    except (OSError, ValueError) as ex:
        raise refuse("security_opt seccomp", f"profile {value!r}: {ex}") from ex
    if not isinstance(profile, dict) or "defaultAction" not in profile:
        raise refuse("security_opt seccomp", f"profile {value!r} has no defaultAction")
    return json.dumps(profile)


def _hardening(service: dict[str, Any], base: Path, refuse: Refuse) -> Hardening:
    network = service.get("network_mode") or ("" if service.get("networks") else "none")
    if network == "host" or network.startswith(("container:", "service:")):
        raise refuse(f"network_mode {network}", "it would leave the sandbox's own network")
    added = (name.upper().removeprefix("CAP_") for name in service.get("cap_add") or [])
    dropped = service.get("cap_drop")
    privileges, seccomp, profile = True, True, None
    for option in service.get("security_opt") or []:
        option = option.replace("=", ":", 1)
        if option in ("no-new-privileges", "no-new-privileges:true"):
            privileges = True
        elif option == "no-new-privileges:false":
            privileges = False
        elif option == "seccomp:unconfined":
            seccomp = False
        elif option.startswith("seccomp:"):
            profile = _read_profile(option.removeprefix("seccomp:"), base, refuse)
        else:
            raise refuse(f"security_opt {option}")
    return Hardening(
        network=network,
        cap_drop=("ALL",) if dropped is None else tuple(sorted(dropped)),
        cap_add=tuple(sorted(added)),
        no_new_privileges=privileges,
        seccomp=seccomp,
        seccomp_profile=profile,
        read_only=bool(service.get("read_only", False)),
    )
