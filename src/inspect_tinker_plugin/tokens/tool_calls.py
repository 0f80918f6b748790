"""Converts a renderer's tool calls, parsed or not, as Inspect's own providers would."""

from __future__ import annotations

import json
import re
from collections.abc import Sequence
from uuid import uuid4

from inspect_ai.tool import ToolCall, ToolInfo
from tinker_cookbook.renderers import ToolCall as RendererToolCall
from tinker_cookbook.renderers import UnparsedToolCall
from tinker_cookbook.renderers.base import UNTERMINATED_TOOL_BLOCK_ERROR

from inspect_tinker_plugin.inspect_internals import parse_tool_call, tool_parse_error_message

_NAME = re.compile(r'"name"\s*:\s*"([^"\\]+)"|<function=([^>\s]+)>')
_ARGUMENTS = re.compile(r'"arguments"\s*:\s*')
_TAGS = re.compile(r"^\s*(?:<[^<>]*>\s*)?(.*?)\s*(?:</[^<>]*>\s*)?$", re.DOTALL)


def read_calls(
    parsed: Sequence[RendererToolCall],
    unparsed: Sequence[UnparsedToolCall],
    tools: Sequence[ToolInfo],
) -> list[ToolCall]:
    """Return the calls of a reply; those that did not parse come last, with ``parse_error``.

    Their ids are new, whatever the reply says: models number their calls from zero in every
    reply, and a program that keeps its own history is recognised by these ids alone.
    """
    calls = [
        parse_tool_call(_new_id(), call.function.name, call.function.arguments, list(tools))
        for call in parsed
    ]
    calls.extend(_read_unparsed(call, tools) for call in unparsed)
    return calls


def _new_id() -> str:
    return f"call_{uuid4().hex[:16]}"


def _read_unparsed(call: UnparsedToolCall, tools: Sequence[ToolInfo]) -> ToolCall:
    """Return a call that did not parse as Inspect's own providers would.

    They receive name and arguments separately, so both are looked for in the raw text. Then
    arguments that are not an object but fit (a bare string) still make a call, and others give
    the same message to the model.
    """
    match = _TAGS.match(call.raw_text)
    inner = match[1] if match else call.raw_text
    named = _NAME.search(inner)
    name = (named[1] or named[2]) if named else "unknown"
    try:
        value = json.loads(inner)
    except ValueError:
        value = None
    closed = not call.error.startswith(UNTERMINATED_TOOL_BLOCK_ERROR)
    if closed and isinstance(value, dict) and isinstance(value.get("name"), str):
        arguments = value.get("arguments")
        given = arguments if isinstance(arguments, str | None) else json.dumps(arguments)
        return parse_tool_call(_new_id(), value["name"], given, list(tools))
    if named and (at := _ARGUMENTS.search(inner)):
        raw = inner[at.end() :].strip()
        raw = raw[:-1].rstrip() if raw.endswith("}") else raw
        attempt = parse_tool_call(_new_id(), name, raw, list(tools))
        if attempt.parse_error:
            return attempt
    error = call.error.removeprefix("Invalid JSON: ")
    return ToolCall(
        id=_new_id(),
        function=name,
        arguments={},
        parse_error=tool_parse_error_message(inner, ValueError(error)),
    )
