"""The fast paths: what an episode leaves out because nobody uses its result.

Nothing of Inspect is replaced for them; they are methods of our own model and transcript.

A call of the policy is ``Model.generate``'s own up to ``Model._generate``: the arguments, the
message limits, the merging of options and refusals. :func:`ask_policy` stands for
``Model._generate`` and follows it line by line. Left out are things that cannot happen to a parked
call (retries, time-outs, streams, the cache, a place in a connection pool). With any hook, monitor,
bridge or display that looks at model calls, or another release of Inspect than those that were
tried, ``Model._generate`` is used.

Without a log, the event of a call holds the messages themselves, not a copy of each as it was, and
the transcript is a list. A task may still read it (a scorer that counts tool calls, say): then it
becomes an ordinary transcript, and later episodes of that task record copies from the beginning.

``INSPECT_RL_SLOW=1`` turns them off, to find out whether one is at fault.
"""

from __future__ import annotations

import os
from collections.abc import Awaitable, Callable, Sequence
from typing import Any

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
"""Environment variable that turns the fast paths of the episodes off that are then made."""


def are_on() -> bool:
    """Whether fast paths may be taken."""
    return not os.environ.get(SLOW)


class QuietTranscript(internals.Transcript):
    """A transcript that nobody is expected to read; a reader still finds everything recorded.

    Nothing of Inspect's class is set up before it is needed. So there are no cycles of
    references either, and an episode's end frees its events without the garbage collector.
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


async def ask_policy(
    model: Model,
    messages: list[ChatMessage],
    definitions: Sequence[Any],
    tools: list[ToolInfo],
    tool_choice: ToolChoice,
    config: GenerateConfig,
) -> tuple[ModelOutput, ModelEvent]:
    """Ask the policy, and record its reply and usage.

    Returns:
        Its reply, and the event of the call.
    """
    names = internals.model_call_names()
    await names.wait_generate_dispatch(model, None)
    names._check_limits_before_dispatch()
    model.verify_model_apis()
    asked: dict[str, Any] = {
        "input": messages,
        "tools": tools,
        "tool_choice": tool_choice,
        "config": config,
    }
    complete, event = _record(model, asked)
    started = names.sample_clock()
    try:
        output = await model.api.generate(**asked)
    except Exception as error:
        complete(error, None)
        raise
    except anyio.get_cancelled_exc_class():
        if event.pending:
            complete(RuntimeError("model call cancelled"), None)
        raise
    assert isinstance(output, ModelOutput)
    if names.usage_input_tokens is not None and output.input_context_tokens is None:
        output.input_context_tokens = names.usage_input_tokens(output.usage)
    output.time = names.sample_clock() - started
    for choice in output.choices:
        for wanted in choice.message.tool_calls or []:
            wanted.view = names.tool_call_view(wanted, definitions)
    complete(output, None)
    if output.usage:
        names.record_and_check_model_usage(model, output.usage, role=model.role, output=output)
    names.record_sample_model_fallback(output)
    try:
        names.record_turn()
    finally:
        names.set_active_sample_total_turns(names.turn_count() or 0)
    if not output.empty and output.stop_reason == "content_filter":
        names.report_refusal(output.completion)
    return output, event


Complete = Callable[[ModelOutput | Exception, None], None]
"""Completes the event of a call with its reply or error."""

_EVENT = ModelEvent(
    model="", input=[], tools=[], tool_choice="auto", config=GenerateConfig(), output=ModelOutput()
)
"""What events of model calls are copied from, whose values need no check."""


def _record(model: Model, asked: dict[str, Any]) -> tuple[Complete, ModelEvent]:
    """Record a call that begins: as Inspect does, or for a transcript that nobody reads."""
    running = transcript()
    if not isinstance(running, QuietTranscript) or not running.is_quiet:
        complete, event = model._record_model_interaction(**asked, cache=None)
        assert isinstance(event, ModelEvent)
        return complete, event
    names = internals.model_call_names()
    event = _EVENT.model_copy(
        update={
            **asked,
            "model": str(model),
            "role": model.role,
            "requested_model": names._requested_model.get(),
            "input": list(asked["input"]),
            "config": asked["config"].model_copy(),  # which calls share, and a reader may change it
            "pending": True,
            "uuid": internals.unique_id(),
        }
    )
    running._event(event)

    def complete_quietly(result: ModelOutput | Exception, call: None) -> None:
        if isinstance(result, Exception):
            event.error = names.exception_message(result)
        else:
            event.output = _copy_reply(result) if running.is_quiet else result.model_copy(deep=True)
        event.pending = None

    return complete_quietly, event


def _copy_reply(output: ModelOutput) -> ModelOutput:
    """Copy an output and its messages: ``react()`` writes what was submitted into its own."""
    choices = [
        choice.model_copy(update={"message": _copy_message(choice.message)})
        for choice in output.choices
    ]
    return output.model_copy(update={"choices": choices})


def _copy_message(message: ChatMessageAssistant) -> ChatMessageAssistant:
    content = message.content
    own = content if isinstance(content, str) else list(content)
    return message.model_copy(update={"content": own})
