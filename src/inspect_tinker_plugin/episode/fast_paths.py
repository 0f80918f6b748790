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

A call of the policy is ``Model.generate``'s own up to ``Model._generate``: the arguments, the
message limits, the merging of options and refusals. :func:`model_call` replaces
``Model._generate`` and follows it line by line. Left out are things that cannot happen to a parked
call (retries, time-outs, streams, the cache, a place in a connection pool) and, without a log,
copies of all messages for an event that nobody reads. With any hook, monitor, bridge or display
that looks at model calls, ``Model._generate`` is used.
"""

from __future__ import annotations

import logging
import os
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from contextvars import ContextVar
from enum import StrEnum
from functools import cache, partial
from typing import Any, NamedTuple, Protocol, TypeVar

import anyio
from inspect_ai.event import Event, ModelEvent
from inspect_ai.log import transcript
from inspect_ai.model import (
    ChatMessage,
    ChatMessageAssistant,
    GenerateConfig,
    Model,
    ModelOutput,
)
from inspect_ai.tool import ToolChoice, ToolInfo
from pydantic import BaseModel

from inspect_tinker_plugin import inspect_internals as internals

SLOW = "INSPECT_RL_SLOW"
"""Environment variable that names the paths to turn off; it is read once per process."""


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

    ENCODINGS = "encodings"
    """The tokens of texts that return, such as headers of messages, while prompts are rendered."""

    TOOL_DESCRIPTIONS = "tool_descriptions"
    """What is found out about tools, and about what ``react()`` makes per turn, found out once."""

    IDS = "ids"
    """Ids of samples, messages and events, drawn many at a time."""

    USAGE = "usage"
    """Sums of usage, without checks of numbers that were checked before."""

    FIRST_CALLS = "first_calls"
    """An export's episodes, closed inside their first model call, without providers' state."""

    COLLECTIONS = "collections"
    """Garbage is collected after 100,000 new objects in a process with Python's own thresholds."""

    LOG_EVENTS = "log_events"
    """Events for a log (spans, solvers, the policy's calls, scores) without Inspect's checks."""

    LOG_FILES = "log_files"
    """Records condensed as JSON values, and logs written without Inspect's recorder."""

    STARTS = "starts"
    """Starting a few episodes at a time, so that a thousand do not stop the event loop."""


_without: ContextVar[frozenset[FastPath]] = ContextVar("inspect_rl_slow", default=frozenset())


def taken(path: FastPath) -> bool:
    """Whether a path is turned on here."""
    return path not in _turned_off() and path not in _without.get()


@cache
def _turned_off() -> frozenset[FastPath]:
    names = {name.strip() for name in os.environ.get(SLOW, "").split(",")}
    return frozenset(path for path in FastPath if {"all", path.value} & names)


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
        self._recorded: list[Event | QuietCall] | None = []
        self._on_read = on_read

    def _event(self, event: Event) -> None:
        if self._recorded is None:
            super()._event(event)
        else:
            self._recorded.append(event)

    def _event_updated(self, event: Event) -> None:
        if self._recorded is None:
            super()._event_updated(event)

    def begin(self, call: QuietCall) -> None:
        """Record a model call, whose event is made when somebody looks at it."""
        if self._recorded is None:
            super()._event(call.read())
        else:
            self._recorded.append(call)

    @property
    def recorded(self) -> Sequence[Event]:
        """The recorded events; looking at them does not count as reading."""
        return self._events if self._recorded is None else _events_of(self._recorded)

    def __getattr__(self, name: str) -> Any:
        """Become an ordinary transcript, as soon as it is used for more than adding events."""
        recorded = self.__dict__.get("_recorded")
        if recorded is None or name.startswith("__"):
            raise AttributeError(name)
        self._recorded = None
        super().__init__(log_model_api=False)
        for each in recorded:
            super()._event(each.read() if isinstance(each, QuietCall) else each)
        self._on_read()
        return getattr(self, name)


def _events_of(recorded: Sequence[Event | QuietCall]) -> list[Event]:
    return [each.event if isinstance(each, QuietCall) else each for each in recorded]


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
    _leave_out_traces()
    _in_episode.set(True)


@cache
def _leave_out_traces() -> None:
    """Have the loggers say that traces are turned off, before a record is made."""
    for name in _TRACED:
        logger = logging.getLogger(name)
        logger.isEnabledFor = partial(_is_wanted, logger.isEnabledFor)  # type: ignore[method-assign]


def _is_wanted(enabled: Callable[[int], bool], level: int) -> bool:
    left_out = (
        level == internals.TRACE
        and _in_episode.get()
        and logging.getLogger().level != internals.TRACE  # `--log-level trace`
    )
    return not left_out and enabled(level)


_INSIDE: dict[FastPath, Callable[[Callable[[], bool]], None]] = {
    FastPath.TOOL_DESCRIPTIONS: internals.remember_tools,
    FastPath.IDS: internals.draw_ids,
    FastPath.USAGE: internals.add_usage_quickly,
}
"""Paths through Inspect's own code, with what opens them for the contexts that want them."""

_wanted = {path: ContextVar(f"inspect_rl_{path}", default=False) for path in _INSIDE}


def take_inside() -> None:
    """Take the paths through Inspect's own code in this context."""
    for path, wanted in _wanted.items():
        if taken(path):
            _open(path)
            wanted.set(True)


@cache
def _open(path: FastPath) -> None:
    _INSIDE[path](_wanted[path].get)


class PolicyCall(NamedTuple):
    """A call of the policy."""

    model: Model
    messages: list[ChatMessage]
    """The conversation."""
    tools: list[ToolInfo]
    """The descriptions of the tools."""
    tool_choice: ToolChoice
    """Which of them it may call."""
    config: GenerateConfig
    """The merged options."""


class CallRecord(Protocol):
    """A model call that is being recorded."""

    @property
    def event(self) -> ModelEvent:
        """Its event."""

    def complete(self, result: ModelOutput | Exception) -> None:
        """Complete its event with the reply or error."""


CallRecorder = Callable[[PolicyCall], CallRecord]
"""Begins to record a call of the policy."""


async def model_call(
    asked: PolicyCall, *, record: CallRecorder, definitions: Sequence[Any]
) -> tuple[ModelOutput, ModelEvent]:
    """Ask the policy, and record its reply and usage.

    Args:
        asked: The call.
        record: Records it.
        definitions: Inspect's definitions of the tools, for the views of calls.

    Returns:
        Its reply, and the event of the call.
    """
    parts, model = internals.optional_names(), asked.model
    assert parts is not None
    await parts.wait_generate_dispatch(model, None)
    parts._check_limits_before_dispatch()
    model.verify_model_apis()
    call = record(asked)
    started = parts.sample_clock()
    try:
        output = await model.api.generate(
            input=asked.messages,
            tools=asked.tools,
            tool_choice=asked.tool_choice,
            config=asked.config,
        )
    except Exception as error:
        call.complete(error)
        raise
    except anyio.get_cancelled_exc_class():
        if call.event.pending:
            call.complete(RuntimeError("model call cancelled"))
        raise
    assert isinstance(output, ModelOutput)
    if parts.usage_input_tokens is not None and output.input_context_tokens is None:
        output.input_context_tokens = parts.usage_input_tokens(output.usage)
    output.time = parts.sample_clock() - started
    for choice in output.choices:
        for wanted in choice.message.tool_calls or []:
            wanted.view = parts.tool_call_view(wanted, definitions)
    call.complete(output)
    if output.usage:
        parts.record_and_check_model_usage(model, output.usage, role=model.role, output=output)
    parts.record_sample_model_fallback(output)
    try:
        parts.record_turn()
    finally:
        parts.set_active_sample_total_turns(parts.turn_count() or 0)
    if not output.empty and output.stop_reason == "content_filter":
        parts.report_refusal(output.completion)
    return output, call.event


_Model = TypeVar("_Model", bound=BaseModel)
_set = object.__setattr__


def changed(model: _Model, /, **fields: Any) -> _Model:
    """Return a shallow copy with other values in some fields, which nobody checks.

    The same as ``model_copy(update=fields)``, in a fraction of its time.
    """
    extra, private = model.__pydantic_extra__, getattr(model, "__pydantic_private__", None)
    if extra:
        return model.model_copy(update=fields)
    made = object.__new__(type(model))
    _set(made, "__dict__", {**model.__dict__, **fields})
    _set(made, "__pydantic_extra__", extra if extra is None else {})
    _set(made, "__pydantic_fields_set__", {*model.__pydantic_fields_set__, *fields})
    _set(made, "__pydantic_private__", private if private is None else dict(private))
    return made


def as_said(
    output: ModelOutput, copied: Callable[[ChatMessageAssistant], ChatMessage]
) -> ModelOutput:
    """Return an output that stays as it is: ``react()`` writes what was submitted into its own.

    Args:
        output: What the policy answered.
        copied: Copies a message of it.
    """
    choices = [changed(choice, message=copied(choice.message)) for choice in output.choices]
    return changed(output, choices=choices)


def _own_fields(message: ChatMessageAssistant) -> ChatMessageAssistant:
    content = message.content
    return changed(message, content=content if type(content) is str else list(content))


EMPTY_CALL = ModelEvent(
    model="", input=[], tools=[], tool_choice="auto", config=GenerateConfig(), output=ModelOutput()
)
"""What events of model calls are copied from."""


class LoggedCall:
    """A model call that is recorded as Inspect does, for a log."""

    __slots__ = ("_complete", "event")

    def __init__(self, asked: PolicyCall) -> None:
        self._complete, event = asked.model._record_model_interaction(
            input=asked.messages,
            tools=asked.tools,
            tool_choice=asked.tool_choice,
            config=asked.config,
            cache=None,
        )
        assert isinstance(event, ModelEvent)
        self.event = event

    def complete(self, result: ModelOutput | Exception) -> None:
        """Complete its event with the reply or error."""
        self._complete(result, None)


class QuietCall:
    """A model call whose event is made when the call has ended, or when somebody looks at it.

    Waiting for the policy it needs a tenth of the memory of an event.
    """

    __slots__ = ("_asked", "_event", "_is_read")

    def __init__(self, asked: PolicyCall) -> None:
        self._asked = asked._replace(messages=list(asked.messages))
        self._event: ModelEvent | None = None
        self._is_read = False
        running = transcript()
        if isinstance(running, QuietTranscript):
            running.begin(self)
        else:
            running._event(self.event)

    @property
    def event(self) -> ModelEvent:
        """Its event, made without checking or copying what comes from Inspect itself."""
        if self._event is None:
            asked, parts = self._asked, internals.optional_names()
            requested = getattr(parts, "_requested_model", None)
            # Inspect sets the time
            self._event = changed(
                EMPTY_CALL,
                model=str(asked.model),
                role=asked.model.role,
                requested_model=None if requested is None else requested.get(),
                input=asked.messages,
                tools=asked.tools,
                tool_choice=asked.tool_choice,
                config=changed(asked.config),  # which calls share, and who reads it may change it
                cache=None,
                pending=True,
                uuid=internals.unique_id(),
                span_id=None,
            )
        return self._event

    def read(self) -> ModelEvent:
        """Return its event for a reader, who may change it: it shares no message any more."""
        event = self.event
        if not self._is_read:
            self._is_read = True
            event.input = [message.model_copy(deep=True) for message in event.input]
            event.output = event.output.model_copy(deep=True)
        return event

    def complete(self, result: ModelOutput | Exception) -> None:
        """Complete its event with the reply or error."""
        event = self.event
        if isinstance(result, ModelOutput):
            event.output = (
                result.model_copy(deep=True) if self._is_read else as_said(result, _own_fields)
            )
        else:
            parts = internals.optional_names()
            assert parts is not None
            event.error = parts.exception_message(result)
        event.pending = None
