"""Reads one service of a compose file, key by key; an unknown key is an error."""

from __future__ import annotations

import json
import os
import re
import shlex
from collections.abc import Callable
from pathlib import Path
from typing import Any

from inspect_docker_pool.config import (
    EXTENSIONS,
    Build,
    ContainerConfig,
    Hardening,
    Limits,
    Mount,
    Network,
    PoolSize,
    is_keep_alive,
)
from inspect_docker_pool.errors import SandboxConfigError

HONOURED = frozenset(
    {
        "image", "build", "command", "entrypoint", "environment", "env_file", "working_dir",
        "user", "hostname", "init", "platform", "volumes", "tmpfs", "networks", "network_mode",
        "cpus", "mem_limit", "memswap_limit", "pids_limit", "shm_size", "ulimits", "deploy",
        "cap_add", "cap_drop", "security_opt", "read_only", "pull_policy", "restart",
        "stop_grace_period", "stdin_open", "tty", "privileged", "runtime",
    }
)  # fmt: skip

_SIZE = re.compile(r"^\s*(\d+(?:\.\d+)?)\s*([kmgt]?)i?b?\s*$", re.IGNORECASE)


def parse_service(service: dict[str, Any], base: Path, source: str) -> ContainerConfig:
    """Turn a service mapping into a container configuration.

    Args:
        service: the mapping under ``services.<name>``, variables already resolved.
        base: folder that relative paths start from.
        source: where the service came from, for messages.

    Raises:
        SandboxConfigError: a key or value that the pool cannot honour, or a malformed one.
    """
    try:
        return _parse(service, base, source)
    except SandboxConfigError as ex:
        if str(ex).startswith(source):
            raise
        raise SandboxConfigError(f"{source}: {ex}") from ex
    except (ValueError, TypeError, KeyError, AttributeError) as ex:
        raise SandboxConfigError(f"{source}: the service is malformed: {ex!r}") from ex


def _parse(service: dict[str, Any], base: Path, source: str) -> ContainerConfig:
    def refuse(key: str, why: str = "") -> SandboxConfigError:
        return SandboxConfigError(
            f"{source}: docker_pool cannot honour {key!r}{': ' + why if why else ''}; remove it "
            "or use Inspect's plain 'docker' sandbox"
        )

    for key in service:
        if key not in HONOURED and not key.startswith("x-"):
            raise refuse(key)
    if service.get("privileged"):
        raise refuse("privileged", "a privileged container is not isolated")
    if str(service.get("restart") or "no").lower() not in ("no", "false"):
        raise refuse("restart", "a restarted container would lose the episode's state")
    if not service.get("image") and not service.get("build"):
        raise SandboxConfigError(f"{source}: the service needs an 'image' or a 'build'")
    command = _words(service.get("command"))
    for key in ("stdin_open", "tty"):
        if service.get(key) and not (command is None or is_keep_alive(command)):
            raise refuse(key, "only to keep a shell running")
    extension = _extension(service.get("x-docker-pool") or {}, source)
    return ContainerConfig(
        image=service.get("image"),
        build=_build(service, base, refuse),
        pull=_pull(service, refuse),
        command=command,
        entrypoint=_words(service.get("entrypoint")),
        environment=_environment(service, base, source),
        working_dir=service.get("working_dir"),
        user=None if service.get("user") is None else str(service["user"]),
        hostname=service.get("hostname"),
        init=bool(service.get("init", False)),
        platform=service.get("platform"),
        runtime=_runtime(service, refuse),
        mounts=tuple(_mount(item, base, refuse) for item in service.get("volumes") or []),
        tmpfs=tuple(_tmpfs(item) for item in _many(service.get("tmpfs"))),
        networks=_network_names(service, refuse),
        limits=_limits(service, extension, refuse),
        hardening=_hardening(service, base, refuse),
        pool=PoolSize(
            warm=int(extension.get("warm", PoolSize.warm)),
            max=None if extension.get("max") is None else int(extension["max"]),
            images=None
            if extension.get("images") is None
            else parse_size(extension["images"], "images"),
        ),
        snapshot=_snapshot(extension.get("snapshot"), refuse),
        source=source,
    )


def parse_size(value: Any, key: str = "size") -> int:
    """Read a size in bytes: a number, or a string such as ``512m`` or ``2GiB``."""
    if isinstance(value, int) and not isinstance(value, bool):
        return value
    match = _SIZE.match(str(value))
    if match is None:
        raise SandboxConfigError(f"{key!r} is not a size: {value!r}")
    return int(float(match[1]) * 1024 ** " kmgt".index(match[2].lower() or " "))


Refuse = Callable[..., SandboxConfigError]


def _many(value: Any) -> list[Any]:
    if value is None:
        return []
    return list(value) if isinstance(value, list) else [value]


def _words(value: Any) -> tuple[str, ...] | None:
    if value is None:
        return None
    return tuple(shlex.split(value)) if isinstance(value, str) else tuple(map(str, value))


def _build(service: dict[str, Any], base: Path, refuse: Refuse) -> Build | None:
    build = service.get("build")
    if not build:
        return None
    if isinstance(build, str):
        build = {"context": build}
    for key in build:
        if key not in ("context", "dockerfile", "args", "target", "no_cache", "pull"):
            raise refuse(f"build.{key}")
    args = build.get("args") or {}
    if isinstance(args, list):
        args = dict(item.split("=", 1) for item in args)
    return Build(
        context=str((base / (build.get("context") or ".")).resolve()),
        dockerfile=build.get("dockerfile") or "Dockerfile",
        args=tuple(sorted((str(key), str(value)) for key, value in args.items())),
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


def _environment(service: dict[str, Any], base: Path, source: str) -> tuple[tuple[str, str], ...]:
    found: dict[str, str] = {}
    for name in _many(service.get("env_file")):
        path = base / name
        if not path.is_file():
            raise SandboxConfigError(f"{source}: env_file {name!r} does not exist")
        for line in path.read_text().splitlines():
            if line.strip() and not line.lstrip().startswith("#"):
                key, _, value = line.partition("=")
                found[key.strip()] = value.strip().strip("\"'")
    given = service.get("environment") or {}
    if isinstance(given, list):
        given = {key: value for key, _, value in (str(item).partition("=") for item in given)}
    found.update({str(k): "" if v is None else str(v) for k, v in given.items()})
    return tuple(sorted(found.items()))


def _mount(item: Any, base: Path, refuse: Refuse) -> Mount:
    if isinstance(item, dict):
        for key in item:
            if key not in ("type", "source", "target", "read_only"):
                raise refuse(f"volumes.{key}")
        source, target = item.get("source") or "", item.get("target") or ""
        kind, read_only = item.get("type", "volume"), bool(item.get("read_only"))
        if kind not in ("bind", "volume"):
            raise refuse(f"volumes.type {kind}")
    else:
        parts = str(item).split(":")
        if len(parts) < 2:
            raise refuse(f"volumes {item!r}", "an anonymous volume")
        source, target = parts[0], parts[1]
        kind = "bind" if source.startswith((".", "/", "~")) else "volume"
        read_only = len(parts) > 2 and "ro" in parts[2].split(",")
    if not read_only:
        raise refuse(f"volumes {source}:{target}", "mounts must be read-only (':ro')")
    if kind == "bind":
        source = str((base / Path(source).expanduser()).resolve())
        if any(socket.is_relative_to(source) for socket in _engine_sockets()):
            raise refuse(f"volumes {source}", "it would give access to the Docker engine")
    return Mount(source=source, target=target, kind=kind)


def _engine_sockets() -> list[Path]:
    paths = ["/var/run/docker.sock", "/run/docker.sock", "/run/containerd/containerd.sock"]
    scheme, _, path = os.environ.get("DOCKER_HOST", "").partition("://")
    return [Path(item).resolve() for item in [*paths, *([path] if scheme == "unix" else [])]]


def _tmpfs(item: Any) -> tuple[str, str]:
    path, _, options = str(item).partition(":")
    return path, options


def _network_names(service: dict[str, Any], refuse: Refuse) -> tuple[Network, ...]:
    networks = service.get("networks")
    if not networks:
        return ()
    if service.get("network_mode"):
        raise refuse("networks", "together with network_mode")
    if isinstance(networks, dict):
        for name, options in networks.items():
            if options:
                raise refuse(f"networks.{name}.{next(iter(options))}")
    return tuple(Network(name=str(name)) for name in networks)


def _limits(service: dict[str, Any], extension: dict[str, Any], refuse: Refuse) -> Limits:
    deploy = service.get("deploy") or {}
    resources = deploy.get("resources") or {}
    for key in [*(set(deploy) - {"resources"}), *(set(resources) - {"limits"})]:
        raise refuse(f"deploy.{key}")
    deployed = resources.get("limits") or {}
    default = Limits()
    cpus = service.get("cpus", deployed.get("cpus", default.cpus))
    memory = service.get("mem_limit", deployed.get("memory", default.memory))
    swap = service.get("memswap_limit")
    if swap is not None and parse_size(swap, "memswap_limit") != parse_size(memory, "mem_limit"):
        raise refuse("memswap_limit", "containers get no swap; make it equal to mem_limit")
    pids = int(service.get("pids_limit", deployed.get("pids", default.pids)) or 0)
    disk = extension.get("disk", default.disk)
    shm = service.get("shm_size")
    return Limits(
        cpus=float(cpus or 0) or None,
        memory=_unlimited(parse_size(memory, "mem_limit")),
        pids=_unlimited(pids),
        disk=None if disk is None else _unlimited(parse_size(disk, "disk")),
        shm=None if shm is None else parse_size(shm, "shm_size"),
        ulimits=tuple(_ulimit(name, value) for name, value in _items(service.get("ulimits"))),
    )


def _unlimited(value: int) -> int | None:
    return value if value > 0 else None


def _items(value: Any) -> list[tuple[str, Any]]:
    return sorted((value or {}).items())


def _ulimit(name: str, value: Any) -> tuple[str, int, int]:
    if isinstance(value, dict):
        return name, int(value["soft"]), int(value["hard"])
    return name, int(value), int(value)


def _runtime(service: dict[str, Any], refuse: Refuse) -> str | None:
    runtime = service.get("runtime")
    if runtime == "nvidia":
        raise refuse("runtime nvidia", "it gives access to the host's GPUs")
    return None if runtime is None else str(runtime)


def _profile(value: str, base: Path, refuse: Refuse) -> str:
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
    network = str(service.get("network_mode") or ("none" if not service.get("networks") else ""))
    if network == "host" or network.startswith(("container:", "service:")):
        raise refuse(f"network_mode {network}", "it would leave the sandbox's own network")
    added = tuple(sorted(str(cap).upper().removeprefix("CAP_") for cap in _many(
        service.get("cap_add"))))  # fmt: skip
    dropped = service.get("cap_drop")
    options = [str(option).replace("=", ":", 1) for option in service.get("security_opt") or []]
    privileges, seccomp, profile = True, True, None
    for option in options:
        if option in ("no-new-privileges", "no-new-privileges:true"):
            privileges = True
        elif option == "no-new-privileges:false":
            privileges = False
        elif option == "seccomp:unconfined":
            seccomp = False
        elif option.startswith("seccomp:"):
            profile = _profile(option.removeprefix("seccomp:"), base, refuse)
        else:
            raise refuse(f"security_opt {option}")
    return Hardening(
        network=network,
        cap_drop=("ALL",) if dropped is None else tuple(sorted(map(str, dropped))),
        cap_add=added,
        no_new_privileges=privileges,
        seccomp=seccomp,
        seccomp_profile=profile,
        read_only=bool(service.get("read_only", False)),
    )


def _snapshot(value: Any, refuse: Refuse) -> str:
    if value is None or value is True:
        return "auto"
    if value is False:
        return "never"
    if value == "always":
        return "always"
    raise refuse("x-docker-pool.snapshot", f"{value!r} is not true, false or always")


def _extension(extension: dict[str, Any], source: str) -> dict[str, Any]:
    for key in extension:
        if key not in EXTENSIONS:
            raise SandboxConfigError(f"{source}: unknown key {key!r} in 'x-docker-pool'")
    return extension
