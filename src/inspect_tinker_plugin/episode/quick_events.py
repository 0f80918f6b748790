"""Events for a log, without what Inspect checks of its own values and sets up to find events again.

An event is a copy of a template: the fields are Inspect's, in the types that it gives them, and
times, ids and spans come from where Inspect takes them.
"""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import AbstractAsyncContextManager, suppress
from contextvars import Token
from typing import Any, TypeVar

from inspect_ai.dataset import Sample
from inspect_ai.event import (
    Event,
    ModelEvent,
    SampleInitEvent,
    ScoreEvent,
    SpanBeginEvent,
    SpanEndEvent,
    StateEvent,
    Timeline,
)
from inspect_ai.log import transcript
from inspect_ai.model import ChatMessage, ModelOutput
from inspect_ai.scorer import Score
from inspect_ai.solver import TaskState
from inspect_ai.util import span

from inspect_tinker_plugin import inspect_internals as internals
from inspect_tinker_plugin.episode.fast_paths import (
    EMPTY_CALL,
    CallRecorder,
    FastPath,
    LoggedCall,
    PolicyCall,
    QuietCall,
    QuietTranscript,
    as_said,
    changed,
    taken,
)

_Event = TypeVar("_Event", bound=Event)

_NAMES = (
    "_current_span_id",
    "_span_id_provider",
    "current_span_id",
    "json_changes",
    "registry_log_name",
    "track_store_changes",
)

_CALL_NAMES = ("_requested_model", "_snapshot_message", "exception_message", "format_traceback")

_SPAN_BEGIN = SpanBeginEvent(id="", name="")
_SPAN_END = SpanEndEvent(id="")
_STATE = StateEvent(changes=[])
_SCORE = ScoreEvent(score=Score(value=0))
_NO_OUTPUT = ModelOutput.from_content("", "")
_INIT = SampleInitEvent(sample=Sample(input=""), state={})

_now = SpanBeginEvent.model_fields["timestamp"].default_factory
_working_time = SpanBeginEvent.model_fields["working_start"].default_factory


def can_be_quick() -> bool:
    """Whether events are made here, in this release of Inspect and with this path turned on."""
    return (
        taken(FastPath.LOG_EVENTS)
        and internals.optional_names(*_NAMES) is not None
        and _now is not None
        and _working_time is not None
    )


def sample_init_event(sample: Sample, state: Any) -> SampleInitEvent:
    """Make the first event of a sample."""
    return _like(_INIT, sample=sample, state=state)


def score_event(score: Score, **fields: Any) -> ScoreEvent:
    """Make the event of a score."""
    return _like(_SCORE, score=score, **fields)


def _like(template: _Event, **fields: Any) -> _Event:
    names: Any = internals.optional_names(*_NAMES)
    return changed(
        template,
        **fields,
        uuid=internals.unique_id(),
        span_id=names.current_span_id(),
        timestamp=_now(),  # type: ignore[call-arg,misc] # looked at by can_be_quick()
        working_start=_working_time(),  # type: ignore[call-arg,misc] # the same
    )


class LoggedTranscript(QuietTranscript):
    """A transcript that only adds events, until somebody uses more of it.

    Attributes:
        copies: The messages of model calls, each with its latest copy, by the id of the object.
    """

    def __init__(self) -> None:
        super().__init__(_nothing)
        self.copies: dict[int, tuple[ChatMessage, ChatMessage]] = {}

    def _event(self, event: Event) -> None:
        _without_call(event)
        super()._event(event)

    def _event_updated(self, event: Event) -> None:
        _without_call(event)
        super()._event_updated(event)

    @property
    def events(self) -> Sequence[Event]:
        """The events so far."""
        return super().events if self._recorded is None else self.recorded

    @property
    def timelines(self) -> Sequence[Timeline]:
        """The timelines that a task has added."""
        return super().timelines if self._recorded is None else ()

    @property
    def attachments(self) -> dict[str, str]:
        """Long texts of the events; there are none as long as events are only added."""
        return super().attachments if self._recorded is None else {}


def _without_call(event: Event) -> None:
    """Leave out what was sent to a model's provider, as ``log_model_api=False`` does."""
    if isinstance(event, ModelEvent) and event.call is not None and not event.call.error:
        event.call = None


def _nothing() -> None:
    """Do nothing about a reader: the events are all there."""


def quick_span(name: str, kind: str | None = None) -> AbstractAsyncContextManager[Any]:
    """Group the events of one part of an episode, as Inspect's ``span`` does."""
    names: Any = internals.optional_names(*_NAMES)
    if names._span_id_provider.get() is not None or "agent" in (kind, name):
        return span(name, type=kind)
    return _Span(name, kind or name)


class _Span(AbstractAsyncContextManager["_Span"]):
    _token: Token[Any]

    def __init__(self, name: str, kind: str) -> None:
        self._names: Any = internals.optional_names(*_NAMES)
        self._name, self._kind, self._id = name, kind, internals.unique_id()

    async def __aenter__(self) -> _Span:
        parent = self._names.current_span_id()
        self._token = self._names._current_span_id.set(self._id)
        internals.record_event(
            _like(_SPAN_BEGIN, id=self._id, parent_id=parent, type=self._kind, name=self._name)
        )
        self._store_changes = self._names.track_store_changes()
        self._store_changes.__enter__()
        return self

    async def __aexit__(self, *error: Any) -> None:
        try:
            self._store_changes.__exit__(*error)
        finally:
            internals.record_event(_like(_SPAN_END, id=self._id))
            with suppress(ValueError):  # an abandoned one may be ended in another context
                self._names._current_span_id.reset(self._token)


class QuickSolver(_Span):
    """Records a solver, and what it changed in the state."""

    def __init__(self, solver: Any, state: TaskState, name: str | None = None) -> None:
        names: Any = internals.optional_names(*_NAMES)
        super().__init__(names.registry_log_name(name or solver), "solver")
        self._state = state

    async def __aenter__(self) -> QuickSolver:
        await super().__aenter__()
        self._before = internals.state_jsonable(self._state)
        return self

    def complete(self, after_state: TaskState) -> None:
        """Record the changes."""
        changes = self._names.json_changes(self._before, internals.state_jsonable(after_state))
        if changes:
            internals.record_event(_like(_STATE, changes=changes))


def call_recorder(*, keep_events: bool) -> CallRecorder:
    """Return what records the policy's calls.

    Args:
        keep_events: Whether all of an event is wanted: for a log, or a task that reads it.
    """
    if not keep_events:
        return QuietCall
    names = internals.optional_names(*_CALL_NAMES)
    if names is None or None in vars(names).values():
        return LoggedCall
    return _QuickCall if isinstance(transcript(), LoggedTranscript) else LoggedCall


class _QuickCall:
    """A model call that is recorded as Inspect does, with cheaper copies of most messages."""

    __slots__ = ("_names", "_running", "event")

    def __init__(self, asked: PolicyCall) -> None:
        names, running = internals.optional_names(*_CALL_NAMES), transcript()
        assert names is not None
        assert isinstance(running, LoggedTranscript)
        self._names, self._running = names, running
        name = str(asked.model)
        self.event = _like(
            EMPTY_CALL,
            model=name,
            role=asked.model.role,
            requested_model=names._requested_model.get(),
            input=[self._copied(message) for message in asked.messages],
            tools=list(asked.tools),
            tool_choice=asked.tool_choice,
            config=asked.config,
            output=_no_output(name),
            pending=True,
        )
        running._event(self.event)

    def complete(self, result: ModelOutput | Exception) -> None:
        """Complete its event with the reply or error."""
        event = self.event
        if isinstance(result, ModelOutput):
            event.output = as_said(result, self._copied)
        else:
            event.error = self._names.exception_message(result)
            event.traceback, event.traceback_ansi = self._names.format_traceback(
                type(result), result, result.__traceback__
            )
        event.pending = None
        self._running._event_updated(event)

    def _copied(self, message: ChatMessage) -> ChatMessage:
        """Return a message as it is now; later changes of the original do not show in it."""
        fields = message.__dict__
        if not all(type(value) in internals.PLAIN_TYPES for value in fields.values()):
            made: ChatMessage = self._names._snapshot_message(message)
            return made
        copies = self._running.copies
        latest = copies.get(id(message))
        if latest is None or latest[1].__dict__ != fields:
            copies[id(message)] = latest = message, changed(message)
        return latest[1]


def _no_output(model: str) -> ModelOutput:
    """Return what a call has as its output until it has one."""
    [choice] = _NO_OUTPUT.choices
    message = changed(choice.message, id=internals.unique_id(), model=model)
    return changed(_NO_OUTPUT, model=model, choices=[changed(choice, message=message)])
