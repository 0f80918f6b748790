"""The fast paths: what an episode leaves out because nobody uses its result.

Nothing of Inspect is replaced for them; they are methods of our own model and transcript.

A call of the policy is ``Model.generate``'s own up to ``Model._generate``: the arguments, the
message limits, the merging of options and refusals. :func:`model_call` stands for
``Model._generate`` and follows it line by line. Left out are things that cannot happen to a parked
call (retries, time-outs, streams, the cache, a place in a connection pool). With any hook, monitor,
bridge or display that looks at model calls, or another release of Inspect than those that were
tried, ``Model._generate`` is used.

Without a log, the event of a call holds the messages themselves, not a copy of each as it was, and
the transcript is a list. A task may still read it (a scorer that counts tool calls, say): then it
becomes an ordinary transcript, and later episodes of that task record copies from the beginning.

``INSPECT_RL_SLOW`` turns them off, to find out whether one is at fault.
"""

from __future__ import annotations

import os
from collections.abc import Awaitable, Callable, Iterator, Sequence
from contextlib import contextmanager
from contextvars import ContextVar
from enum import StrEnum
from functools import cache
from typing import Any, NamedTuple

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
from inspect_ai.solver import Generate, Plan, TaskState
from inspect_ai.tool import ToolChoice, ToolInfo

from inspect_tinker_plugin import inspect_internals as internals

SLOW = "INSPECT_RL_SLOW"
"""Environment variable that names the paths to turn off, with commas, or ``all``; read once."""


class FastPath(StrEnum):
    """The fast paths that can be turned off."""

    MODEL_CALLS = "model_calls"
    """The policy's model calls, without retries and connection slots."""

    TRANSCRIPTS = "transcripts"
    """Events in a plain list, those of model calls without copies of all messages."""


_without: ContextVar[frozenset[FastPath]] = ContextVar("inspect_rl_slow", default=frozenset())


def is_on(path: FastPath) -> bool:
    """Whether a path is turned on here."""
    return path not in _turned_off() and path not in _without.get()


@cache
def _turned_off() -> frozenset[FastPath]:
    names = {name.strip() for name in os.environ.get(SLOW, "").split(",")}
    return frozenset(path for path in FastPath if {"all", path.value} & names)


@contextmanager
def turn_off(*paths: FastPath) -> Iterator[None]:
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
    def is_quiet(self) -> bool:
        """Whether nobody has read it yet."""
        return self._recorded is not None

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
            if isinstance(event, ModelEvent):  # a reader may change it: it shares no message
                event.input = [message.model_copy(deep=True) for message in event.input]
                event.output = event.output.model_copy(deep=True)
            super()._event(event)
        self._on_read()
        return getattr(self, name)


def run_plan(plan: Plan, state: TaskState, generate: Generate) -> Awaitable[TaskState]:
    """Run a plan; where nobody reads the transcript, without events of what each step changed."""
    quiet = isinstance(transcript(), QuietTranscript) and internals.knows_model_calls()
    if not quiet or plan.finish is not None or plan.cleanup is not None:
        return plan(state, generate)
    return _run_steps(plan, state, generate)


async def _run_steps(plan: Plan, state: TaskState, generate: Generate) -> TaskState:
    for step in plan.steps:
        internals.registry_unqualified_name(step)  # one without a name fails, as in an eval
        state = await step(state, generate)
        internals.set_sample_state(state)
        if state.completed:
            break
    return state


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


async def model_call(
    asked: PolicyCall, definitions: Sequence[Any]
) -> tuple[ModelOutput, ModelEvent]:
    """Ask the policy, and record its reply and usage.

    Args:
        asked: The call.
        definitions: Inspect's definitions of the tools, for the views of calls.

    Returns:
        Its reply, and the event of the call.
    """
    parts, model = internals.optional_names(), asked.model
    assert parts is not None
    await parts.wait_generate_dispatch(model, None)
    parts._check_limits_before_dispatch()
    model.verify_model_apis()
    event, complete = _record(asked)
    started = parts.sample_clock()
    try:
        output = await model.api.generate(
            input=asked.messages,
            tools=asked.tools,
            tool_choice=asked.tool_choice,
            config=asked.config,
        )
    except Exception as error:
        complete(error)
        raise
    except anyio.get_cancelled_exc_class():
        if event.pending:
            complete(RuntimeError("model call cancelled"))
        raise
    assert isinstance(output, ModelOutput)
    if parts.usage_input_tokens is not None and output.input_context_tokens is None:
        output.input_context_tokens = parts.usage_input_tokens(output.usage)
    output.time = parts.sample_clock() - started
    for choice in output.choices:
        for wanted in choice.message.tool_calls or []:
            wanted.view = parts.tool_call_view(wanted, definitions)
    complete(output)
    if output.usage:
        parts.record_and_check_model_usage(model, output.usage, role=model.role, output=output)
    parts.record_sample_model_fallback(output)
    try:
        parts.record_turn()
    finally:
        parts.set_active_sample_total_turns(parts.turn_count() or 0)
    if not output.empty and output.stop_reason == "content_filter":
        parts.report_refusal(output.completion)
    return output, event


Complete = Callable[[ModelOutput | Exception], None]
"""Completes the event of a call with its reply or error."""


def _record(asked: PolicyCall) -> tuple[ModelEvent, Complete]:
    """Record a call of the policy that begins, as Inspect does where somebody may read it."""
    running = transcript()
    if isinstance(running, QuietTranscript) and running.is_quiet:
        return _record_quietly(asked, running)
    complete, event = asked.model._record_model_interaction(
        input=asked.messages,
        tools=asked.tools,
        tool_choice=asked.tool_choice,
        config=asked.config,
        cache=None,
    )
    assert isinstance(event, ModelEvent)
    return event, lambda result: complete(result, None)


_EVENT = ModelEvent(
    model="", input=[], tools=[], tool_choice="auto", config=GenerateConfig(), output=ModelOutput()
)
"""What events of model calls are copied from, whose values need no check."""


def _record_quietly(asked: PolicyCall, running: QuietTranscript) -> tuple[ModelEvent, Complete]:
    parts = internals.optional_names()
    requested = getattr(parts, "_requested_model", None)
    event = _EVENT.model_copy(
        update={
            "model": str(asked.model),
            "role": asked.model.role,
            "requested_model": None if requested is None else requested.get(),
            "input": list(asked.messages),
            "tools": asked.tools,
            "tool_choice": asked.tool_choice,
            "config": asked.config.model_copy(),  # which calls share, and a reader may change it
            "pending": True,
            "uuid": internals.unique_id(),
        }
    )
    running._event(event)

    def complete(result: ModelOutput | Exception) -> None:
        if isinstance(result, ModelOutput):
            event.output = (
                _as_answered(result) if running.is_quiet else result.model_copy(deep=True)
            )
        else:
            event.error = parts.exception_message(result)  # type: ignore[union-attr]  # asked before
        event.pending = None

    return event, complete


def _as_answered(output: ModelOutput) -> ModelOutput:
    """Copy an output and its messages: ``react()`` writes what was submitted into its own."""
    choices = [
        choice.model_copy(update={"message": _own_fields(choice.message)})
        for choice in output.choices
    ]
    return output.model_copy(update={"choices": choices})


def _own_fields(message: ChatMessageAssistant) -> ChatMessageAssistant:
    content = message.content
    own = content if isinstance(content, str) else list(content)
    return message.model_copy(update={"content": own})
