"""The fast paths: work whose result nobody uses is skipped or shortened.

Each gives the same results as the normal path, and parity checks that with the path on and off. To
find out whether one is at fault, turn it off in the environment (``INSPECT_RL_SLOW=model_calls``,
several with commas, ``all`` for every one) or temporarily (:func:`without`).

An episode without a log skips work that only a log would show. A task may still read its transcript
(a scorer that counts tool calls, say), so events are there; only their extra costs are saved:

* model calls record the conversation itself, not a copy of each message as it was;
* solvers record neither their beginning and end nor the changes of the state;
* the transcript is a list, without the indexes and back references of Inspect's own.

The first episode that reads its transcript makes later episodes of its task record everything, so
that they find all of it.
"""

from __future__ import annotations

import logging
import os
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from contextvars import ContextVar
from enum import StrEnum
from typing import Any

from inspect_ai.event import Event

from inspect_tinker_plugin import inspect_internals as internals

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


class QuietTranscript(internals.Transcript):
    """A transcript that nobody is expected to read; a reader still finds everything recorded.

    Nothing of Inspect's class is set up before it is needed. So there are no cycles of
    references either, and an episode's end frees its events without the garbage collector.

    Args:
        on_read: Called when somebody reads it, once.
    """

    def __init__(self, on_read: Callable[[], None]) -> None:
        self._recorded: list[Event] | None = []
        self._on_read = on_read

    def _event(self, event: Event) -> None:
        if self._recorded is None:
            super()._event(event)
        else:
            self._recorded.append(event)

    def _event_updated(self, event: Event) -> None:
        if self._recorded is None:
            super()._event_updated(event)

    @property
    def recorded(self) -> Sequence[Event]:
        """The recorded events; looking at them does not count as reading."""
        return self._events if self._recorded is None else self._recorded

    def __getattr__(self, name: str) -> Any:
        """Become an ordinary transcript, as soon as it is used for more than adding events."""
        recorded = self.__dict__.get("_recorded")
        if recorded is None or name.startswith("__"):
            raise AttributeError(name)
        self._recorded = None
        super().__init__(log_model_api=False)
        for event in recorded:
            super()._event(event)
        self._on_read()
        return getattr(self, name)


_in_episode: ContextVar[bool] = ContextVar("inspect_rl_in_episode", default=False)
_TRACED = (
    "inspect_ai.model._model",
    "inspect_ai.model._call_tools",
    "inspect_ai.util._subprocess",
    "inspect_ai.util._subtask",
)
"""Loggers that record the beginning and end of every operation in Inspect's trace log."""


def keep_out_of_trace_log() -> None:
    """Keep this context out of Inspect's trace log, unless traces were asked for.

    The log is opened by the first ``eval()`` of a process and stays open.
    """
    if not taken(FastPath.TRACES) or os.environ.get("INSPECT_TRACE_FILE"):
        return
    for name in _TRACED:
        logging.getLogger(name).addFilter(_is_wanted)  # a filter is added once
    _in_episode.set(True)


def _is_wanted(record: logging.LogRecord) -> bool:
    return (
        record.levelno != internals.TRACE
        or not _in_episode.get()
        or logging.getLogger().level == internals.TRACE  # `--log-level trace`
    )
