"""Compares a configuration with what ``docker compose config`` says of its file, key by key."""

from __future__ import annotations

import importlib.util
import json
import os
import re
import subprocess
from pathlib import Path
from typing import Any

import yaml

from inspect_docker_pool.compose import parse_config
from inspect_docker_pool.config import ContainerConfig, Limits, ProjectConfig, parse_size
from inspect_docker_pool.errors import SandboxConfigError
from inspect_docker_pool.service import WITHOUT_EFFECT

PAGE = Path(__file__).parents[2] / "docs" / "compose-files.md"

EVALS_VERSION = "0.26.0"
"""The release of ``inspect_evals`` that the page's table is of."""


def evals_files() -> dict[str, Path]:
    """Find the compose files of the installed ``inspect_evals``, by their paths in it."""
    spec = importlib.util.find_spec("inspect_evals")
    if spec is None or not spec.submodule_search_locations:
        return {}
    root = Path(spec.submodule_search_locations[0])
    found = (path for end in ("yaml", "yml") for path in root.rglob(f"*compose*.{end}"))
    return {path.relative_to(root).as_posix(): path for path in sorted(found)}


def variables_of(path: Path) -> dict[str, str]:
    """Make up values for the metadata of samples that a file names."""
    names = set(re.findall(r"SAMPLE_METADATA_\w+", path.read_text()))
    return {name: f"{name.lower()}:1" for name in names}


def refusal(path: Path) -> str | None:
    """Return why a file is refused; ``None`` if it is accepted and read as compose reads it."""
    variables = variables_of(path)
    try:
        config = parse_config(str(path), variables)
    except SandboxConfigError as ex:
        text = str(ex).replace(f"{path}: ", "", 1)
        text = re.sub(r"; remove it or .*| \(without the plugin .*|: invalid compose.*", "", text)
        text = re.sub(r"/\S+/(?=[\w.-]+)", "", text)  # the folders of this machine
        return re.sub(r'service "\S+" refers', "a service refers", text)  # now this one, now that
    said = composed(path, variables)
    read = {service.service: described(service) for service in config.services}
    assert read == {name: expected(said, name, path, config) for name in said["services"]}
    return None


def composed(path: Path, variables: dict[str, str]) -> dict[str, Any]:
    """Ask compose itself."""
    command = ["docker", "compose", "--file", str(path), "config", "--format", "json"]
    environment = {**os.environ, **variables}
    done = subprocess.run(command, env=environment, capture_output=True, text=True, check=True)
    answer: dict[str, Any] = json.loads(done.stdout.replace("$$", "$"))
    return answer


def described(config: ContainerConfig) -> dict[str, Any]:
    """Describe a container as compose describes its service, without what is not set."""
    build, limits, check = config.build, config.limits, config.healthcheck
    service: dict[str, Any] = {
        "image": config.image,
        "build": build and {"context": build.context, "dockerfile": build.dockerfile,
                            "args": dict(build.args), "target": build.target},
        "command": _list(config.command),
        "entrypoint": _list(config.entrypoint),
        "environment": dict(config.environment),
        "working_dir": config.working_dir,
        "user": config.user,
        "hostname": config.hostname,
        "platform": config.platform,
        "runtime": config.runtime,
        "volumes": [(m.kind, m.source, m.target, m.read_only, m.own) for m in config.mounts],
        "tmpfs": [f"{path}:{options}".rstrip(":") for path, options in config.tmpfs],
        "networks": {n.name: (n.internal, n.external, n.aliases) for n in config.networks},
        "network_mode": config.hardening.network,
        "ports": list(config.ports),
        "extra_hosts": list(config.extra_hosts),
        "healthcheck": check and (check.test, check.interval, check.timeout, check.start_period,
                                  check.retries),
        "depends_on": dict(config.depends_on),
        "cpus": limits.cpus,
        "mem_limit": limits.memory,
        "pids_limit": limits.pids,
        "shm_size": limits.shm,
        "ulimits": {name: (soft, hard) for name, soft, hard in limits.ulimits},
        "cap_add": list(config.hardening.cap_add),
        "security_opt": [] if config.hardening.seccomp else ["seccomp:unconfined"],
        "read_only": config.hardening.read_only,
    }  # fmt: skip
    return {key: value for key, value in service.items() if value}


def expected(said: dict[str, Any], name: str, path: Path, project: ProjectConfig) -> dict[str, Any]:
    """Bring a service of compose's answer into the same form, with the pool's own defaults."""
    service = {**said["services"][name]}
    deployed = ((service.get("deploy") or {}).get("resources") or {}).get("limits") or {}
    default = Limits()
    written = yaml.safe_load(path.read_text())
    named = (written["services"].get(name) or {}).get("networks") or "include" in written
    networks = service.get("networks") or {}
    if not named and networks:
        alone = len(project.services) == 1
        networks = {} if alone else {"default": {"internal": True}}
    elif networks:
        networks = {key: {**(options or {}), **said["networks"][key]}
                    for key, options in networks.items()}  # fmt: skip
    volumes = said.get("volumes") or {}
    check = service.get("healthcheck")
    build = service.get("build")
    whole = {
        **{key: service.get(key) for key in
           ("image", "command", "entrypoint", "working_dir", "user", "hostname", "platform",
            "runtime", "cap_add", "read_only", "tmpfs")},
        "environment": service.get("environment") or {},
        "build": build and {"context": build["context"], "dockerfile": build["dockerfile"],
                            "args": build.get("args") or {}, "target": build.get("target")},
        "volumes": [
            (v["type"], v["source"], v["target"], v.get("read_only", False),
             v["type"] == "volume" and not volumes[v["source"]].get("external", False))
            for v in service.get("volumes") or []
        ],
        "networks": {
            key: (bool(net.get("internal")), bool(net.get("external")),
                  tuple(net.get("aliases") or ()))
            for key, net in networks.items()
        },
        "network_mode": service.get("network_mode") or ("" if networks else "none"),
        "ports": [f"{port['target']}/{port['protocol']}" for port in service.get("ports") or []],
        "extra_hosts": [host.replace("=", ":") for host in service.get("extra_hosts") or []],
        "healthcheck": check and (
            tuple(check["test"]), _seconds(check.get("interval", "30s")),
            _seconds(check.get("timeout", "30s")), _seconds(check.get("start_period", "0s")),
            check.get("retries", 3)),
        "depends_on": {k: v["condition"] for k, v in (service.get("depends_on") or {}).items()},
        "cpus": float(service.get("cpus") or deployed.get("cpus") or default.cpus or 0),
        "mem_limit": parse_size(
            service.get("mem_limit") or deployed.get("memory") or default.memory),
        "pids_limit": int(service.get("pids_limit") or default.pids or 0),
        "shm_size": int(service.get("shm_size") or 0),
        "ulimits": {key: _pair(each) for key, each in (service.get("ulimits") or {}).items()},
        "security_opt": [o.replace("=", ":") for o in service.get("security_opt") or []],
    }  # fmt: skip
    known = whole.keys() | {"deploy", "init", "pull_policy"} | WITHOUT_EFFECT
    assert service.keys() <= known, "a key that is not compared"
    return {key: value for key, value in whole.items() if value}


def _list(words: tuple[str, ...] | None) -> list[str] | None:
    return None if words is None else list(words)


def _pair(limit: Any) -> tuple[int, int]:
    if isinstance(limit, dict):  # compose leaves out zeros
        return limit.get("soft", 0), limit.get("hard", 0)
    return limit, limit


def _seconds(duration: str) -> float:
    minutes, _, seconds = duration.rpartition("m")
    return 60 * float(minutes or 0) + float(seconds.rstrip("s") or 0)


def table(files: dict[str, Path]) -> str:
    """Write a line for each evaluation: its files, their services, and which are refused why."""
    rows: dict[str, list[tuple[str, int, str | None]]] = {}
    for name, path in files.items():
        services = len(yaml.safe_load(path.read_text())["services"])
        rows.setdefault(name.partition("/")[0], []).append((name, services, refusal(path)))
    every = [row for found in rows.values() for row in found]
    accepted = sum(why is None for _, _, why in every)
    lines = [
        f"**{accepted} of {len(every)} files are accepted.**\n",
        "| evaluation | files | services | accepted | refused |",
        "| --- | --- | --- | --- | --- |",
    ]
    for evaluation, found in sorted(rows.items()):
        counts = sorted({services for _, services, _ in found})
        several = f"–{counts[-1]}" if len(counts) > 1 else ""
        refused = [
            f"`{name.partition('/')[2]}`: {why}" for name, _, why in found if why is not None
        ]
        cells = [evaluation, f"{len(found)}", f"{counts[0]}{several}"]
        cells += [f"{len(found) - len(refused)}", "<br>".join(refused)]
        lines.append(f"| {' | '.join(cells)} |")
    return "\n".join(lines) + "\n"
