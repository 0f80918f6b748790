"""A call of the policy as ``Model.generate`` makes it, without parts for networks and logs.

``Model.generate`` itself stays: the arguments of a call, its message limits, the merging of
options and refusals are Inspect's own. This replaces ``Model._generate`` and follows it
line by line. Left out are things that cannot happen to a parked call (retries, time-outs, streams,
the cache, a place in a connection pool) and copies of all messages for an event that nobody reads.
With any hook, monitor, bridge or display that looks at model calls, ``Model._generate`` is used.
"""

from __future__ import annotations

from collections.abc import Sequence
from copy import copy
from typing import Any
from uuid import uuid4

import anyio
from inspect_ai.event import ModelEvent
from inspect_ai.model import ChatMessage, GenerateConfig, Model, ModelOutput
from inspect_ai.tool import ToolChoice, ToolInfo

from inspect_tinker_plugin import inspect_internals as internals

CANCELLED = "RuntimeError('model call cancelled')"
"""The error in the event of a call that something has cancelled."""


async def model_call(
    model: Model,
    *,
    messages: list[ChatMessage],
    definitions: Sequence[Any],
    tools: list[ToolInfo],
    tool_choice: ToolChoice,
    config: GenerateConfig,
) -> tuple[ModelOutput, ModelEvent]:
    """Ask the policy, and record its reply and usage.

    Args:
        model: The policy.
        messages: The conversation.
        definitions: Inspect's definitions of the tools, for the views of calls.
        tools: The descriptions of the tools.
        tool_choice: Which of them it may call.
        config: The merged options.

    Returns:
        Its reply, and the event of the call.
    """
    parts = internals.optional_names()
    assert parts is not None
    await parts.wait_generate_dispatch(model, None)
    parts._check_limits_before_dispatch()
    model.verify_model_apis()
    event = _event(
        model=str(model),
        role=model.role,
        input=list(messages),
        tools=tools,
        tool_choice=tool_choice,
        config=config,
        pending=True,
    )
    internals.record_event(event)
    started = parts.sample_clock()
    try:
        output = await model.api.generate(
            input=messages, tools=tools, tool_choice=tool_choice, config=config
        )
    except Exception as error:
        event.error = parts.exception_message(error)
        event.pending = None
        raise
    except anyio.get_cancelled_exc_class():
        if event.pending:
            event.error = CANCELLED
            event.pending = None
        raise
    assert isinstance(output, ModelOutput)
    if output.input_context_tokens is None:
        output.input_context_tokens = parts.usage_input_tokens(output.usage)
    output.time = parts.sample_clock() - started
    for choice in output.choices:
        for call in choice.message.tool_calls or []:
            call.view = parts.tool_call_view(call, definitions)
    event.output = output
    event.pending = None
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


_TEMPLATE = ModelEvent(
    model="", input=[], tools=[], tool_choice="auto", config=GenerateConfig(), output=ModelOutput()
)


def _event(**fields: Any) -> ModelEvent:
    """Make an event without checking what comes from Inspect itself; its time is set by Inspect."""
    event = copy(_TEMPLATE)
    event.__dict__.update(fields, uuid=uuid4().hex, span_id=None)
    return event
