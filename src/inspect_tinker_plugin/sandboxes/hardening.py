"""Translate limits and hardening into the arguments of the engine's container creation."""

from __future__ import annotations

from typing import Any

from inspect_tinker_plugin.sandboxes.config import ContainerConfig


def host_options(config: ContainerConfig, *, storage_quota: bool) -> dict[str, Any]:
    """Give the keyword arguments of the SDK's ``create_host_config``.

    Args:
        config: the container.
        storage_quota: whether the engine's storage driver can limit a container's layer.
            Where it cannot, a file cannot grow past the limit, and the pool stops a
            container whose layer does (see ``housekeeper.py``).
    """
    limits, hardening = config.limits, config.hardening
    options: dict[str, Any] = {
        "network_mode": hardening.network or None,
        "cap_drop": list(hardening.cap_drop) or None,
        "cap_add": list(hardening.cap_add) or None,
        "security_opt": _security_options(config),
        "read_only": hardening.read_only,
        # The engine keeps no log: the executor's own output is not one, and a policy
        # could fill the engine's disk with it.
        "log_config": {"Type": "none"},
        "tmpfs": dict(config.tmpfs) or None,
        "restart_policy": None,
        "ipc_mode": "private",
    }
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
    options["mounts"] = [
        {"Type": mount.kind, "Source": mount.source, "Target": mount.target, "ReadOnly": True}
        for mount in config.mounts
    ] or None
    return {name: value for name, value in options.items() if value is not None}


def _security_options(config: ContainerConfig) -> list[str] | None:
    options = []
    if config.hardening.no_new_privileges:
        options.append("no-new-privileges:true")
    if not config.hardening.seccomp:
        options.append("seccomp=unconfined")
    return options or None
