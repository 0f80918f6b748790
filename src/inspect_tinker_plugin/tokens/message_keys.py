"""Keys that tell whether two messages are the same: they hold what reaches the tokens, no more.

Keys are compared, never rendered: text is compared to the character (no Unicode forms, no white
space), arguments as the JSON that a renderer would write, so that ``true`` and ``1``, ``1`` and
``1.0``, and two orders of the same names all differ.
"""

from __future__ import annotations

import json
import marshal
from collections.abc import Iterable, Iterator, Sequence
from itertools import chain, compress, repeat
from operator import attrgetter, is_
from typing import Any, NamedTuple

from inspect_ai.model import (
    ChatMessage,
    ChatMessageAssistant,
    ChatMessageSystem,
    ChatMessageTool,
    ChatMessageUser,
    Content,
    ContentImage,
    ContentReasoning,
    ContentText,
)
from inspect_ai.tool import ToolCall, ToolInfo


class MessageKey(NamedTuple):
    """Everything in a message that determines its tokens. Equal keys mean equal tokens."""

    role: str
    content: str | tuple[tuple[str, str], ...]
    calls: tuple[tuple[str, str, str, str | None], ...] = ()
    tool: tuple[str | None, str | None] | None = None


def message_key(message: ChatMessage) -> MessageKey:
    """Return the key of a message; later changes to the message do not affect it."""
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
    """Return a key of the tools offered."""
    return "\n".join(tool.model_dump_json(exclude={"options"}) for tool in tools)


def _call_key(call: ToolCall) -> tuple[str, str, str, str | None]:
    return (call.id, call.function, arguments_json(call.arguments), call.parse_error)


def arguments_json(arguments: Any) -> str:
    """Return arguments as a renderer writes them."""
    try:
        return json.dumps(arguments, ensure_ascii=False)
    except (TypeError, ValueError):  # a solver put in something that JSON cannot hold
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
    """Snapshot of a conversation's messages, to check quickly that they are unchanged.

    Nothing reports that a solver changes a message in place, and it may pass copies or
    rebuild messages, so each turn has to look at all of them. This is done column by column, in
    a few calls into C: texts are compared by identity first, and nothing is rendered or copied.
    So a turn costs 0.3 us more per message before it (benchmarks/tokens.py has the ratios).
    Messages that the columns cannot decide are compared by key.
    """

    __slots__ = ("_columns", "keys")

    def __init__(self, messages: Sequence[ChatMessage] = ()) -> None:
        self.keys: list[MessageKey] = []
        self._columns: list[list[Any]] | None = _columns(())
        self.add(messages)

    def add(self, messages: Sequence[ChatMessage]) -> None:
        """Append messages to the snapshot."""
        self.keys.extend(map(message_key, messages))
        more = _columns(messages)
        if self._columns is None or more is None:
            self._columns = None
            return
        for column, added in zip(self._columns, more, strict=True):
            column.extend(added)

    def begins(self, messages: Sequence[ChatMessage], count: int) -> bool:
        """Return whether the first ``count`` messages equal the first ones of the snapshot."""
        head = messages[:count]
        now = None if self._columns is None else _columns(head)
        if now is not None and self._columns is not None:
            columns = zip(self._columns, now, strict=True)
            if all(before[: len(column)] == column for before, column in columns):
                return True
        return all(
            message_key(message) == key for message, key in zip(head, self.keys, strict=False)
        )


_reasoning = attrgetter("reasoning", "summary", "redacted", "signature")
_KINDS = {ChatMessageSystem, ChatMessageUser, ChatMessageAssistant, ChatMessageTool}
_PARTS = {ContentText, ContentReasoning, ContentImage}


def _columns(messages: Sequence[ChatMessage]) -> list[list[Any]] | None:
    """Return everything that determines the keys of messages, in columns of immutable values.

    Equal columns mean equal keys, but not the reverse: a key accepts several spellings. The
    columns of the first messages are prefixes of the columns of all. ``None`` for messages that
    hold something unusual.
    """
    try:
        kinds: list[Any] = list(map(type, messages))
        contents = list(map(attrgetter("content"), messages))
        results = list(_those(ChatMessageTool, messages, kinds))
        calls_of = list(
            map(attrgetter("tool_calls"), _those(ChatMessageAssistant, messages, kinds))
        )
        calls = list(chain.from_iterable(filter(None, calls_of)))
        arguments = list(map(attrgetter("arguments"), calls))
        names = list(chain.from_iterable(arguments))
        parts = [part for content in contents if type(content) is not str for part in content]
        part_kinds: list[Any] = list(map(type, parts))
        if not (_KINDS.issuperset(kinds) and _PARTS.issuperset(part_kinds)):
            return None
        if not {str}.issuperset(map(type, names)):  # 1 and True compare equal as names
            return None
        return [
            kinds,
            [content if type(content) is str else len(content) for content in contents],
            part_kinds,
            list(map(attrgetter("text"), _those(ContentText, parts, part_kinds))),
            list(map(attrgetter("image"), _those(ContentImage, parts, part_kinds))),
            list(map(_reasoning, _those(ContentReasoning, parts, part_kinds))),
            list(map(attrgetter("tool_call_id"), results)),
            list(map(attrgetter("function"), results)),
            [None if result.error is None else result.error.message for result in results],
            [len(calls) if calls else 0 for calls in calls_of],
            list(map(attrgetter("id"), calls)),
            list(map(attrgetter("function"), calls)),
            list(map(attrgetter("parse_error"), calls)),
            list(map(len, arguments)),
            names,
            [
                value if type(value) is str else marshal.dumps(value, _BY_VALUE)
                for value in chain.from_iterable(map(dict.values, arguments))
            ],
        ]
    except (AttributeError, TypeError, ValueError):  # a solver put in an invalid value
        return None


_BY_VALUE = 2
"""Format of ``marshal`` in which equal bytes are values of equal types, in equal order."""


def _those(kind: type, things: Iterable[Any], kinds: Iterable[type]) -> Iterator[Any]:
    return compress(things, map(is_, kinds, repeat(kind)))
