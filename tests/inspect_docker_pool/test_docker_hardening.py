"""Each barrier of the default hardening: a break-out fails, and the task can remove it."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import pytest

from inspect_docker_pool.environment import DockerPoolSandboxEnvironment

pytestmark = pytest.mark.docker

_CONNECT = (
    "import socket; s = socket.socket(); s.settimeout(3)\n"
    "try: s.connect(('{host}', {port})); print('connected')\n"
    "except OSError as ex: print('refused', ex)"
)


async def _status(sandbox: DockerPoolSandboxEnvironment, field: str) -> str:
    text = (await sandbox.exec(["cat", "/proc/self/status"])).stdout
    match = re.search(rf"^{field}:\s+(\S+)", text, re.MULTILINE)
    assert match is not None
    return match[1]


async def test_there_is_no_network(sandbox: DockerPoolSandboxEnvironment) -> None:
    interfaces = (await sandbox.exec(["ls", "/sys/class/net"])).stdout.split()
    assert interfaces == ["lo"]
    program = _CONNECT.format(host="172.17.0.1", port=22)
    assert "refused" in (await sandbox.exec(["python3", "-c", program])).stdout


async def test_a_network_can_be_asked_for(open_sandbox: Any) -> None:
    sandbox = await open_sandbox(network="bridge")
    assert "eth0" in (await sandbox.exec(["ls", "/sys/class/net"])).stdout


async def test_root_has_no_capability(sandbox: DockerPoolSandboxEnvironment) -> None:
    for field in ("CapEff", "CapPrm", "CapBnd", "CapAmb"):
        assert int(await _status(sandbox, field), 16) == 0
    for attempt in (
        ["mount", "-t", "tmpfs", "none", "/mnt"],
        ["chown", "nobody", "/etc/passwd"],
        ["mknod", "/tmp/disk", "b", "8", "0"],
        ["chroot", "/", "true"],
        ["su", "nobody", "-s", "/bin/sh", "-c", "true"],
        ["dmesg"],
        ["hostname", "other"],
        ["unshare", "--mount", "true"],
        ["unshare", "--user", "--map-root-user", "true"],
        ["sh", "-c", "echo 1 > /proc/sys/kernel/panic"],
        ["sh", "-c", "echo c > /proc/sysrq-trigger"],
    ):
        assert not (await sandbox.exec(attempt)).success, attempt


async def test_capabilities_can_be_given_back(open_sandbox: Any) -> None:
    sandbox = await open_sandbox(cap_add=["CHOWN"])
    assert (await sandbox.exec(["chown", "nobody", "/etc/passwd"])).success
    relaxed = await open_sandbox(cap_drop=[])
    assert (await relaxed.exec(["su", "nobody", "-s", "/bin/sh", "-c", "true"])).success


async def test_no_program_raises_privileges(
    sandbox: DockerPoolSandboxEnvironment, open_sandbox: Any
) -> None:
    assert await _status(sandbox, "NoNewPrivs") == "1"
    setuid = ["sh", "-c", "cp /usr/bin/id /tmp/id && chmod 4755 /tmp/id"]
    assert (await sandbox.exec(setuid)).success
    assert "euid" not in (await sandbox.exec(["/tmp/id"], user="nobody")).stdout
    relaxed = await open_sandbox(no_new_privileges=False)
    assert await _status(relaxed, "NoNewPrivs") == "0"
    assert (await relaxed.exec(setuid)).success
    assert "euid=0" in (await relaxed.exec(["/tmp/id"], user="nobody")).stdout


_FORKS = (
    "import os, time\nn = 0\n"
    "try:\n  while n < 700:\n    if os.fork() == 0: time.sleep(5); os._exit(0)\n    n += 1\n"
    "except OSError: pass\nprint(n)"
)


async def test_processes_are_limited(open_sandbox: Any) -> None:
    limited = await open_sandbox()
    assert int((await limited.exec(["python3", "-c", _FORKS])).stdout) < 512
    small = await open_sandbox(pids=20)
    assert int((await small.exec(["python3", "-c", _FORKS])).stdout) < 20
    free = await open_sandbox(pids=-1)
    assert int((await free.exec(["python3", "-c", _FORKS])).stdout) == 700


async def test_memory_is_limited_and_there_is_no_swap(open_sandbox: Any) -> None:
    limited = await open_sandbox(memory="100m")
    big = ["python3", "-c", "x = bytearray(300 * 2**20); print('fits')"]
    assert (await limited.exec(big)).returncode == 137
    assert (await limited.exec(["echo", "on"])).stdout == "on\n"
    shared = ["sh", "-c", "head -c 300000000 /dev/zero > /dev/shm/x"]
    assert not (await limited.exec(shared)).success
    default = await open_sandbox()
    assert (await default.exec(big)).stdout == "fits\n"


async def test_the_processor_is_limited(open_sandbox: Any) -> None:
    # Of cgroups 2 or 1: microseconds of processor time in each tenth of a second.
    quota = "cat /sys/fs/cgroup/cpu.max || cat /sys/fs/cgroup/cpu/cpu.cfs_quota_us"
    limited = await (await open_sandbox()).exec(["sh", "-c", quota])
    assert limited.stdout.split()[0] == "100000"
    free = await (await open_sandbox(cpus=0)).exec(["sh", "-c", quota])
    assert free.stdout.split()[0] in ("max", "-1")


async def test_a_file_cannot_outgrow_the_disk_limit(open_sandbox: Any) -> None:
    limited = await open_sandbox(disk="10m")
    result = await limited.exec(["sh", "-c", "head -c 20000000 /dev/zero > /root/big"])
    assert not result.success
    size = (await limited.exec(["stat", "-c", "%s", "/root/big"])).stdout
    assert int(size) <= 10 * 1024**2


async def test_nothing_of_the_host_is_mounted(sandbox: DockerPoolSandboxEnvironment) -> None:
    mounts = (await sandbox.exec(["cat", "/proc/self/mountinfo"])).stdout.splitlines()
    bound = [line.split()[4] for line in mounts if " - ext4 " in line or " - xfs " in line]
    assert set(bound) <= {"/etc/hosts", "/etc/hostname", "/etc/resolv.conf"}
    found = await sandbox.exec(["sh", "-c", "find / -name 'docker*.sock' 2>/dev/null"])
    assert found.stdout == ""


async def test_the_root_file_system_and_mounts_can_be_read_only(
    open_sandbox: Any, tmp_path: Path
) -> None:
    (tmp_path / "data").write_text("shared")
    options = {"volumes": [f"{tmp_path}:/data:ro"], "tmpfs": ["/tmp:size=1m"]}
    sandbox = await open_sandbox(read_only=True, **options)
    assert await sandbox.read_file("/data/data") == "shared"
    for path in ("/data/data", "/root/file"):
        with pytest.raises(PermissionError):
            await sandbox.write_file(path, "changed")
    assert not (await sandbox.exec(["mount", "-o", "remount,rw", "/data"])).success
    assert (tmp_path / "data").read_text() == "shared"
    await sandbox.write_file("/tmp/file", "text")
    assert await sandbox.read_file("/tmp/file") == "text"
