"""Decides whether two messages are the same: their keys, and what a model API loses on the way.

Keys hold what reaches the tokens, no more. They are compared, never rendered: text is compared to
the character (no Unicode forms, no white space), arguments as the JSON that a renderer would
write, so that ``true`` and ``1``, ``1`` and ``1.0``, and two orders of the same names all
differ. What a model API may write otherwise is up to its dialect.

A program under Inspect's agent bridge keeps its conversation in its API's format and sends
it back with every call. Message ids do not survive that, and some content does not either. Each
dialect lists what it is known to lose; any other difference was made by the program.
docs/agents.md has the same as a table.
"""

from __future__ import annotations

import json
import marshal
import re
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
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
from inspect_ai.tool import ToolCall, ToolInfo, ToolParams
from inspect_ai.util import JSONSchema

PLAIN_TYPES = frozenset({str, int, float, bool, type(None)})
"""Types of values that hold nothing else and never change."""


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


ToolsKey = tuple[str | bytes, ...]
"""The tools offered, each by what a renderer may write of it."""


def tools_key(tools: Sequence[ToolInfo]) -> ToolsKey:
    """Return a key of the tools offered."""
    return tuple([_simple_tool_key(tool) or _tool_key(tool) for tool in tools])


def _tool_key(tool: ToolInfo) -> str:
    named = json.dumps([tool.name, tool.description])
    try:
        return named + tool.parameters.model_dump_json()
    except ValueError:  # half a surrogate pair, which a program's tools may have
        return named + json.dumps(tool.parameters.model_dump())


def _simple_tool_key(tool: ToolInfo) -> bytes | None:
    """Return the key of a tool whose description is plain, in a fifth of the time."""
    if type(tool) is not ToolInfo or type(tool.parameters) is not ToolParams:
        return None
    try:
        return marshal.dumps(
            [tool.name, tool.description, _plain(vars(tool.parameters))], _BY_VALUE
        )
    except ValueError:
        return None


_SCHEMA = [*JSONSchema.model_fields]


def _plain(value: Any) -> Any:
    """Return a schema, or a part of one, as lists and dictionaries of plain values.

    Raises:
        ValueError: It has something else, of which ``marshal`` may see a part only.
    """
    kind = type(value)
    if kind in PLAIN_TYPES:
        return value
    if kind is JSONSchema:
        value, kind = vars(value), dict
        if [*value] == _SCHEMA:
            return (_plain([*value.values()]),)
    if kind is dict:
        names, values = list(value), list(value.values())
        if not PLAIN_TYPES.issuperset(map(type, names)):
            raise ValueError(names)
        return names, _plain(values)
    if kind is list:
        return value if PLAIN_TYPES.issuperset(map(type, value)) else [*map(_plain, value)]
    raise ValueError(kind)


def _call_key(call: ToolCall) -> tuple[str, str, str, str | None]:
    return (call.id, call.function, arguments_json(call.arguments), call.parse_error)


_written = json.JSONEncoder(ensure_ascii=False).encode


def arguments_json(arguments: Any) -> str:
    """Return arguments as a renderer writes them."""
    try:
        return _written(arguments)
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
    Messages that the columns cannot decide are compared by key, and so are the first ones: most
    snapshots of one-turn episodes are never looked at.
    """

    __slots__ = ("_columns", "_unusual", "keys")

    def __init__(self, messages: Sequence[ChatMessage] = ()) -> None:
        self.keys: list[MessageKey] = []
        self._columns: list[list[Any]] | None = None
        """``None`` before the first comparison, and when keys alone can decide."""
        self._unusual = False
        if messages:
            self.add(messages)

    def add(self, messages: Sequence[ChatMessage], first: MessageKey | None = None) -> None:
        """Append messages to the snapshot; the key of the first may be known already."""
        if first is None:
            self.keys.extend(map(message_key, messages))
        else:
            self.keys += [first, *map(message_key, messages[1:])]
        if self._columns is None:
            return
        more = _columns(messages)
        if more is None:
            self._columns, self._unusual = None, True
            return
        for column, added in zip(self._columns, more, strict=True):
            column.extend(added)

    def begins(self, messages: Sequence[ChatMessage], count: int) -> bool:
        """Return whether the first ``count`` messages equal the first ones of the snapshot."""
        head = messages[:count]
        now = _columns(head) if self._columns else None
        if now is not None and self._columns is not None:
            columns = zip(self._columns, now, strict=True)
            if all(before[: len(column)] == column for before, column in columns):
                return True
        equal = all(
            message_key(message) == key for message, key in zip(head, self.keys, strict=False)
        )
        if equal and self._columns is None and not self._unusual and count == len(self.keys):
            self._columns = _columns(head)
            self._unusual = self._columns is None
        return equal


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
            *(_part_columns(parts, part_kinds) if parts else ([], [], [])),
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


def _part_columns(parts: Sequence[Content], kinds: Sequence[type]) -> Iterator[list[Any]]:
    yield list(map(attrgetter("text"), _those(ContentText, parts, kinds)))
    yield list(map(attrgetter("image"), _those(ContentImage, parts, kinds)))
    yield list(map(_reasoning, _those(ContentReasoning, parts, kinds)))


_BY_VALUE = 2
"""Format of ``marshal`` in which equal bytes are values of equal types, in equal order."""


def _those(kind: type, things: Iterable[Any], kinds: Iterable[type]) -> Iterator[Any]:
    return compress(things, map(is_, kinds, repeat(kind)))


NO_CONTENT = "(no content)"
"""What Inspect writes where an API refuses empty text."""

_THOUGHT = re.compile(r"<think[^>]*>(.*?)</think>", re.DOTALL)


@dataclass(frozen=True)
class Dialect:
    """What one API does to a reply on its way to the program and back."""

    name: str

    keeps_reasoning: bool
    """Whether the API has a field for the reasoning of any model. If it has none, Inspect
    sends it as text in ``<think>`` tags, which a program may keep or lose."""

    joins_text_to_calls: bool = False
    """Whether text after a tool result may come back in the message with the call."""

    def carried(self, reply: ChatMessageAssistant, arrived: ChatMessageAssistant) -> bool:
        """Return whether a message is a given reply, apart from what the API is known to lose.

        Args:
            reply: the reply as the policy's solver got it.
            arrived: the message that came back.
        """
        return _same_calls(reply.tool_calls or [], arrived.tool_calls or []) and self._same_content(
            reply, arrived
        )

    def _same_content(self, reply: ChatMessageAssistant, arrived: ChatMessageAssistant) -> bool:
        said, got = _Spoken.of(reply), _Spoken.of(arrived)
        if said is None or got is None or not _same_text(said.texts, got.texts):
            return False
        thoughts = [thought for thought, _ in said.thoughts]
        arrived_thoughts = [thought for thought, _ in got.thoughts]
        if arrived_thoughts == thoughts:
            return True
        written = [thought for thought, is_text in said.thoughts if is_text]
        return not self.keeps_reasoning and arrived_thoughts == written


DIALECTS = {
    dialect.name: dialect
    for dialect in (
        Dialect("chat", keeps_reasoning=False, joins_text_to_calls=True),
        Dialect("responses", keeps_reasoning=True),
        Dialect("anthropic", keeps_reasoning=False),
    )
}


@dataclass(frozen=True)
class _Spoken:
    """The visible text of a message, in pieces, and its reasoning."""

    texts: list[str]
    thoughts: list[tuple[str, bool]]
    """Each with whether it was part of the text, in tags."""

    @classmethod
    def of(cls, message: ChatMessageAssistant) -> _Spoken | None:
        """Take a message apart; ``None`` when it holds more than text and reasoning."""
        content = message.content
        parts = [ContentText(text=content)] if isinstance(content, str) else content
        texts: list[str] = []
        thoughts: list[tuple[str, bool]] = []
        for part in parts:
            if isinstance(part, ContentReasoning):
                text = (part.summary or "") if part.redacted else part.reasoning
                thoughts.append((text.strip(), False))
            elif isinstance(part, ContentText):
                for number, piece in enumerate(_THOUGHT.split(part.text)):
                    if number % 2:
                        thoughts.append((piece.strip(), True))
                    else:
                        texts.append(piece.strip())
            else:
                return None
        return cls(
            [text for text in texts if text],
            [(text, is_text) for text, is_text in thoughts if text],
        )


def spoken_letters(message: ChatMessageAssistant) -> str:
    """Return the visible text of a message without white space, as a key to look replies up by."""
    spoken = _Spoken.of(message)
    return "" if spoken is None else "".join("".join(spoken.texts).split())


def _same_text(said: Sequence[str], got: Sequence[str]) -> bool:
    """Compare texts, ignoring white space at the ends of pieces and placeholders for empty text."""
    arrived = "\n".join(got)
    if not said:
        return arrived in ("", NO_CONTENT)
    position = 0
    for piece in said:
        while position < len(arrived) and arrived[position].isspace():
            position += 1
        if not arrived.startswith(piece, position):
            return False
        position += len(piece)
    return position == len(arrived)


def _same_calls(said: Sequence[ToolCall], got: Sequence[ToolCall]) -> bool:
    if len(said) != len(got):
        return False
    return all(
        mine.id == theirs.id
        and mine.function == theirs.function
        and theirs.parse_error in (None, mine.parse_error)
        and same_json(mine.arguments, theirs.arguments)
        for mine, theirs in zip(said, got, strict=True)
    )


def same_json(one: Any, other: Any) -> bool:
    """Return whether two values are the same JSON value, however it was written.

    Names in an object have no order. Numbers are equal by value, as JavaScript writes ``1.0`` as
    ``1``; a number is neither ``true`` nor a text.
    """
    if type(one) in _NUMBERS and type(other) in _NUMBERS:
        return bool(one == other or (one != one and other != other))  # or both are NaN
    if type(one) is not type(other):
        return False
    if isinstance(one, dict):
        return one.keys() == other.keys() and all(same_json(one[k], other[k]) for k in one)
    if isinstance(one, list):
        return len(one) == len(other) and all(map(same_json, one, other))
    return bool(one == other)


_NUMBERS = frozenset({int, float})
