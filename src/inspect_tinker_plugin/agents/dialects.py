"""The dialects of model APIs: their errors, and a reply of the policy as events of a stream.

The reply is complete before the first event, as with Inspect's own proxy; a client that
asked for a stream gets the same reply, cut into pieces. ``tests/agents/test_proxy_parity.py``
compares errors and events with those of Inspect's proxy.
"""

from __future__ import annotations

import itertools
import json
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any

Event = dict[str, Any]

_TEXT = 48
_ARGUMENTS = 32
_JSON = 20


@dataclass(frozen=True)
class Api:
    """One API: its method in the bridge, required parts of a request, and its form of errors."""

    method: str
    required: tuple[str, ...]
    error: Callable[[int, str, Mapping[str, Any]], Event]

    def missing(self, name: str) -> Event:
        """Return the error for a request without a required part."""
        more = {"param": name, "code": "missing_required_parameter"}
        return self.error(400, f"Missing required parameter: '{name}'.", more)


def _openai_error(status: int, message: str, body: Mapping[str, Any]) -> Event:
    kind = "invalid_request_error" if 400 <= status < 500 else "api_error"
    return {"error": {"message": message, "type": kind, "param": None, "code": None, **body}}


_ANTHROPIC_ERRORS = {
    401: "authentication_error",
    403: "permission_error",
    404: "not_found_error",
    413: "request_too_large",
    429: "rate_limit_error",
    529: "overloaded_error",
}


def _anthropic_error(status: int, message: str, body: Mapping[str, Any]) -> Event:
    usual = "invalid_request_error" if 400 <= status < 500 else "api_error"
    kind = _ANTHROPIC_ERRORS.get(status, usual)
    return {"type": "error", "error": {"type": kind, "message": message}}


_GOOGLE_ERRORS = {
    400: "INVALID_ARGUMENT",
    401: "UNAUTHENTICATED",
    403: "PERMISSION_DENIED",
    404: "NOT_FOUND",
    429: "RESOURCE_EXHAUSTED",
    500: "INTERNAL",
    503: "UNAVAILABLE",
}


def _google_error(status: int, message: str, body: Mapping[str, Any]) -> Event:
    kind = _GOOGLE_ERRORS.get(status, "UNKNOWN")
    return {"error": {"code": status, "message": message, "status": kind}}


CHAT = Api("generate_completions", ("model", "messages"), _openai_error)
RESPONSES = Api("generate_responses", ("model", "input"), _openai_error)
ANTHROPIC = Api("generate_anthropic", ("model", "messages"), _anthropic_error)
GOOGLE = Api("generate_google", (), _google_error)


def encode_data(event: Event) -> bytes:
    """Encode an event as Chat Completions does: only its data."""
    return f"data: {json.dumps(event, ensure_ascii=False)}\n\n".encode()


def encode_named(event: Event) -> bytes:
    """Encode an event as Responses and Anthropic do: its type and its data."""
    return f"event: {event['type']}\n".encode() + encode_data(event)


def _pieces(text: str, size: int = _TEXT) -> Iterator[str]:
    return (text[at : at + size] for at in range(0, len(text), size))


# Chat Completions


def completion_events(completion: Event, *, with_usage: Callable[[], bool]) -> Iterator[Event]:
    """Yield the chunks of a chat completion; the caller adds ``[DONE]``.

    Args:
        completion: The completion.
        with_usage: Whether the client wants the usage; asked behind all other chunks.
    """
    head = {
        "id": completion.get("id"),
        "object": "chat.completion.chunk",
        "created": completion.get("created"),
        "model": completion.get("model"),
    }
    tail = {}
    if completion.get("system_fingerprint") is not None:
        tail["system_fingerprint"] = completion["system_fingerprint"]
    for index, choice in enumerate(completion.get("choices", [])):
        for delta in _deltas(choice.get("message") or {}):
            choice_delta = {"index": index, "delta": delta, "finish_reason": None}
            yield {**head, "choices": [choice_delta], **tail}
        last = {"index": index, "delta": {}, "finish_reason": choice.get("finish_reason")}
        if choice.get("logprobs"):
            last["logprobs"] = choice["logprobs"]
        yield {**head, "choices": [last], **tail}
    if with_usage() and completion.get("usage"):
        yield {**head, "choices": [], **tail, "usage": completion["usage"]}


def _deltas(message: Event) -> Iterator[Event]:
    yield {"role": message.get("role", "assistant")}
    content = message.get("content")
    if isinstance(content, str):
        for piece in _pieces(content):
            yield {"content": piece}
    for index, call in enumerate(message.get("tool_calls") or ()):
        function = call.get("function") or {}
        head = {"index": index, "id": call.get("id"), "type": call.get("type")}
        yield {"tool_calls": [{**head, "function": {"name": function.get("name", "")}}]}
        # In one piece, with id and type again: some clients join the arguments of all calls.
        if arguments := function.get("arguments", ""):
            yield {"tool_calls": [{**head, "function": {"arguments": arguments}}]}


# Responses


def response_events(response: Event) -> Iterator[Event]:
    """Yield the events of a response."""
    numbers = itertools.count(1)

    def event(kind: str, data: Event) -> Event:
        return {**data, "sequence_number": next(numbers), "type": f"response.{kind}"}

    # Without the items, each of which has its own events: OpenAI's client refuses a second copy.
    begun = {**response, "status": "in_progress", "output": []}
    yield event("created", {"response": begun})
    yield event("in_progress", {"response": begun})
    for index, item in enumerate(response.get("output", [])):
        yield event("output_item.added", _item(item, index, "in_progress"))
        place = {"item_id": item.get("id", f"item_{index}"), "output_index": index}
        for kind, data in _item_events(item):
            yield event(kind, {**place, **data})
        yield event("output_item.done", _item(item, index, "completed"))
    end = "incomplete" if response.get("status") == "incomplete" else "completed"
    yield event(end, {"response": {**response, "status": end}})


def _item(item: Event, index: int, status: str) -> Event:
    # A custom tool call ends with its status, which is added if it has none.
    has_status = "status" in item or (status, item.get("type")) == ("completed", "custom_tool_call")
    shown = {**item, "status": status} if has_status else item
    return {"item": shown, "output_index": index}


def _item_events(item: Event) -> Iterator[tuple[str, Event]]:
    kind = item.get("type", "")
    if kind == "message":
        for index, content in enumerate(item.get("content", [])):
            yield from _content_events(content, index)
    elif kind == "reasoning":
        yield from _reasoning_events(item)
    elif kind == "function_call":
        text = item.get("arguments", "")
        yield from _stream_text("function_call_arguments", "arguments", text, size=_ARGUMENTS)
    elif kind == "custom_tool_call":
        text = item.get("input", "")
        yield from _stream_text("custom_tool_call_input", "input", text, size=_ARGUMENTS)
    # Items of a provider's own tools, which no policy makes, are sent whole.


def _stream_text(
    kind: str, field: str, text: str, *, size: int = _TEXT, **more: Any
) -> Iterator[tuple[str, Event]]:
    for piece in _pieces(text, size):
        yield f"{kind}.delta", {**more, "delta": piece}
    yield f"{kind}.done", {**more, field: text}


def _content_events(content: Event, index: int) -> Iterator[tuple[str, Event]]:
    kind, field = content.get("type", ""), ""
    more: Event = {"content_index": index}
    if kind in ("output_text", "refusal"):
        field = "text" if kind == "output_text" else "refusal"
    yield "content_part.added", {**more, "part": {**content, field: ""} if field else content}
    if field:
        shown = {**more, "logprobs": []} if field == "text" else more
        yield from _stream_text(kind, field, content.get(field, ""), **shown)
    yield "content_part.done", {**more, "part": content}


def _reasoning_events(item: Event) -> Iterator[tuple[str, Event]]:
    for index, content in enumerate(item.get("content") or ()):
        if content.get("type") == "reasoning_text":
            text = content.get("text", "")
            yield from _stream_text("reasoning_text", "text", text, content_index=index)
    for index, part in enumerate(item.get("summary") or ()):
        yield "reasoning_summary_part.added", {"summary_index": index, "part": part}
        if part.get("type") == "summary_text":
            text = part.get("text", "")
            yield from _stream_text("reasoning_summary_text", "text", text, summary_index=index)
        yield "reasoning_summary_part.done", {"summary_index": index, "part": part}


# Anthropic

PING: Event = {"type": "ping"}
_USAGE = (
    "input_tokens",
    "cache_creation_input_tokens",
    "cache_read_input_tokens",
    "server_tool_use",
)


def message_start(id: str, model: object) -> Event:
    """Return the first event, which is sent before the reply is there."""
    message = {
        "id": id,
        "type": "message",
        "role": "assistant",
        "content": [],
        "model": model,
        "stop_reason": None,
        "stop_sequence": None,
        "usage": {"input_tokens": 0, "output_tokens": 0},
    }
    return {"type": "message_start", "message": message}


def message_events(message: Event) -> Iterator[Event]:
    """Yield the events of a message after its first."""
    for index, block in enumerate(message.get("content", [])):
        if index and index % 3 == 0:
            yield PING
        opened = _open_block(block)
        if opened is None:
            continue
        yield {"type": "content_block_start", "index": index, "content_block": opened}
        for delta in _block_deltas(block):
            yield {"type": "content_block_delta", "index": index, "delta": delta}
        yield {"type": "content_block_stop", "index": index}
    delta = {name: message.get(name) for name in ("stop_reason", "stop_sequence")}
    usage = message.get("usage", {})
    shown = {name: usage[name] for name in _USAGE if name in usage}
    shown = {"output_tokens": usage.get("output_tokens", 0), **shown}
    yield {"type": "message_delta", "delta": delta, "usage": shown}
    yield {"type": "message_stop"}


def _open_block(block: Event) -> Event | None:
    kind = block.get("type")
    if kind == "text":
        return {"type": kind, "text": ""}
    if kind == "thinking":
        return {"type": kind, "thinking": ""}
    if kind in ("tool_use", "server_tool_use"):
        return {"type": kind, "id": block.get("id"), "name": block.get("name"), "input": {}}
    if kind == "web_search_tool_result":
        content = block.get("content", [])
        return {"type": kind, "tool_use_id": block.get("tool_use_id"), "content": content}
    return None


def _block_deltas(block: Event) -> Iterator[Event]:
    kind = block["type"]
    if kind == "text":
        for piece in _pieces(block.get("text", "")):
            yield {"type": "text_delta", "text": piece}
    elif kind == "thinking":
        for piece in _pieces(block.get("thinking", "")):
            yield {"type": "thinking_delta", "thinking": piece}
        if block.get("signature"):
            yield {"type": "signature_delta", "signature": block["signature"]}
    elif kind in ("tool_use", "server_tool_use"):
        for piece in _pieces(json.dumps(block.get("input", {}), ensure_ascii=False), _JSON):
            yield {"type": "input_json_delta", "partial_json": piece}
