"""Read a compose file, Dockerfile, image name or model into one container configuration.

What the pool cannot honour is refused by its name: a key that is silently dropped
would give the policy another sandbox than the one the task asked for.
"""

from __future__ import annotations

import os
import re
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import yaml
from inspect_ai.util import ComposeConfig, is_compose_yaml, is_dockerfile
from pydantic import BaseModel

from inspect_docker_pool.config import (
    DEFAULT_IMAGE,
    ContainerConfig,
    DockerPoolConfig,
    Network,
)
from inspect_docker_pool.errors import SandboxConfigError
from inspect_docker_pool.service import parse_service

CONFIG_FILES = [
    "compose.yaml",
    "compose.yml",
    "docker-compose.yaml",
    "docker-compose.yml",
    "Dockerfile",
]

_VARIABLE = re.compile(
    r"\$(?:(?P<escaped>\$)|(?P<plain>[A-Za-z_]\w*)"
    r"|\{(?P<name>[A-Za-z_]\w*)(?:(?P<op>:?[-?+])(?P<word>[^}]*))?\})"
)


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
        return _from_model(config, scope)
    if isinstance(config, ComposeConfig):
        data = config.model_dump(mode="json", by_alias=True, exclude_none=True)
        return _from_compose(data, Path.cwd(), "ComposeConfig")
    if isinstance(config, BaseModel):
        raise SandboxConfigError(
            f"docker_pool cannot use a {type(config).__name__}; give a compose file, a "
            "Dockerfile, an image name, a ComposeConfig or a DockerPoolConfig"
        )
    if config is None:
        found = next((name for name in CONFIG_FILES if Path(name).is_file()), None)
        if found is None:
            return ContainerConfig(image=DEFAULT_IMAGE, source="Inspect's default image")
        config = found
    return _from_string(config, scope)


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


def _from_model(config: DockerPoolConfig, scope: Mapping[str, str]) -> ContainerConfig:
    if config.file is not None and config.image is not None:
        raise SandboxConfigError("DockerPoolConfig takes an image or a file, not both")
    overrides = config.compose()
    if config.file is None:
        service = {"image": DEFAULT_IMAGE, "command": "tail -f /dev/null", **overrides}
        return parse_service(service, base=Path.cwd(), source="DockerPoolConfig")
    path = Path(config.file).resolve()
    if not path.is_file():
        raise SandboxConfigError(f"sandbox configuration {config.file!r} does not exist")
    if is_dockerfile(path.name):
        return parse_service({**_dockerfile_service(path), **overrides}, path.parent, str(path))
    return _from_compose(_load(path, scope), path.parent, str(path), overrides)


def _from_string(config: str, scope: Mapping[str, str]) -> ContainerConfig:
    path = Path(config)
    if path.is_file():
        path = path.resolve()
        if is_dockerfile(path.name):
            return parse_service(_dockerfile_service(path), path.parent, str(path))
        return _from_compose(_load(path, scope), path.parent, str(path))
    if is_compose_yaml(config) or is_dockerfile(path.name) or path.suffix in (".yaml", ".yml"):
        raise SandboxConfigError(f"sandbox configuration {config!r} does not exist")
    return ContainerConfig(image=_image_name(path), source=f"image {_image_name(path)!r}")


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


def _dockerfile_service(path: Path) -> dict[str, Any]:
    return {
        "build": {"context": str(path.parent), "dockerfile": path.name},
        "command": "tail -f /dev/null",
        "init": True,
    }


def _load(path: Path, scope: Mapping[str, str]) -> dict[str, Any]:
    try:
        data = yaml.safe_load(path.read_text())
    except yaml.YAMLError as ex:
        raise SandboxConfigError(f"{path} is not valid YAML: {ex}") from ex
    if not isinstance(data, dict):
        raise SandboxConfigError(f"{path} is not a compose file: expected a mapping")
    resolved: dict[str, Any] = _interpolate(data, scope, path)
    return resolved


def _interpolate(value: Any, scope: Mapping[str, str], path: Path) -> Any:
    if isinstance(value, dict):
        return {key: _interpolate(item, scope, path) for key, item in value.items()}
    if isinstance(value, list):
        return [_interpolate(item, scope, path) for item in value]
    if not isinstance(value, str):
        return value

    def substitute(match: re.Match[str]) -> str:
        if match["escaped"]:
            return "$"
        name, op, word = match["plain"] or match["name"], match["op"] or "", match["word"] or ""
        given = scope.get(name)
        present = bool(given) if op.startswith(":") else given is not None
        if op.endswith("+"):
            return word if present else ""
        if op.endswith("?") and not present:
            raise SandboxConfigError(f"{path}: variable {name} is not set: {word}")
        if op.endswith("-") and not present:
            return word
        return given or ""

    return _VARIABLE.sub(substitute, value)


def _from_compose(
    data: dict[str, Any], base: Path, source: str, overrides: dict[str, Any] | None = None
) -> ContainerConfig:
    for key in data:
        if key not in ("services", "networks", "volumes", "version") and not key.startswith("x-"):
            raise SandboxConfigError(f"{source}: docker_pool cannot honour top-level {key!r}")
    services = data.get("services")
    if not isinstance(services, dict) or not services:
        raise SandboxConfigError(f"{source}: no services")
    if len(services) > 1:
        raise SandboxConfigError(
            f"{source}: docker_pool runs one service, found {len(services)} "
            f"({', '.join(services)}); use Inspect's plain 'docker' sandbox for several"
        )
    ((name, service),) = services.items()
    layers = (data, service or {}, overrides or {})
    merged = {**layers[1], **layers[2]}
    extension: dict[str, Any] = {}
    for layer in layers:
        extension.update(layer.get("x-docker-pool") or {})
    if extension:
        merged["x-docker-pool"] = extension
    config = parse_service(merged, base, source)
    networks = _networks(config.networks, data.get("networks") or {}, source)
    return replace(config, networks=networks, service=name)


def _networks(
    used: tuple[Network, ...], defined: dict[str, Any], source: str
) -> tuple[Network, ...]:
    found = []
    for network in used:
        if network.name not in defined and network.name != "default":
            raise SandboxConfigError(f"{source}: network {network.name!r} is not defined")
        definition = defined.get(network.name) or {}
        for key in definition:
            if key not in ("external", "internal", "name", "driver"):
                raise SandboxConfigError(
                    f"{source}: docker_pool cannot honour {key!r} of network {network.name!r}"
                )
        if definition.get("driver", "bridge") != "bridge":
            raise SandboxConfigError(
                f"{source}: docker_pool cannot honour driver {definition['driver']!r} of "
                f"network {network.name!r}"
            )
        found.append(
            Network(
                name=definition.get("name", network.name),
                external=bool(definition.get("external", False)),
                internal=bool(definition.get("internal", False)),
            )
        )
    return tuple(found)
