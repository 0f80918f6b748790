"""Stops containers that hold more disk than their limit, where the engine cannot limit them.

What counts: the container's own layer; 4 KiB for each of its files and folders, as empty ones
take space, too; the three files in ``/etc`` that the engine mounts; and, if the engine
runs on this host and this process has the rights (root), files that were removed and are still
open. A container is stopped seconds after it writes too much, not before: ``docs/sandboxes.md``.
"""

from __future__ import annotations

import os
import stat
import time
from collections import defaultdict
from collections.abc import Callable, Iterator
from contextlib import suppress
from pathlib import Path

from inspect_docker_pool.container import Container
from inspect_docker_pool.engine import Engine
from inspect_docker_pool.errors import SandboxError
from inspect_docker_pool.lease import Lease

_ENTRY_BYTES = 4096
_QUICK_SECONDS = 0.02
"""If the engine sums up a layer in this time, the layer has too few entries for them to matter."""
_ATTEMPTS = 3
"""How often the engine may fail to sum up a layer that changes in the meantime."""
_PAUSE_FACTOR = 10
_LONGEST_PAUSE = 30.0
"""A container whose layer takes long to sum up is measured less often."""
_MOUNTED = ("/etc/hosts", "/etc/hostname", "/etc/resolv.conf")


class DiskGuard:
    """Measures the containers in use, in its own thread."""

    def __init__(self, engine: Engine, owner: Lease, in_use: Callable[[], list[Container]]) -> None:
        self._engine = engine
        self._owner = owner
        self._in_use = in_use
        self._due: dict[str, float] = {}

    def look(self) -> None:
        """Measure every container that is due once, and stop those over their limit."""
        watched = [c for c in self._in_use() if c.config.limits.disk is not None]
        self._due = {c.id: self._due.get(c.id, 0.0) for c in watched}
        if not watched:
            return
        if self._engine.storage_quota(watched[0].image.id, self._owner.labels()):
            return
        processes = _processes()
        for container in watched:
            begun = time.monotonic()
            if begun < self._due[container.id]:
                continue
            limit = container.config.limits.disk or 0
            try:
                over = self._over(container, limit, processes)
            except SandboxError:
                continue  # it or the engine is gone: its own callers get the error
            if over:
                container.kill(f"its disk limit of {limit} bytes was exceeded {over}")
            now = time.monotonic()
            self._due[container.id] = now + min(_PAUSE_FACTOR * (now - begun), _LONGEST_PAUSE)

    def _over(self, container: Container, limit: int, processes: dict[str, list[int]]) -> str:
        for _ in range(_ATTEMPTS):
            begun = time.monotonic()
            facts = container.get("json", size=True).json()
            slow = time.monotonic() - begun > _QUICK_SECONDS
            layer = int(facts.get("SizeRw") or 0)
            if layer >= 0:
                break
        else:  # the engine reads no paths that are longer than the kernel's limit
            return "by folders nested too deeply to be measured"
        if layer > limit:
            return "by what its layer holds"
        if slow:
            layer += _ENTRY_BYTES * self._entries(container, 1 + (limit - layer) // _ENTRY_BYTES)
            if layer > limit:
                return "by the number of its files"
        layer += sum(self._size(container, path) for path in _MOUNTED)
        if layer > limit:
            return f"by what {', '.join(_MOUNTED)} hold"
        layer += _sum_removed_files(int(facts["State"]["Pid"] or 0), processes)
        return "by removed files that are still open" if layer > limit else ""

    def _entries(self, container: Container, most: int) -> int:
        """Count the entries of the layer, up to a maximum."""
        count = 0
        with container.get("changes", stream=True) as response:
            tail = b""
            for piece in response.iter_content(64 * 1024):
                text = tail + piece
                count += text.count(b'"Path":')
                tail = text[-6:]
                if count > most:
                    break
        return count

    def _size(self, container: Container, path: str) -> int:
        import docker
        from docker.utils import decode_json_header

        api = self._engine.api
        url = f"{api.base_url}/v{api.api_version}/containers/{container.id}/archive"
        try:
            header = api.head(url, params={"path": path}).headers["X-Docker-Container-Path-Stat"]
            return int(decode_json_header(header)["size"])
        except (OSError, KeyError, docker.errors.DockerException):
            return 0  # no such file


def _processes() -> dict[str, list[int]]:
    """Group the processes that are visible on this host by their pid namespace."""
    found: dict[str, list[int]] = defaultdict(list)
    for entry in Path("/proc").iterdir() if Path("/proc/self").exists() else ():
        if entry.name.isdigit():
            try:
                found[os.readlink(entry / "ns/pid")].append(int(entry.name))
            except OSError:
                continue  # it ended, or belongs to another user
    return found


def _sum_removed_files(pid: int, processes: dict[str, list[int]]) -> int:
    """Sum up a container's removed files that are still open or mapped.

    Returns:
        Bytes; 0 if this process cannot see them.
    """
    root = Path(f"/proc/{pid}/root")
    try:
        group = processes.get(os.readlink(f"/proc/{pid}/ns/pid"), [])
        # An engine on another host numbers differently: the process found here is no container.
        if pid == 0 or group == processes.get(os.readlink("/proc/self/ns/pid")):
            return 0
        device = os.stat(root).st_dev
    except OSError:
        return 0
    sizes: dict[int, int] = {}
    for process in group:
        for facts in _open_files(process):
            # The content of a tmpfs or memfd is memory, and on another device.
            if stat.S_ISREG(facts.st_mode) and facts.st_nlink == 0 and facts.st_dev == device:
                sizes[facts.st_ino] = facts.st_blocks * 512
    return sum(sizes.values())


def _open_files(process: int) -> Iterator[os.stat_result]:
    # By thread: the first one may have ended, and another may have open files of its own.
    threads = _entries_of(f"/proc/{process}/task")
    mapped = next(
        filter(None, (_entries_of(f"/proc/{each.name}/map_files") for each in threads)), []
    )
    for link in (*mapped, *(link for each in threads for link in _entries_of(f"{each.path}/fd"))):
        with suppress(OSError):
            yield os.stat(link.path)


def _entries_of(folder: str) -> list[os.DirEntry[str]]:
    try:
        return list(os.scandir(folder))
    except OSError:
        return []
