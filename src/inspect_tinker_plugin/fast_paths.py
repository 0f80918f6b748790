"""Switches of the fast paths, which skip work whose result nobody uses.

Each gives the same results as the normal path, and parity checks that with the path on and off. To
find out whether one is at fault, turn it off in the environment (``INSPECT_RL_SLOW=model_calls``,
several with commas, ``all`` for every one) or temporarily (:func:`without`).
"""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from enum import StrEnum

SLOW = "INSPECT_RL_SLOW"
"""Environment variable that names the paths to turn off."""


class FastPath(StrEnum):
    """The fast paths."""

    MODEL_CALLS = "model_calls"
    """The policy's model calls, without retries, connection slots and copies for events."""

    SOLVER_EVENTS = "solver_events"
    """Solvers, without events that record the changes of each one."""

    TRANSCRIPTS = "transcripts"
    """An episode's events in a plain list, which the garbage collector need not examine."""

    TRACES = "traces"
    """No lines of episodes in Inspect's trace log, which an eval in the process turns on."""

    STARTS = "starts"
    """Starting a few episodes at a time, so that a thousand do not stop the event loop."""


_without: ContextVar[frozenset[FastPath]] = ContextVar("inspect_rl_slow", default=frozenset())


def taken(path: FastPath) -> bool:
    """Whether a path is turned on here."""
    if path in _without.get():
        return False
    slow = os.environ.get(SLOW, "")
    return not slow or not {"all", path.value} & {name.strip() for name in slow.split(",")}


@contextmanager
def without(*paths: FastPath) -> Iterator[None]:
    """Turn paths off inside a block, and in the tasks that start there."""
    token = _without.set(_without.get() | frozenset(paths))
    try:
        yield
    finally:
        _without.reset(token)
