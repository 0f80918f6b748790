"""Owners of containers, and the removal of what dead owners left.

Every container, network and volume carries its owner's labels. On the owner's own host the
process itself is the proof of life: its id, start time, boot and pid namespace are in the labels.
On other hosts an owner whose containers have all ended, as they do with it, counts as dead.

A process that is ended by a signal or a crash cannot remove its containers. So a tiny shell waits
beside it; when its pipe closes without a message, it becomes this module and removes what is left.
"""

from __future__ import annotations

import math
import os
import subprocess
import sys
import time
import uuid
from collections import defaultdict
from dataclasses import dataclass
from datetime import datetime
from pathlib import Path
from typing import TYPE_CHECKING

from inspect_docker_pool.engine import Engine, engine_errors, quietly
from inspect_docker_pool.errors import SandboxError

if TYPE_CHECKING:
    from docker import APIClient

PREFIX = "inspect-tinker-plugin."
KIND, OWNER, HOST = PREFIX + "sandbox", PREFIX + "owner", PREFIX + "host"
PID, STARTED = PREFIX + "pid", PREFIX + "started"
PROJECT = PREFIX + "project"
"""Label of what belongs to one episode, beside the owner's."""
PROVIDER = "docker_pool"

REMAINS_SECONDS = 3600.0
"""Age from which what an owner on another host has made, and does not run, is taken for remains."""

SNAPSHOTS_REPOSITORY = "inspect-pool/snapshot"
"""Name of the images of containers that were set up; their tags start with the owner."""

_ATTEMPTS = 10
_PAUSE_SECONDS = 0.3

KEPT = "-kept"
"""Suffix of the name of a container that its owner left on purpose."""


@dataclass(frozen=True)
class Lease:
    """The claim of one process to its containers, as their labels state it."""

    id: str
    host: str
    """Boot and pid namespace: equal for processes that can see each other."""
    pid: int
    started: str
    """Start of the process, in clock ticks since boot."""

    @classmethod
    def current(cls) -> Lease:
        """Describe this process under a new id."""
        pid = os.getpid()
        return cls(uuid.uuid4().hex[:12], _this_host(), pid, _start_of(pid) or "")

    @classmethod
    def from_labels(cls, labels: dict[str, str]) -> Lease:
        pid = labels.get(PID, "")
        return cls(
            labels.get(OWNER, ""),
            labels.get(HOST, ""),
            int(pid) if pid.isdigit() else 0,
            labels.get(STARTED, ""),
        )

    def labels(self) -> dict[str, str]:
        return {
            KIND: PROVIDER,
            OWNER: self.id,
            HOST: self.host,
            PID: str(self.pid),
            STARTED: self.started,
        }

    def lives(self, sign: float) -> bool:
        """Return whether the process runs, for all that this host can know.

        Args:
            sign: when it last made something; infinite if something of it runs.
        """
        here = self.lives_here()
        return sign > time.time() - REMAINS_SECONDS if here is None else here

    def lives_here(self) -> bool | None:
        """Return whether the process runs; ``None`` when this host cannot see it."""
        if not self.host or self.host != _this_host():
            return None
        return bool(self.started) and _start_of(self.pid) == self.started


def reap(engine: Engine, *, spare: str = "") -> int:
    """Remove what dead owners left behind, but nothing of one of them.

    Returns:
        How many containers were removed.
    """
    dead = [
        owner.id
        for owner, sign in _signs_of_life(engine.api).items()
        if owner.id != spare and not owner.lives(sign)
    ]
    return sum(remove_owned(engine, owner, keep_kept=True) for owner in dead)


def remove_owned(engine: Engine, owner: str, *, keep_kept: bool = False) -> int:
    """Remove everything of an owner; return how many containers."""
    removed = _remove_labelled(engine, f"{OWNER}={owner}", keep_kept=keep_kept)
    _remove_snapshots(engine, owner)
    return removed


def _remove_labelled(engine: Engine, label: str, *, keep_kept: bool = False) -> int:
    api = engine.api
    filters = {"label": label}
    removed = 0
    for _ in range(_ATTEMPTS):
        containers = [
            container["Id"]
            for container in api.containers(all=True, filters=filters)
            if not (keep_kept and any(name.endswith(KEPT) for name in container["Names"] or []))
        ]
        if all([quietly(api.remove_container, id, force=True, v=True) for id in containers]):
            removed += len(containers)
            break
        time.sleep(_PAUSE_SECONDS)  # another process is removing one, too
    for network in api.networks(filters=filters):
        quietly(api.remove_network, network["Id"])
    for volume in api.volumes(filters=filters)["Volumes"] or []:
        quietly(api.remove_volume, volume["Name"], force=True)
    return removed


def _remove_snapshots(engine: Engine, owner: str) -> None:
    """Remove the images of an owner's containers that were set up; one may still be needed."""
    for image in engine.api.images(name=SNAPSHOTS_REPOSITORY):
        for name in image["RepoTags"] or []:
            if name.partition(":")[2].startswith(f"{owner}-"):
                quietly(engine.api.remove_image, name)


def _signs_of_life(api: APIClient) -> dict[Lease, float]:
    """List the owners of all that is on the engine, and when each last made something.

    That is always now for an owner with a container that runs.
    """
    filters = {"label": f"{KIND}={PROVIDER}"}
    things = [
        *api.containers(all=True, filters=filters),
        *api.networks(filters=filters),
        *(api.volumes(filters=filters)["Volumes"] or []),
        *api.images(name=SNAPSHOTS_REPOSITORY),
    ]
    signs: dict[Lease, float] = defaultdict(float)
    for thing in things:
        made = thing.get("Created") or thing["CreatedAt"]
        if isinstance(made, str):
            made = datetime.fromisoformat(made).timestamp()
        owner = Lease.from_labels(thing["Labels"] or {})
        runs = thing.get("State") in ("running", "paused")
        signs[owner] = max(signs[owner], math.inf if runs else made)
    return signs


def _this_host() -> str:
    try:
        boot = Path("/proc/sys/kernel/random/boot_id").read_text().strip()
        return f"{boot}/{os.readlink('/proc/self/ns/pid')}"
    except OSError:
        return ""


def _start_of(pid: int) -> str | None:
    try:
        stat = Path(f"/proc/{pid}/stat").read_text()
    except OSError:
        return None
    fields = stat[stat.rindex(")") + 2 :].split()
    # A zombie has ended, even if its parent has not noticed yet.
    return None if fields[0] in "ZX" else fields[19]


def cleanup(engine: Engine, id: str | None) -> int:
    """Remove containers, in this thread.

    Args:
        engine: the engine to look at.
        id: a container's id (or its start) or name, which removes its whole project, or the id of
            an owner, whose containers are all removed even while it lives; ``None`` takes those
            of dead owners.

    Returns:
        How many containers were removed.
    """
    with engine_errors("cleanup"):
        if id is None:
            return reap(engine)
        filters = {"label": f"{KIND}={PROVIDER}"}
        for container in engine.api.containers(all=True, filters=filters):
            names = [name.lstrip("/") for name in container["Names"] or []]
            labels = container["Labels"] or {}
            if id in names or container["Id"].startswith(id):
                return _remove_labelled(engine, f"{PROJECT}={labels.get(PROJECT)}")
            if labels.get(OWNER) == id:
                return remove_owned(engine, id)
    return 0


_WAIT = 'trap "" TERM HUP; read -r _ || exec "$0" -m inspect_docker_pool.lease "$@"'

_PASSES = 30

_WATCH_PAUSE_SECONDS = 1.0


class Watch:
    """The shell beside this process."""

    def __init__(self, owner: Lease) -> None:
        labels = [owner.id, owner.host, str(owner.pid), owner.started]
        self._shell = subprocess.Popen(
            ["/bin/sh", "-c", _WAIT, sys.executable, *labels],
            stdin=subprocess.PIPE,
            stdout=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL,
            cwd="/",
            start_new_session=True,  # a signal to the process's group must not end the watch
        )
        # A forked child would keep the pipe open beyond the end of this process.
        os.register_at_fork(after_in_child=self._let_go)

    def stop(self) -> None:
        """Tell the shell that nothing is left to do."""
        assert self._shell.stdin is not None
        try:
            self._shell.stdin.write(b"\n")
            self._shell.stdin.close()
        except OSError:  # it was ended
            pass
        self._shell.wait()

    def _let_go(self) -> None:
        if self._shell.returncode is None and self._shell.stdin is not None:
            self._shell.stdin.close()
            self._shell.returncode = 0  # of the parent's child, not of this process's


def _remove_after(owner: Lease) -> None:
    """Remove what an owner left, once its process has ended."""
    engine = Engine(timeout=30)
    empty = 0
    for _ in range(_PASSES):
        if owner.lives_here() is not False:
            return
        try:
            # Require two empty results: the engine may still have been starting a container.
            empty = empty + 1 if remove_owned(engine, owner.id, keep_kept=True) == 0 else 0
        except (SandboxError, OSError):
            empty = 0
        if empty == 2:
            return
        time.sleep(_WATCH_PAUSE_SECONDS)


if __name__ == "__main__":
    _id, _host, _pid, _started = sys.argv[1:]
    time.sleep(0.1)  # the kernel closes files before it removes the process
    _remove_after(Lease(_id, _host, int(_pid), _started))
