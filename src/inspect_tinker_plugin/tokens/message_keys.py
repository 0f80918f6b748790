"""Decides whether two messages are the same: their keys, and what a model API loses on the way.

Keys hold what reaches the tokens, no more. They are compared, never rendered: text is compared to
the character (no Unicode forms, no white space), arguments by the types and the order of what
they hold: ``true`` and ``1``, ``1`` and ``1.0``, and two orders of the same names all differ.
What a model API may write otherwise is up to its dialect.

A program under Inspect's agent bridge keeps its conversation in its API's format and sends
it back with every call. Message ids do not survive that, and some content does not either. Each
dialect lists what it is known to lose; any other difference was made by the program.
docs/agents.md has the same as a table.
"""

from __future__ import annotations

import json
import marshal
import re
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

from inspect_ai.model import (
    ChatMessage,
    ChatMessageAssistant,
    Content,
    ContentReasoning,
    ContentText,
)
from inspect_ai.tool import ToolCall, ToolInfo, ToolParams


class MessageKey(NamedTuple):
    """Everything in a message that determines its tokens. Equal keys mean equal tokens."""

    role: str
    content: str | tuple[tuple[str, ...], ...]
    calls: tuple[tuple[str, str, str | bytes, str | None], ...] = ()
    tool: tuple[str | None, str | None] | None = None


def message_key(message: ChatMessage) -> MessageKey:
    """Return the key of a message; later changes to the message do not affect it."""
    said = message.content
    content = said if isinstance(said, str) else _content_key(said)
    if message.role == "tool":
        if message.error is not None:
            content = f"Error: {message.error.message}"
        return MessageKey("tool", content, (), (message.tool_call_id, message.function))
    if message.role == "assistant" and message.tool_calls:
        calls = tuple([_call_key(call) for call in message.tool_calls])
        return MessageKey("assistant", content, calls)
    return MessageKey(message.role, content)


ToolsKey = tuple[str, ...]
"""The tools offered: of each its name, its description and its parameters as JSON."""


def tools_key(tools: Sequence[ToolInfo]) -> ToolsKey:
    """Return a key of the tools offered."""
    return tuple(
        text
        for tool in tools
        for text in (tool.name, tool.description, _parameters_key(tool.parameters))
    )


def _parameters_key(parameters: ToolParams) -> str:
    try:
        return parameters.model_dump_json()
    except ValueError:  # half a surrogate pair, which a program's tools may have
        return json.dumps(parameters.model_dump())


def _call_key(call: ToolCall) -> tuple[str, str, str | bytes, str | None]:
    try:
        arguments: str | bytes = marshal.dumps(call.arguments, _BY_VALUE)
    except ValueError:  # a solver put in something else than JSON
        arguments = repr(call.arguments)
    return (call.id, call.function, arguments, call.parse_error)


_BY_VALUE = 2
"""Format of ``marshal`` in which equal bytes are values of equal types, in equal order."""


def _content_key(content: Sequence[Content]) -> str | tuple[tuple[str, ...], ...]:
    if all(isinstance(part, ContentText) for part in content):
        return "\n".join(part.text for part in content if isinstance(part, ContentText))
    return tuple(map(_part_key, content))


def _part_key(content: Content) -> tuple[str, ...]:
    if content.type == "text":
        return ("text", content.text)
    if content.type == "image":
        return ("image", content.image)
    if content.type == "reasoning":
        hidden = "redacted" if content.redacted else ""
        texts = (content.reasoning, content.summary or "", content.signature or "")
        return ("reasoning", hidden, *texts)
    return (content.type, content.model_dump_json(exclude={"internal"}))


NO_CONTENT = "(no content)"
"""What Inspect writes where an API refuses empty text."""

_THOUGHT = re.compile(r"<think[^<>]*>(.*?)</think>", re.DOTALL)


@dataclass(frozen=True)
class Dialect:
    """What one API does to a reply on its way to the program and back."""

    keeps_reasoning: bool
    """Whether the API has a field for the reasoning of any model. If it has none, Inspect
    sends it as text in ``<think>`` tags, which a program may keep or lose."""

    joins_text_to_calls: bool = False
    """Whether text after a tool result may come back in the message with the call."""

    def carries(self, reply: ChatMessageAssistant, arrived: ChatMessageAssistant) -> bool:
        """Return whether a message is a given reply, apart from what the API is known to lose."""
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
    "chat": Dialect(keeps_reasoning=False, joins_text_to_calls=True),
    "responses": Dialect(keeps_reasoning=True),
    "anthropic": Dialect(keeps_reasoning=False),
    # A bridge into this process, for libraries that speak any of them.
    "unknown": Dialect(keeps_reasoning=True, joins_text_to_calls=True),
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
                closed, end, rest = part.text.rpartition("</think>")
                pieces = _THOUGHT.split(closed + end)  # where each tag has an end to find
                pieces[-1] += rest
                texts += [piece.strip() for piece in pieces[::2]]
                thoughts += [(piece.strip(), True) for piece in pieces[1::2]]
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
