"""Switches of the fast paths: ways round work whose result nobody looks at.

Each gives what the long way gives, and parity holds it to that with the path on and off. One can be
turned off to find out whether it is at fault, in the environment (``INSPECT_RL_SLOW=model_calls``,
several with commas, ``all`` for every one) or for a while (:func:`without`).
"""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from enum import StrEnum

SLOW = "INSPECT_RL_SLOW"
"""Environment variable with the paths that are not taken."""


class FastPath(StrEnum):
    """What can be done the fast way."""

    MODEL_CALLS = "model_calls"
    """The policy's model calls, without retries, connection slots and copies for events."""

    SOLVER_EVENTS = "solver_events"
    """Solvers, without the events that say what each has changed."""

    TRANSCRIPTS = "transcripts"
    """An episode's events in a plain list, which leaves the collector nothing to find."""

    TRACES = "traces"
    """No lines of episodes in Inspect's trace log, which an eval in the process turns on."""

    STARTS = "starts"
    """Episodes that start a few at a time, so that a thousand do not stop the event loop."""


_without: ContextVar[frozenset[FastPath]] = ContextVar("inspect_rl_slow", default=frozenset())


def taken(path: FastPath) -> bool:
    """Whether a path is taken here."""
    if path in _without.get():
        return False
    slow = os.environ.get(SLOW, "")
    return not slow or not {"all", path.value} & {name.strip() for name in slow.split(",")}


@contextmanager
def without(*paths: FastPath) -> Iterator[None]:
    """Go the long way inside, and in the tasks that start there."""
    token = _without.set(_without.get() | frozenset(paths))
    try:
        yield
    finally:
        _without.reset(token)
