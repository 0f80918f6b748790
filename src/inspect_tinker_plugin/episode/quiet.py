"""Episodes without a log: work that only a log would show is skipped or shortened.

A task may still read its transcript (a scorer that counts tool calls, say), so events are there;
only their extra costs are saved:

* model calls record the conversation itself, not a copy of each message as it was;
* solvers record neither their beginning and end nor the changes of the state;
* the transcript is a list, without the indexes and back references of Inspect's own.

The first episode that reads its transcript makes later episodes of its task record everything, so
that they find all of it.
"""

from __future__ import annotations

import logging
import os
from collections.abc import Callable, Sequence
from contextvars import ContextVar
from typing import Any

from inspect_ai.event import Event

from inspect_tinker_plugin import inspect_internals as internals
from inspect_tinker_plugin.fast_paths import FastPath, taken


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
