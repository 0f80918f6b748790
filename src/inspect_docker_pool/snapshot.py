"""Group fork: episodes with the same set-up start from a snapshot of the first one's container.

The first episode of a group (the leader) sets its container up as usual. The answers of its
sandbox are recorded on a tape, and the container is committed to a local image before
the solver runs. The others wait for it, start from that image and replay the tape, so that
their transcripts show the same set-up. If a snapshot would not be faithful, or would
not pay, each episode sets itself up.
"""

from __future__ import annotations

import contextlib
import copy
import functools
import json
import threading
import time
import uuid
from collections import OrderedDict, deque
from collections.abc import Awaitable, Callable, Coroutine
from concurrent.futures import Future
from dataclasses import dataclass, field, replace
from logging import getLogger
from typing import Any, Concatenate, ParamSpec, Protocol, TypeVar

import anyio

from inspect_docker_pool.command import How, RequestKind
from inspect_docker_pool.config import (
    ENGINE_CAPABILITIES,
    GIB,
    ProjectConfig,
    command_capabilities,
    is_keep_alive,
)
from inspect_docker_pool.container import Container
from inspect_docker_pool.context import FORKS, SNAPSHOTS, SampleSetup, measure
from inspect_docker_pool.engine import Engine, engine_errors, quietly, undo, wait_for_thread
from inspect_docker_pool.errors import SandboxError
from inspect_docker_pool.image import Image
from inspect_docker_pool.lease import SNAPSHOTS_REPOSITORY, Lease
from inspect_docker_pool.pool import Pool
from inspect_docker_pool.project import Project

logger = getLogger(__name__)

QUICK_SECONDS = 1.0
"""A shorter set-up is repeated: committing and starting from an image takes as long."""

SMALL_BYTES = 16 * 1024**2
"""Files without a script that are less than this are written again, for the same reason."""

SNAPSHOT_BYTES = 10 * GIB
"""Disk space for a process's snapshots; the least recently used one is removed first."""

_LEAST_BYTES = 32 * 1024**2
"""Minimum size that a snapshot counts with, so that there are not thousands."""

_LOOKS = 3
_SCAN_BYTES = 1024**2
_IN_MEMORY = ("/dev", "/dev/shm", "/dev/mqueue")

P = ParamSpec("P")
T = TypeVar("T")


class Tape:
    """The sandbox's answers during set-up: recorded by the leader, replayed for the others."""

    def __init__(self, recorded: tuple[tuple[str, object], ...] | None = None) -> None:
        self.recorded: list[tuple[str, object]] = []
        self._heard = deque(recorded or ())

    async def play(self, name: str, call: Callable[[], Awaitable[T]]) -> T:
        """Answer a call from the tape, or make it and record its answer.

        Raises:
            Exception: what the call raised, now or when it was recorded.
        """
        if self._heard:
            recorded, answer = self._heard.popleft()
            if recorded != name:
                raise SandboxError(f"set-up called {name}, where its first run called {recorded}")
            if isinstance(answer, Exception):
                raise copy.copy(answer)
            return copy.copy(answer)  # type: ignore[return-value]  # of the call by that name
        try:
            result = await call()
        except Exception as ex:
            self.recorded.append((name, ex))
            raise
        self.recorded.append((name, result))
        return result


class Taped(Protocol):
    """A sandbox whose calls may be on tape."""

    tape: Tape | None


S = TypeVar("S", bound=Taped)


def record_on_tape(
    method: Callable[Concatenate[S, P], Coroutine[Any, Any, T]],
) -> Callable[Concatenate[S, P], Coroutine[Any, Any, T]]:
    """Let a method of a sandbox be recorded and answered from tape, while it has one."""

    @functools.wraps(method)
    async def call(self: S, /, *args: P.args, **kwargs: P.kwargs) -> T:
        if self.tape is None:
            return await method(self, *args, **kwargs)
        return await self.tape.play(method.__name__, lambda: method(self, *args, **kwargs))

    return call


@dataclass(eq=False)
class Snapshot:
    """An image of a container that was set up."""

    name: str
    image: Image
    pool: Pool
    bytes: int
    recorded: tuple[tuple[str, object], ...]


@dataclass(eq=False)
class _Fork:
    """One set-up that several episodes want."""

    key: str
    result: Future[Snapshot | None] = field(default_factory=Future)
    waiting: int = 0

    def __post_init__(self) -> None:
        self.result.set_running_or_notify_cancel()  # one waiter that gives up must not end it

    @property
    def snapshot(self) -> Snapshot | None:
        """The snapshot, if it was taken."""
        return self.result.result() if self.result.done() else None

    def end(self, snapshot: Snapshot | None) -> None:
        if not self.result.done():
            self.result.set_result(snapshot)


class ForkMember:
    """One episode's part in a set-up."""

    def __init__(
        self, snapshots: Snapshots, setup: SampleSetup, pool: Pool, project: Project
    ) -> None:
        self.pool = pool
        self.project = project
        self.sandbox: Taped | None = None
        self.fork: _Fork | None = None
        """For a leader."""
        self.heard: _Fork | None = None
        """The fork from whose snapshot the project came."""
        self.before = ""
        self.tape: Tape | None = None
        self._snapshots = snapshots
        self._setup = setup
        self._begun = time.monotonic()

    async def finish(self) -> None:
        """Take the snapshot, if this is the leader; the tape ends."""
        seconds = time.monotonic() - self._begun
        if self.sandbox is not None:
            self.sandbox.tape = None
        if self.heard is None:
            self._snapshots.took(self._setup, self.project.config, seconds)
        if self.fork is None:
            return
        try:
            snapshot = await self._snapshots.take(self, seconds)
        except BaseException as ex:
            undo(ex, functools.partial(self._snapshots.end, self.fork, None))
            raise
        self._snapshots.end(self.fork, snapshot)

    def fail(self) -> None:
        """Make the others set themselves up."""
        if self.sandbox is not None:
            self.sandbox.tape = None
        if self.fork is not None:
            self._snapshots.end(self.fork, None)
        if self.heard is not None:
            self._snapshots.drop(self.heard)


Acquire = Callable[[ProjectConfig], Awaitable[tuple[Pool, Project]]]
Known = Callable[[ProjectConfig], Pool | None]


class Snapshots:
    """The snapshots of one process on one engine. Thread-safe.

    Args:
        engine: the engine.
        owner: the owner of the snapshots; they are removed with its containers.
        acquire: waits for a container that nobody has set up.
        known: returns the current pool of a configuration; a new image means a new pool.
    """

    def __init__(self, engine: Engine, owner: Lease, acquire: Acquire, known: Known) -> None:
        self._engine = engine
        self._owner = owner
        self._acquire = acquire
        self._known = known
        self._lock = threading.Lock()
        self._forks: OrderedDict[str, _Fork] = OrderedDict()
        self._dropped: set[Snapshot] = set()
        """Those that no episode starts from any more; one runs from each, so far."""
        self._closed = False
        self._unfaithful: set[str] = set()
        self._seconds: dict[ProjectConfig, float] = {}
        """The last set-up's time by configuration: a task's samples are alike."""

    async def join(self, config: ProjectConfig, setup: SampleSetup) -> ForkMember:
        """Return a container for an episode, from a snapshot if there is or will soon be one."""
        fork, leads = self._fork_of(config, setup)
        if fork is None:
            return ForkMember(self, setup, *await self._acquire(config))
        if leads:
            return await self._lead(fork, config, setup)
        snapshot = await self._wait(fork)
        if snapshot is not None and snapshot.pool is not self._known(config):
            self.drop(fork)  # the image was built again in the meantime
        elif snapshot is not None:
            try:
                project = await snapshot.pool.acquire(snapshot.image)
            except SandboxError as ex:
                logger.info("docker_pool: a snapshot could not be used: %s", ex)
                self.drop(fork)
            else:
                measure(FORKS)
                part = ForkMember(self, setup, snapshot.pool, project)
                part.tape, part.heard = Tape(snapshot.recorded), fork
                return part
        return ForkMember(self, setup, *await self._acquire(config))

    async def _lead(self, fork: _Fork, config: ProjectConfig, setup: SampleSetup) -> ForkMember:
        try:
            pool, project = await self._acquire(config)
        except BaseException as ex:
            undo(ex, functools.partial(self.end, fork, None))
            raise
        part, container = ForkMember(self, setup, pool, project), project.default
        try:
            if container.image.entrypoint or not is_keep_alive(container.command):
                raise _Unfaithful("a process of its own has state beside the container's files")
            if command_capabilities(config.default) - ENGINE_CAPABILITIES:
                raise _Unfaithful("its capabilities can change what no image holds")
            part.before = await self._state(container)
        except (_Unfaithful, SandboxError) as ex:
            self._refuse(fork.key, config, str(ex))
            self.end(fork, None)
            return part
        except BaseException as ex:
            undo(ex, functools.partial(self.end, fork, None))
            undo(ex, functools.partial(pool.release, project))
            raise
        part.fork, part.tape = fork, Tape()
        return part

    async def _wait(self, fork: _Fork) -> Snapshot | None:
        with self._lock:
            fork.waiting += 1

        def leave() -> None:
            with self._lock:
                fork.waiting -= 1

        try:
            snapshot = await wait_for_thread(fork.result)
        except BaseException as ex:
            undo(ex, leave)
            raise
        leave()
        return snapshot

    def took(self, setup: SampleSetup, config: ProjectConfig, seconds: float) -> None:
        """Record how long a set-up took."""
        with self._lock:
            if setup.files or setup.setup:
                self._seconds[config] = seconds

    def end(self, fork: _Fork, snapshot: Snapshot | None) -> None:
        """Tell waiting episodes how a fork ended."""
        if snapshot is None:
            with self._lock:
                if self._forks.get(fork.key) is fork:
                    del self._forks[fork.key]
        fork.end(snapshot)

    async def take(self, part: ForkMember, seconds: float) -> Snapshot | None:
        """Commit the leader's container, if that is faithful and somebody will want it."""
        fork, config, container = part.fork, part.project.config, part.project.default
        assert fork is not None
        with self._lock:
            wanted = fork.waiting > 0
        if config.snapshot != "always" and (seconds < QUICK_SECONDS or not wanted):
            return None
        try:
            for attempt in range(_LOOKS):
                if await self._state(container) == part.before:
                    break
                await anyio.sleep(0.1 * 2**attempt)  # ending processes may need a moment
            else:
                raise _Unfaithful("set-up left processes, or state outside of the layer")
            if lost := await self._scan(container):
                raise _Unfaithful(f"an image does not hold {lost.splitlines()[0]}")
            snapshot = await self._commit(part)
        except _Unfaithful as ex:
            self._refuse(fork.key, config, str(ex))
        except SandboxError as ex:
            self._refuse(fork.key, config, f"the engine could not take it: {ex}")
        else:
            measure(SNAPSHOTS)
            return snapshot
        return None

    async def _commit(self, part: ForkMember) -> Snapshot:
        commit = self._engine.submit(self._make, part)
        try:
            return await wait_for_thread(commit)
        except BaseException as ex:
            undo(ex, functools.partial(commit.add_done_callback, self._discard_made))
            raise

    def _discard_made(self, commit: Future[Snapshot]) -> None:
        if commit.exception() is None:
            self._discard(commit.result())

    def _refuse(self, key: str, config: ProjectConfig, reason: str) -> None:
        logger.info("docker_pool: no snapshot of %s: %s", config.source, reason)
        with self._lock:
            self._unfaithful.add(key)

    def _fork_of(self, config: ProjectConfig, setup: SampleSetup) -> tuple[_Fork | None, bool]:
        """Find or open the fork of a set-up; return also whether the caller leads it."""
        if not _may_share(config) or not (setup.files or setup.setup):
            return None, False
        key = f"{config.digest}-{setup.digest[:24]}"
        with self._lock:
            fork = self._forks.get(key)
            if fork is not None:
                self._forks.move_to_end(key)
                return fork, False
            if key in self._unfaithful or not self._pays(config, setup):
                return None, False
            fork = self._forks[key] = _Fork(key)
            return fork, True

    def expects(self, config: ProjectConfig, *, script: bool, files: bool) -> bool:
        """Return whether groups with such a set-up are likely to share it."""
        if not _may_share(config) or not (script or files):
            return False
        if config.snapshot == "always":
            return True
        return script and self._seconds.get(config, QUICK_SECONDS) >= QUICK_SECONDS

    def _pays(self, config: ProjectConfig, setup: SampleSetup) -> bool:
        large = sum(map(len, setup.files.values())) >= SMALL_BYTES
        return self.expects(config, script=setup.setup is not None or large, files=True)

    async def _state(self, container: Container) -> str:
        """Describe a container's state outside of its layer, as far as set-up could change it."""
        paths = [path for path, _ in container.config.tmpfs]
        state = await self._scan(container, *_IN_MEMORY, *paths)
        with engine_errors("snapshot", container.id):
            processes = await self._engine.run(_processes, self._engine, container)
        return state + processes

    async def _scan(self, container: Container, *folders: str) -> str:
        """List what an image would lose of changed files; with folders, describe state in memory.

        Raises:
            _Unfaithful: it cannot be known.
            SandboxError: as for a command.
        """
        words = ("0", "/", *folders)
        call = await container.request(RequestKind.SCAN, words, timeout=60, limit=_SCAN_BYTES)
        if call.end is None or call.end.how is not How.DONE:
            raise _Unfaithful("its state cannot be read")
        return bytes(call.out.data).decode(errors="replace")

    def _make(self, part: ForkMember) -> Snapshot:
        """Make an image of the leader's container, in this thread.

        Raises:
            _Unfaithful: the image would differ from the container.
            SandboxError: the engine refused, or does not answer.
        """
        api, container, tape = self._engine.api, part.project.default, part.tape
        assert tape is not None
        facts = container.get("json", size=True).json()
        if any(mount.get("RW") for mount in facts.get("Mounts") or ()):
            raise _Unfaithful("it has a volume, which an image does not hold")
        size = max(int(facts.get("SizeRw") or 0), _LEAST_BYTES)
        if not self._make_room(size):
            raise _Unfaithful(f"its {size} bytes are more than snapshots may take")
        tag = f"{self._owner.id}-{uuid.uuid4().hex[:12]}"
        with engine_errors("snapshot", container.id):
            made = api.commit(container.id, SNAPSHOTS_REPOSITORY, tag)
        image = replace(container.image, id=made["Id"])
        name = f"{SNAPSHOTS_REPOSITORY}:{tag}"
        snapshot = Snapshot(name, image, part.pool, size, tuple(tape.recorded))
        if self._closed:
            self._remove(snapshot)
        return snapshot

    def _make_room(self, size: int) -> bool:
        """Remove the least recently used snapshots until one more fits, in this thread."""
        if size > SNAPSHOT_BYTES // 2:
            return False
        with self._lock:
            used = [fork.snapshot for fork in self._forks.values() if fork.snapshot is not None]
            total = size + sum(snapshot.bytes for snapshot in (*self._dropped, *used))
        for snapshot in used:
            if total > SNAPSHOT_BYTES and self._remove(snapshot):
                total -= snapshot.bytes
        return total <= SNAPSHOT_BYTES

    def drop(self, fork: _Fork) -> None:
        """Stop using a snapshot; its image is removed when no container needs it."""
        with self._lock:
            if self._forks.get(fork.key) is fork:
                del self._forks[fork.key]
        if fork.snapshot is not None:
            self._discard(fork.snapshot)

    def close(self) -> None:
        """Take no more snapshots; their images are removed with all that the owner has."""
        self._closed = True
        with self._lock:
            self._forks.clear()

    def tend(self) -> None:
        """Remove the dropped snapshots that no container runs from any more."""
        with self._lock:
            dropped, self._dropped = self._dropped, set()
        for snapshot in dropped:
            self._discard(snapshot)

    def _discard(self, snapshot: Snapshot) -> None:
        with contextlib.suppress(RuntimeError):  # the interpreter is shutting down
            self._engine.removals.submit(self._try_removal, snapshot)

    def _try_removal(self, snapshot: Snapshot) -> None:
        if not self._remove(snapshot):
            with self._lock:
                self._dropped.add(snapshot)

    def _remove(self, snapshot: Snapshot) -> bool:
        # Not by force: the engine refuses while a container runs from it.
        if not quietly(self._engine.api.remove_image, snapshot.name):
            return False
        with self._lock:
            for fork in [each for each in self._forks.values() if each.snapshot is snapshot]:
                del self._forks[fork.key]
        return True


def _may_share(config: ProjectConfig) -> bool:
    # Set-up can change the servers beside a sandbox, which its image does not hold.
    return config.snapshot != "never" and len(config.services) == 1


class _Unfaithful(Exception):
    """An image would differ from the container."""


def _processes(engine: Engine, container: Container) -> str:
    """List a container's processes as the engine sees them, without those that have ended."""
    listed = engine.api.top(container.id, "-o pid,stat,args")
    state, command = (listed["Titles"].index(title) for title in ("STAT", "COMMAND"))
    return json.dumps(
        sorted(
            each[command]
            for each in listed["Processes"]
            if not each[state].startswith("Z") or "l" in each[state]  # with threads that run
        )
    )
