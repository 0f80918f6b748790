"""Turns one service, as ``docker compose config`` describes it, into a container's configuration.

What cannot be honoured is refused by its name. The policy's own service is hardened; a server
beside it belongs to the task, and gets what compose gives it, within limits.
"""

from __future__ import annotations

import json
import os
import re
from collections.abc import Callable, Mapping
from pathlib import Path
from posixpath import normpath
from types import MappingProxyType
from typing import Any

from inspect_docker_pool.config import (
    Build,
    ContainerConfig,
    Hardening,
    HealthCheck,
    Limits,
    Mount,
    Network,
    is_keep_alive,
    parse_size,
)
from inspect_docker_pool.errors import SandboxConfigError

HONOURED = frozenset(
    {
        "image", "build", "command", "entrypoint", "environment", "working_dir", "user",
        "hostname", "init", "platform", "volumes", "tmpfs", "networks", "network_mode", "cpus",
        "mem_limit", "memswap_limit", "pids_limit", "shm_size", "ulimits", "deploy", "cap_add",
        "cap_drop", "security_opt", "read_only", "pull_policy", "stdin_open", "tty", "privileged",
        "runtime", "healthcheck", "depends_on", "ports", "extra_hosts",
    }
)  # fmt: skip

WITHOUT_EFFECT = frozenset(
    {"attach", "expose", "labels", "logging", "restart", "stop_grace_period", "stop_signal"}
)
"""Keys that change nothing for an episode: one whose container ends has failed."""

_DURATION = re.compile(r"(\d+(?:\.\d+)?)(h|ms|m|us|s)")
_UNITS = {"h": 3600.0, "m": 60.0, "s": 1.0, "ms": 1e-3, "us": 1e-6}
Refuse = Callable[..., SandboxConfigError]


def parse_service(
    service: dict[str, Any],
    base: Path,
    source: str,
    project: Mapping[str, Any] = MappingProxyType({}),
    server: str | None = None,
) -> ContainerConfig:
    """Turn a service into a container's configuration.

    Args:
        service: as ``docker compose config`` describes it.
        base: folder that the path of a filter of system calls starts from.
        source: where the service came from, for messages.
        project: as ``docker compose config`` describes it; its networks and volumes are used.
        server: its name, if it stands beside the policy's sandbox.
    """
    place = f"{source}: service {server!r}" if server else source

    def refuse(key: str, why: str = "") -> SandboxConfigError:
        return SandboxConfigError(
            f"{place}: docker_pool cannot honour {key!r}{': ' + why if why else ''}; remove it "
            "or use Inspect's plain 'docker' sandbox"
        )

    for key in service:
        if key not in HONOURED | WITHOUT_EFFECT and not key.startswith("x-"):
            raise refuse(key)
    if service.get("privileged"):
        raise refuse("privileged", "a privileged container is not isolated")
    if not service.get("image") and not service.get("build"):
        raise SandboxConfigError(f"{place}: the service needs an 'image' or a 'build'")
    command = _words(service.get("command"))
    for key in ("stdin_open", "tty"):
        if service.get(key) and not (command is None or is_keep_alive(command)):
            raise refuse(key, "only beside a command that does nothing")
    if service.get("runtime") == "nvidia":
        raise refuse("runtime nvidia", "it gives access to the host's GPUs")
    try:
        limits = _limits(service, refuse)
    except SandboxConfigError:
        raise
    except ValueError as ex:
        raise SandboxConfigError(f"{place}: {ex}") from ex
    given = service.get("environment") or {}
    volumes = project.get("volumes") or {}
    return ContainerConfig(
        image=service.get("image"),
        build=_build(service, refuse),
        pull=_pull(service, refuse),
        command=command,
        entrypoint=_words(service.get("entrypoint")),
        environment=tuple(sorted((k, None if v is None else str(v)) for k, v in given.items())),
        working_dir=normpath(folder) if (folder := service.get("working_dir")) else None,
        user=service.get("user"),
        hostname=service.get("hostname"),
        platform=service.get("platform"),
        runtime=service.get("runtime"),
        mounts=tuple(_mount(item, volumes, refuse) for item in service.get("volumes") or []),
        tmpfs=tuple(
            (path, options)
            for path, _, options in (item.partition(":") for item in service.get("tmpfs") or [])
        ),
        networks=_networks(service, project.get("networks") or {}, refuse),
        ports=tuple(_port(item, refuse) for item in service.get("ports") or []),
        extra_hosts=tuple(host.replace("=", ":", 1) for host in service.get("extra_hosts") or []),
        healthcheck=_healthcheck(service.get("healthcheck") or {}, refuse),
        depends_on=tuple(
            (name, each.get("condition", "service_started"))
            for name, each in (service.get("depends_on") or {}).items()
            if name in project["services"]
        ),
        limits=limits,
        hardening=_hardening(service, base, refuse, is_server=server is not None),
        is_server=server is not None,
        source=source,
    )


def _port(item: dict[str, Any], refuse: Refuse) -> str:
    if item.get("published") not in (None, "", "0"):
        raise refuse("ports", f"only one episode could have the host's {item['published']}")
    return f"{item['target']}/{item.get('protocol', 'tcp')}"


def _healthcheck(given: dict[str, Any], refuse: Refuse) -> HealthCheck | None:
    for key in given:
        if key not in ("test", "interval", "timeout", "start_period", "start_interval", "retries",
                       "disable"):  # fmt: skip
            raise refuse(f"healthcheck.{key}")
    if given.get("disable"):
        return HealthCheck(("NONE",))
    if not given.get("test"):
        return None
    keys = ("interval", "timeout", "start_period")
    return HealthCheck(
        tuple(given["test"]),
        retries=int(given.get("retries") or HealthCheck.retries),
        **{key: _seconds(given[key]) for key in keys if key in given},
    )


def _seconds(duration: str) -> float:
    """Read a duration as compose writes it: ``1m30s``."""
    return sum(float(number) * _UNITS[unit] for number, unit in _DURATION.findall(duration))


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


def _mount(item: dict[str, Any], volumes: dict[str, Any], refuse: Refuse) -> Mount:
    kind, source, target = item["type"], item.get("source") or "", item["target"]
    read_only = bool(item.get("read_only"))
    if kind not in ("bind", "volume"):
        raise refuse(f"volumes.type {kind}")
    for key, value in item.items():
        if key not in ("type", "source", "target", "read_only", "bind", "volume"):
            raise refuse(f"volumes.{key}")
        if isinstance(value, dict) and set(value) - {"create_host_path"}:
            raise refuse(f"volumes.{key}", ", ".join(value))
    volume = volumes.get(source, {"external": bool(source)})
    own = kind == "volume" and not volume.get("external")
    for key in volume:
        if key not in ("name", "external", "labels") and (key, volume[key]) != ("driver", "local"):
            raise refuse(f"volumes.{source}.{key}")
    if not (read_only or own):
        raise refuse(f"volumes {source}:{target}", "mounts must be read-only (':ro')")
    if kind == "bind":
        if any(socket.is_relative_to(Path(source).resolve()) for socket in _engine_sockets()):
            raise refuse(f"volumes {source}", "it would give access to the Docker engine")
        source = str(Path(source).resolve())
    elif not own:
        source = volume.get("name") or source
    return Mount(source, target, kind, read_only, own and bool(source))


def _engine_sockets() -> list[Path]:
    paths = ["/var/run/docker.sock", "/run/docker.sock", "/run/containerd/containerd.sock"]
    scheme, _, path = os.environ.get("DOCKER_HOST", "").partition("://")
    return [Path(item).resolve() for item in [*paths, *([path] if scheme == "unix" else [])]]


def _networks(
    service: dict[str, Any], defined: dict[str, Any], refuse: Refuse
) -> tuple[Network, ...]:
    networks = service.get("networks") or {}
    if networks and service.get("network_mode"):
        raise refuse("networks", "together with network_mode")
    found = []
    for name, options in networks.items():
        if unknown := [key for key in options or {} if key != "aliases"]:
            raise refuse(f"networks.{name}.{unknown[0]}")
        given = defined.get(name) or {}
        for key, value in given.items():
            honoured = key in ("external", "internal", "name", "labels")
            if value and not honoured and (key, value) != ("driver", "bridge"):
                raise refuse(f"networks.{name}.{key}")
        external = bool(given.get("external"))
        # The name of a network of its own says which project it belongs to.
        known_as = given["name"] if external else name
        if external:
            _check_network("networks", known_as, refuse)
        aliases = tuple((options or {}).get("aliases") or ())
        found.append(Network(known_as, external, bool(given.get("internal")), aliases))
    return tuple(found)


def _check_network(key: str, name: str, refuse: Refuse) -> None:
    if name == "host" or name.startswith(("container:", "service:")):
        raise refuse(f"{key} {name}", "it would leave the sandbox's own network")


def _limits(service: dict[str, Any], refuse: Refuse) -> Limits:
    deploy = service.get("deploy") or {}
    resources = deploy.get("resources") or {}
    reserved = resources.get("reservations") or {}
    stated = (key for key, value in deploy.items() if value and (key, value) != ("replicas", 1))
    for key in (*stated, *resources, *reserved):
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
    shm = service.get("shm_size")
    return Limits(
        cpus=float(cpus or 0) or None,
        memory=parse_limit(parse_size(memory, "mem_limit")),
        pids=parse_limit(pids),
        shm=None if shm is None else parse_size(shm, "shm_size"),
        ulimits=tuple(
            (name, *_soft_and_hard(value))
            for name, value in sorted((service.get("ulimits") or {}).items())
        ),
    )


def parse_limit(value: int) -> int | None:
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


def _hardening(
    service: dict[str, Any], base: Path, refuse: Refuse, *, is_server: bool
) -> Hardening:
    network = service.get("network_mode") or ("" if service.get("networks") else "none")
    _check_network("network_mode", network, refuse)
    added = (name.upper().removeprefix("CAP_") for name in service.get("cap_add") or [])
    dropped = service.get("cap_drop")
    if dropped is None:  # servers switch users; in the sandbox only its commands would
        dropped = [] if is_server else ["ALL"]
    privileges, seccomp, profile = not is_server, True, None
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
        cap_drop=tuple(sorted(dropped)),
        cap_add=tuple(sorted(added)),
        no_new_privileges=privileges,
        seccomp=seccomp,
        seccomp_profile=profile,
        read_only=bool(service.get("read_only", False)),
    )
