"""Translates limits and hardening into the arguments of the engine's container creation."""

from __future__ import annotations

from typing import Any

from inspect_tinker_plugin.docker_pool.config import ContainerConfig
from inspect_tinker_plugin.errors import SandboxConfigError

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

_ENGINE_DEFAULT = frozenset(
    [
        *("CHOWN", "DAC_OVERRIDE", "FSETID", "FOWNER", "MKNOD", "NET_RAW", "SETGID", "SETUID"),
        *("SETFCAP", "SETPCAP", "NET_BIND_SERVICE", "SYS_CHROOT", "KILL", "AUDIT_WRITE"),
    ]
)

EXECUTOR_CAPABILITIES = frozenset(["SETUID", "SETGID", "SETPCAP", "KILL", "IPC_LOCK"])
"""Capabilities that the executor itself needs, to start commands as their users and stop them.

None of them makes the engine's filter allow a system call that it would refuse otherwise."""

_REACHING = frozenset(["SYS_PTRACE", "SYS_ADMIN", "SYS_MODULE", "SYS_RAWIO", "BPF", "PERFMON"])


def command_capabilities(config: ContainerConfig) -> frozenset[str]:
    """Return the capabilities of commands that run as root.

    Raises:
        SandboxConfigError: a capability that the kernel does not have.
    """
    added, dropped = _names(config.hardening.cap_add), _names(config.hardening.cap_drop)
    everything = frozenset(_CAPABILITIES)
    if "ALL" in added:
        return everything - dropped
    for name in (added | dropped) - everything - {"ALL"}:
        raise SandboxConfigError(f"{config.source}: there is no capability {name!r}")
    return (frozenset() if "ALL" in dropped else _ENGINE_DEFAULT - dropped) | added


def capability_mask(names: frozenset[str]) -> int:
    """Return capabilities as the kernel's bit mask."""
    return sum(1 << _CAPABILITIES.index(name) for name in names)


def reaches_executor(names: frozenset[str]) -> bool:
    """Return whether commands with these capabilities could take the executor over."""
    return bool(names & _REACHING) or names >= EXECUTOR_CAPABILITIES


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
    elif config.hardening.seccomp_profile is not None:
        options.append(f"seccomp={config.hardening.seccomp_profile}")
    return options or None
