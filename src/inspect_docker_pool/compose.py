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
from collections.abc import Mapping
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
    ContainerConfig,
    DockerPoolConfig,
    PoolSettings,
    PoolSize,
    ProjectConfig,
    command_capabilities,
    parse_size,
)
from inspect_docker_pool.errors import SandboxConfigError
from inspect_docker_pool.service import parse_limit, parse_service

logger = getLogger(__name__)

CONFIG_FILES = [
    "compose.yaml",
    "compose.yml",
    "docker-compose.yaml",
    "docker-compose.yml",
    "Dockerfile",
]

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
_warned: set[str] = set()


def parse_config(
    config: BaseModel | str | None, variables: Mapping[str, str] | None = None
) -> ProjectConfig:
    """Turn an Inspect sandbox configuration into a project's configuration.

    Args:
        config: path of a compose file or Dockerfile, an image name, a ``ComposeConfig``,
            a :class:`DockerPoolConfig`, or ``None`` (a compose file or Dockerfile in the
            current folder, else Inspect's own default image).
        variables: values for ``${NAME}`` in a compose file, before the process environment.
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
    file = config.file if isinstance(config, DockerPoolConfig) else config
    if not isinstance(file, str) or is_dockerfile(file) or not Path(file).is_file():
        return {}
    texts = "\n".join(_read_files(Path(file).read_text(), Path(file).parent))
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
        disk = parse_limit(parse_size(disk or 0, "disk"))
        images = None if settings.images is None else parse_size(settings.images, "images")
    except ValueError as ex:
        raise SandboxConfigError(f"{source}: {ex}") from ex
    if len(services) > 1 and settings.snapshot == "always":
        raise SandboxConfigError(
            f"{source}: docker_pool cannot honour 'snapshot: always' for several services: set-up "
            "can change the servers, which no snapshot of the sandbox holds"
        )
    warm = PoolSize.warm if settings.warm is None else settings.warm
    bounded = [replace(each, limits=replace(each.limits, disk=disk)) for each in services]
    for each in bounded:
        command_capabilities(each)
        _check_disk(each)
    size = PoolSize(warm, images, settings.max)
    return ProjectConfig(tuple(bounded), size, _SNAPSHOT[settings.snapshot])


def _check_disk(config: ContainerConfig) -> None:
    """Refuse a limit of the policy's disk that it could pass."""
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
        files = [_load(each) for each in texts]
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
        settings = layer.get("x-docker-pool") or {}
        if not isinstance(settings, dict):
            raise SandboxConfigError(f"{source}: 'x-docker-pool' is a mapping, got {settings!r}")
        extension |= settings
    parsed = []
    for name, service in services.items():
        if "extends" in written[name]:
            raise SandboxConfigError(f"{source}: docker_pool cannot honour 'extends'")
        for key in ("cap_drop", "cpus", "mem_limit", "pids_limit"):
            if (given := written[name].get(key)) in ([], 0, "0"):  # which compose leaves out
                service.setdefault(key, given)
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
    for entry in _load(text).get("include") or []:
        paths = entry.get("path") if isinstance(entry, dict) else entry
        for path in [paths] if isinstance(paths, str) else paths or ():
            texts += _read_files((folder / path).read_text(), (folder / path).parent)
    return texts


def _load(text: str) -> dict[str, Any]:
    data = yaml.safe_load(text)
    if not isinstance(data, dict):
        raise ValueError("a compose file is a mapping with 'services'")
    return data


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
