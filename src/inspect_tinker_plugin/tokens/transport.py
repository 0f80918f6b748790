"""How a reply of the policy may change on its way through a model API and back.

A program under Inspect's agent bridge keeps its conversation in its API's format and sends
it back with every call. Message ids do not survive that, and some content does not either. Each
dialect lists what it is known to lose; any other difference was made by the program.
docs/agents.md has the same as a table.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from inspect_ai.model import (
    ChatMessageAssistant,
    ContentReasoning,
    ContentText,
)
from inspect_ai.tool import ToolCall

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

    Names in an object have no order. Values of different types differ: ``1`` is neither
    ``true`` nor ``1.0``.
    """
    if type(one) is not type(other):
        return False
    if isinstance(one, dict):
        return one.keys() == other.keys() and all(same_json(one[k], other[k]) for k in one)
    if isinstance(one, list):
        return len(one) == len(other) and all(map(same_json, one, other))
    if isinstance(one, float):
        return repr(one) == repr(other)  # tells -0.0 from 0.0, and equates NaN with itself
    return bool(one == other)
