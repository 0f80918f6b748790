"""What the context of one episode carries: its metrics, and the set-up that a group shares."""

from __future__ import annotations

import hashlib
import threading
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from contextvars import ContextVar
from typing import TYPE_CHECKING

from inspect_docker_pool.engine import undo

if TYPE_CHECKING:
    from inspect_docker_pool.snapshot import ForkMember

ACQUIRE = "sandbox/acquire_s"
"""Seconds that an episode waited for its container."""
EXEC = "sandbox/exec_s"
"""Seconds spent in commands and file operations."""
EXECS = "sandbox/execs"
"""Commands and file operations."""
WARM_HITS = "sandbox/warm_hits"
"""Acquisitions that a warm container served immediately."""
STARTED = "sandbox/started"
"""Containers started (counted for the process only, as most start ahead of need)."""
FORKS = "sandbox/forks"
"""Episodes that started from a snapshot of another's set-up."""
SNAPSHOTS = "sandbox/snapshots"
"""Snapshots taken after set-up, for the other episodes of a group."""


class SandboxMetrics:
    """Sums by name; safe to add to from any thread."""

    def __init__(self) -> None:
        self._values: dict[str, float] = {}
        self._lock = threading.RLock()  # also taken by coroutines that a collection closes

    def add(self, name: str, value: float = 1.0) -> None:
        with self._lock:
            self._values[name] = self._values.get(name, 0.0) + value

    def snapshot(self) -> dict[str, float]:
        """Return the sums so far, by metric name."""
        with self._lock:
            return dict(self._values)


_process = SandboxMetrics()
_recorder: ContextVar[SandboxMetrics | None] = ContextVar("sandbox_metrics", default=None)


@contextmanager
def record_sandbox_metrics() -> Iterator[SandboxMetrics]:
    """Collect the sandbox metrics of one episode, in this context and its tasks."""
    metrics = SandboxMetrics()
    token = _recorder.set(metrics)
    try:
        yield metrics
    finally:
        _recorder.reset(token)


def process_metrics() -> dict[str, float]:
    """Return the sums of the whole process, pre-warmed containers included."""
    return _process.snapshot()


def measure(name: str, value: float = 1.0) -> None:
    """Add to the process's sums and to those of the current recorder."""
    _process.add(name, value)
    recorder = _recorder.get()
    if recorder is not None:
        recorder.add(name, value)


class SampleSetup:
    """Files and set-up script of one sample, about to be applied.

    The episode runner wraps Inspect's own initialisation of a sample's sandboxes in one: a sandbox
    that can start from a snapshot finds here what will be applied, and is told when it has been.
    """

    def __init__(self, files: Mapping[str, bytes], setup: bytes | None) -> None:
        self.files = files
        self.setup = setup
        self._member: ForkMember | None = None
        self._failed = False

    @property
    def digest(self) -> str:
        """Return a key of everything that is applied, to the byte."""
        digest = hashlib.sha256()
        for part in (b"" if self.setup is None else b"setup", self.setup or b""):
            digest.update(len(part).to_bytes(8, "big") + part)
        for path, contents in self.files.items():
            for part in (path.encode(), contents):
                digest.update(len(part).to_bytes(8, "big") + part)
        return digest.hexdigest()

    def join(self, member: ForkMember) -> None:
        """Add the sandbox that is set up; the episode may already be gone."""
        self._member = member
        if self._failed:
            member.fail()

    async def finish(self) -> None:
        """Tell the sandbox that files and script have been applied, before the solver runs."""
        if self._member is not None:
            await self._member.finish()

    def fail(self) -> None:
        """Tell the sandbox that nothing more will be applied."""
        self._failed = True
        if self._member is not None:
            self._member.fail()


_current: ContextVar[SampleSetup | None] = ContextVar("sample_setup", default=None)


@contextmanager
def sample_setup(files: Mapping[str, bytes], setup: bytes | None) -> Iterator[SampleSetup]:
    """Announce a set-up around Inspect's initialisation of a sample's sandboxes.

    Afterwards, and before anything else runs in them, await :meth:`SampleSetup.finish`.
    """
    announced = SampleSetup(files, setup)
    token = _current.set(announced)
    try:
        yield announced
    except BaseException as ex:
        undo(ex, announced.fail)
        raise
    finally:
        _current.reset(token)


_exceeding: ContextVar[bool] = ContextVar("sandbox_exceeding", default=False)


@contextmanager
def exceed_bounds() -> Iterator[None]:
    """Let callers inside wait for no bound: those who hold the other sandboxes wait for them."""
    token = _exceeding.set(True)
    try:
        yield
    finally:
        _exceeding.reset(token)


def exceeds_bounds() -> bool:
    """Return whether the caller waits for no bound."""
    return _exceeding.get()


def current_setup() -> SampleSetup | None:
    """Return the set-up for which a sandbox is being acquired; ``None`` outside of episodes."""
    return _current.get()
