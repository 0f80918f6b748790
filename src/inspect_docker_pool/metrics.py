"""Measures what sandboxes cost an episode: time to acquire, time in exec, warm hits, starts."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from contextlib import contextmanager
from contextvars import ContextVar

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
        self._lock = threading.Lock()

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


def sandbox_metrics() -> dict[str, float]:
    """Return the sums of the innermost recorder, or of the whole process outside of one."""
    return (_recorder.get() or _process).snapshot()


def process_metrics() -> dict[str, float]:
    """Return the sums of the whole process, pre-warmed containers included."""
    return _process.snapshot()


def measure(name: str, value: float = 1.0) -> None:
    """Add to the process's sums and to those of the current recorder."""
    _process.add(name, value)
    recorder = _recorder.get()
    if recorder is not None:
        recorder.add(name, value)
