"""What makes two messages the same: what reaches the tokens, and nothing else.

Keys are compared, never rendered: text is compared to the character (no Unicode forms, no white
space), arguments as the JSON that a renderer would write, so that ``true`` and ``1``, ``1`` and
``1.0``, and two orders of the same names all differ.
"""

from __future__ import annotations

import copy
import json
from collections.abc import Sequence
from typing import Any, NamedTuple

from inspect_ai.model import (
    ChatMessage,
    ChatMessageAssistant,
    ChatMessageTool,
    Content,
    ContentText,
)
from inspect_ai.tool import ToolCall, ToolInfo


class MessageKey(NamedTuple):
    """All of a message that decides about its tokens. Equal keys, equal tokens."""

    role: str
    content: str | tuple[tuple[str, str], ...]
    calls: tuple[tuple[str, str, str, str | None], ...] = ()
    tool: tuple[str | None, str | None] | None = None


def message_key(message: ChatMessage) -> MessageKey:
    """Return what identifies a message; changing the message later leaves the key alone."""
    if isinstance(message, ChatMessageTool):
        content = _content_key(message.content)
        if message.error is not None:
            content = f"Error: {message.error.message}"
        return MessageKey("tool", content, (), (message.tool_call_id, message.function))
    content = _content_key(message.content)
    if isinstance(message, ChatMessageAssistant) and message.tool_calls:
        return MessageKey("assistant", content, tuple(map(_call_key, message.tool_calls)))
    return MessageKey(message.role, content)


def tools_key(tools: Sequence[ToolInfo]) -> str:
    """Return what identifies the tools on offer."""
    return "\n".join(tool.model_dump_json(exclude={"options"}) for tool in tools)


def _call_key(call: ToolCall) -> tuple[str, str, str, str | None]:
    return (call.id, call.function, arguments_json(call.arguments), call.parse_error)


def arguments_json(arguments: Any) -> str:
    """Return arguments as a renderer writes them."""
    try:
        return json.dumps(arguments, ensure_ascii=False)
    except (TypeError, ValueError):  # a solver put in what no JSON can hold
        return repr(arguments)


def _content_key(content: str | Sequence[Content]) -> str | tuple[tuple[str, str], ...]:
    if isinstance(content, str):
        return content
    if all(isinstance(part, ContentText) for part in content):
        return "\n".join(part.text for part in content if isinstance(part, ContentText))
    return tuple(map(_part_key, content))


def _part_key(content: Content) -> tuple[str, str]:
    if content.type == "text":
        return ("text", content.text)
    if content.type == "image":
        return ("image", content.image)
    return (content.type, content.model_dump_json(exclude={"internal"}))


class Seen:
    """A message as it was at an earlier turn, so that one look tells that it is unchanged.

    A conversation of six hundred turns is handed over as copies at every turn. Copies share their
    strings, so identity settles most messages; whatever it does not settle, the key does.
    """

    __slots__ = ("calls", "content", "key", "kind", "tool")

    def __init__(self, message: ChatMessage, key: MessageKey) -> None:
        self.key = key
        self.kind = type(message)
        self.content = message.content if isinstance(message.content, str) else None
        self.tool: tuple[str | None, str | None] | None = None
        self.calls: tuple[tuple[str, str, dict[str, Any]], ...] | None = None
        if isinstance(message, ChatMessageTool) and message.error is None:
            self.tool = (message.tool_call_id, message.function)
        elif isinstance(message, ChatMessageAssistant) and message.tool_calls:
            if all(_plain(call) for call in message.tool_calls):
                self.calls = tuple(
                    (call.id, call.function, copy.copy(call.arguments))
                    for call in message.tool_calls
                )
            else:
                self.content = None

    def is_unchanged(self, message: ChatMessage) -> bool:
        """Return whether a message has the same key still."""
        fields = message.__dict__
        if self.content is None or fields["content"] != self.content:
            return message_key(message) == self.key
        if self.kind is not type(message):
            return False
        if self.kind is ChatMessageTool:
            if fields["error"] is None and self.tool == (
                fields["tool_call_id"],
                fields["function"],
            ):
                return True
            return message_key(message) == self.key
        if self.kind is ChatMessageAssistant:
            return self._same_calls(fields["tool_calls"]) or message_key(message) == self.key
        return True

    def _same_calls(self, calls: list[ToolCall] | None) -> bool:
        if not calls or self.calls is None:
            return not calls and self.calls is None
        if len(calls) != len(self.calls):
            return False
        for call, (call_id, function, arguments) in zip(calls, self.calls, strict=True):
            if (
                call.id != call_id
                or call.function != function
                or call.parse_error is not None
                or call.arguments != arguments
            ):
                return False
        return True


def _plain(call: ToolCall) -> bool:
    """Whether ``==`` tells all differences of a call's arguments: one string, or none."""
    arguments = call.arguments
    return (
        call.parse_error is None
        and len(arguments) <= 1
        and all(type(value) is str for value in arguments.values())
    )
