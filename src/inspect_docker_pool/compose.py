"""Reads a compose file, Dockerfile, image name or model into the configuration of a project.

A compose file is read by ``docker compose config`` itself. What the pool cannot honour of it is
refused by its name: a key that is silently dropped would give the policy another sandbox than
the one the task asked for. The policy's own service is hardened; the servers beside it belong to
the task, and get what compose gives them, within limits.
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
from types import MappingProxyType
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
    HealthCheck,
    Limits,
    Mount,
    Network,
    PoolSettings,
    PoolSize,
    ProjectConfig,
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
        "runtime", "healthcheck", "depends_on", "ports", "extra_hosts",
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
_COMPLETED = "service_completed_successfully"
_WORD = re.compile(r"[A-Za-z_]\w*")
_DURATION = re.compile(r"(\d+(?:\.\d+)?)(h|ms|m|us|s)")
_UNITS = {"h": 3600.0, "m": 60.0, "s": 1.0, "ms": 1e-3, "us": 1e-6}
_warned: set[str] = set()

Refuse = Callable[..., SandboxConfigError]


def parse_config(
    config: BaseModel | str | None, variables: Mapping[str, str] | None = None
) -> ProjectConfig:
    """Turn an Inspect sandbox configuration into a project's configuration.

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
        return _parse_one({**service, **config.compose()}, Path.cwd(), "DockerPoolConfig")
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
            default = ContainerConfig(image=DEFAULT_IMAGE, source="Inspect's default image")
            return ProjectConfig((default,))
    path = Path(config)
    is_file = is_compose_yaml(config) or is_dockerfile(path.name)
    if path.is_file() or is_file or path.suffix in (".yaml", ".yml"):
        return _parse_file(path, scope, {})
    name = _image_name(path)
    return ProjectConfig((ContainerConfig(image=name, source=f"image {name!r}"),))


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
    texts = "\n".join(_read_files(Path(config).read_text(), Path(config).parent))
    return {name: value for name, value in variables.items() if name in texts}


def _parse_file(path: Path, scope: Mapping[str, str], overrides: dict[str, Any]) -> ProjectConfig:
    if not path.is_file():
        raise SandboxConfigError(f"sandbox configuration {str(path)!r} does not exist")
    path = path.resolve()
    if is_dockerfile(path.name):
        service = {
            "build": {"context": str(path.parent), "dockerfile": path.name},
            "command": ["tail", "-f", "/dev/null"],
        }
        return _parse_one({**service, **overrides}, path.parent, str(path))
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


def _parse_one(service: dict[str, Any], base: Path, source: str) -> ProjectConfig:
    return _project([parse_service(service, base, source)], service.get("x-docker-pool"), source)


def _project(
    services: list[ContainerConfig], extension: dict[str, Any] | None, source: str
) -> ProjectConfig:
    """Combine services, the default one first, with the pool's own settings."""
    try:
        settings = PoolSettings.model_validate(extension or {})
        disk = services[0].limits.disk if settings.disk is None else settings.disk
        disk = _limited(parse_size(disk or 0, "disk"))
        images = None if settings.images is None else parse_size(settings.images, "images")
    except ValueError as ex:
        raise SandboxConfigError(f"{source}: {ex}") from ex
    if len(services) > 1 and settings.snapshot == "always":
        raise SandboxConfigError(
            f"{source}: docker_pool cannot honour 'snapshot: always' for several services: set-up "
            "can change the servers, which no snapshot of the sandbox holds"
        )
    size = PoolSize(
        warm=PoolSize.warm if settings.warm is None else settings.warm,
        max=settings.max,
        images=images,
    )
    limited = [replace(each, limits=replace(each.limits, disk=disk)) for each in services]
    for each in limited:
        _check_disk(each)
    return ProjectConfig(tuple(limited), size, _SNAPSHOT[settings.snapshot])


def _check_disk(config: ContainerConfig) -> None:
    """Refuse a limit of the policy's disk that it could pass.

    Raises:
        SandboxConfigError: a volume that it can write to.
    """
    if config.is_server or not config.limits.disk:
        return
    if config.hardening.read_only and command_capabilities(config) & _OWNING:
        # The executor's program is on a volume then, which its owner can write to.
        key = "'read_only' with capabilities that reach a volume"
    elif written := [mount.target for mount in config.mounts if not mount.read_only]:
        key = f"'volumes' on {written[0]}, which can be written,"
    else:
        return
    raise SandboxConfigError(
        f"{config.source}: docker_pool cannot honour {key} beside a limit of the disk; lift it "
        "(x-docker-pool: {disk: 0})"
    )


def _parse_compose(
    text: str, folder: Path, source: str, scope: Mapping[str, str], overrides: dict[str, Any]
) -> ProjectConfig:
    try:
        texts = _read_files(text, folder)
        files: list[dict[str, Any]] = [yaml.safe_load(each) or {} for each in texts]
        words = set(_WORD.findall("\n".join(texts)))
        named = frozenset((name, value) for name, value in scope.items() if name in words)
        data: dict[str, Any] = json.loads(_run_compose(text, str(folder), named))
    except (OSError, ValueError, yaml.YAMLError, subprocess.SubprocessError) as ex:
        raise SandboxConfigError(f"{source}: {ex}") from ex
    for key in (*data, *(key for file in files for key in file)):
        allowed = ("services", "networks", "volumes", "version", "name", "include")
        if key not in allowed and not key.startswith("x-"):
            raise SandboxConfigError(f"{source}: docker_pool cannot honour top-level {key!r}")
    # What compose leaves out of its answer, and adds to it, is looked up in the files.
    written = {name: each for file in files for name, each in (file.get("services") or {}).items()}
    services: dict[str, dict[str, Any]] = data.get("services") or {}
    default = _default_of({name: written[name] for name in services}, source)
    services[default].update(overrides)
    services = {default: services[default]} | services
    _settle_networks(data, files, written, source)
    extension: dict[str, Any] = {}
    for layer in (data, written[default], overrides):
        extension.update(layer.get("x-docker-pool") or {})
    parsed = []
    for name, service in services.items():
        if "extends" in written[name]:
            raise SandboxConfigError(f"{source}: docker_pool cannot honour 'extends'")
        if written[name].get("cap_drop") == []:
            service.setdefault("cap_drop", [])
        service["x-local"] = written[name].get("x-local")
        server = None if name == default else name
        config = parse_service(service, folder, source, data, server)
        parsed.append(replace(config, service=name))
    awaited = {
        other for c in parsed for other, condition in c.depends_on if condition == _COMPLETED
    }
    parsed = [replace(config, completes=config.service in awaited) for config in parsed]
    return _project(parsed, extension, source)


def _read_files(text: str, folder: Path) -> list[str]:
    """Read the text of a compose file's includes, and theirs; its own comes first."""
    texts = [text]
    for entry in (yaml.safe_load(text) or {}).get("include") or []:
        paths = entry["path"] if isinstance(entry, dict) else entry
        for path in [paths] if isinstance(paths, str) else paths:
            texts += _read_files((folder / path).read_text(), (folder / path).parent)
    return texts


def _default_of(written: dict[str, dict[str, Any]], source: str) -> str:
    """Name the service that the policy works in."""
    stated = [name for name, service in written.items() if service.get("x-default")]
    only = list(written) if len(written) == 1 else []
    for name in [*stated[-1:], "default", *only]:
        if name in written:
            return name
    raise SandboxConfigError(
        f"{source}: no service is named 'default' or has 'x-default: true' (found: "
        f"{', '.join(written) or 'none'})"
    )


def _settle_networks(
    data: dict[str, Any],
    files: list[dict[str, Any]],
    written: dict[str, dict[str, Any]],
    source: str,
) -> None:
    """Take the way to the internet from services that name no network, which compose adds."""
    if any("default" in (each.get("networks") or ()) for each in [*files, *written.values()]):
        return
    services = data["services"]
    joined = [
        name
        for name, service in services.items()
        if not written[name].get("networks") and "networks" in service
    ]
    for name in joined:
        if len(joined) == 1 or "network_mode" in services[name]:
            del services[name]["networks"]
    data.setdefault("networks", {}).setdefault("default", {})["internal"] = True
    silent = [name for name in joined if "network_mode" not in services[name]]
    if silent and source not in _warned:
        _warned.add(source)
        instead = "get none" if len(joined) == 1 else "reach only each other"
        way = "'network_mode: bridge'" if len(joined) == 1 else "'networks: {default: {}}'"
        logger.warning(
            "docker_pool: %s names no network, and its containers %s. Under plain 'docker' they "
            "reach the internet: that is %s",
            source,
            instead,
            way,
        )


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

    Raises:
        SandboxConfigError: a key or value that the pool cannot honour, or a malformed one.
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
        environment=tuple(sorted((k, str(v)) for k, v in given.items() if v is not None)),
        working_dir=service.get("working_dir"),
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
        aliases = tuple((options or {}).get("aliases") or ())
        found.append(Network(known_as, external, bool(given.get("internal")), aliases))
    return tuple(found)


def _limits(service: dict[str, Any], refuse: Refuse) -> Limits:
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
    shm = service.get("shm_size")
    return Limits(
        cpus=float(cpus or 0) or None,
        memory=_limited(parse_size(memory, "mem_limit")),
        pids=_limited(pids),
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


def _hardening(
    service: dict[str, Any], base: Path, refuse: Refuse, *, is_server: bool
) -> Hardening:
    network = service.get("network_mode") or ("" if service.get("networks") else "none")
    if network == "host" or network.startswith(("container:", "service:")):
        raise refuse(f"network_mode {network}", "it would leave the sandbox's own network")
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
