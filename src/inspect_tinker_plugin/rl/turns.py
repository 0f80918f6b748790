"""Which earlier prompt a request continues: the turns of an episode, as a tree.

A solver may run several conversations at once (sub-agents, forks) or go back to an earlier
turn. Each model call is a turn; a turn whose prompt begins with the prompt and the sampled
tokens of another is its child. Messages are compared by what reaches the tokens, so that
copies, and messages that were built again with a new id, still match.
"""

from __future__ import annotations

import copy
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import tinker
from inspect_ai.model import ChatMessage, ChatMessageAssistant, ChatMessageTool, Content
from inspect_ai.tool import ToolCall, ToolInfo

MAX_CONVERSATIONS = 8
"""Conversations of one episode that are remembered; the least recently used is forgotten."""


class MessageKey(NamedTuple):
    """All of a message that decides about its tokens. Equal keys, equal tokens."""

    role: str
    content: str | tuple[tuple[str, str], ...]
    calls: tuple[tuple[str, str, dict[str, Any], str | None], ...] = ()
    tool: tuple[str | None, str | None, str | None] | None = None


def message_key(message: ChatMessage) -> MessageKey:
    """Return what identifies a message; it refers to live arguments, see :func:`frozen`."""
    content = message.content
    key = content if isinstance(content, str) else tuple(map(_content_key, content))
    if isinstance(message, ChatMessageAssistant) and message.tool_calls:
        return MessageKey(message.role, key, tuple(map(_call_key, message.tool_calls)))
    if isinstance(message, ChatMessageTool):
        error = message.error.message if message.error else None
        return MessageKey(message.role, key, (), (message.tool_call_id, message.function, error))
    return MessageKey(message.role, key)


def frozen(key: MessageKey) -> MessageKey:
    """Return the key cut off from arguments that a solver may change in place."""
    return key._replace(calls=copy.deepcopy(key.calls)) if key.calls else key


def tools_key(tools: Sequence[ToolInfo]) -> str:
    """Return what identifies the tools on offer."""
    return "\n".join(tool.model_dump_json(exclude={"options"}) for tool in tools)


def _call_key(call: ToolCall) -> tuple[str, str, dict[str, Any], str | None]:
    return (call.id, call.function, call.arguments, call.parse_error)


def _content_key(content: Content) -> tuple[str, str]:
    if content.type == "text":
        return ("text", content.text)
    if content.type == "image":
        return ("image", content.image)
    return (content.type, content.model_dump_json(exclude={"internal"}))


@dataclass(eq=False)
class Turn:
    """One prompt, and the reply to it once there is one."""

    tools: str
    keys: tuple[MessageKey, ...]
    """The request's messages that the parent's prompt and reply do not hold already."""

    chunks: list[tinker.ModelInputChunk]
    """What follows the parent's prompt: its sampled tokens first, then the new messages."""

    length: int
    """Tokens of the whole prompt."""

    parent: Turn | None = None
    sampled: tuple[int, ...] = ()
    reply: MessageKey | None = None
    reply_id: str | None = None
    continues: bool = False
    """Whether the sampled tokens may stand in a later prompt as they are."""

    def path(self) -> list[Turn]:
        """Return the turns from the root to this one."""
        turns = [self]
        while (parent := turns[-1].parent) is not None:
            turns.append(parent)
        turns.reverse()
        return turns

    def all_chunks(self) -> list[tinker.ModelInputChunk]:
        """Return the chunks of the whole prompt."""
        return [chunk for turn in self.path() for chunk in turn.chunks]


class Match(NamedTuple):
    """An earlier turn that a request builds on."""

    turn: Turn
    position: int
    """Messages of the request that are covered; the reply of ``turn`` is the last of them."""

    repeats: bool
    """Whether the request asks for the very prompt of ``turn`` once more."""

    same_id: bool


class Turns:
    """The turns of one episode, newest conversation last."""

    def __init__(self) -> None:
        self._leaves: list[Turn] = []

    def add(self, turn: Turn) -> None:
        """Remember a turn; it takes the place of the conversation that it continues."""
        self._leaves = [leaf for leaf in self._leaves if leaf is not turn.parent]
        self._leaves.append(turn)
        del self._leaves[:-MAX_CONVERSATIONS]

    def find(
        self, tools: str, keys: Sequence[MessageKey], messages: Sequence[ChatMessage]
    ) -> Match | None:
        """Return the turn that covers most of a request, the most recent of equals."""
        best: Match | None = None
        for leaf in reversed(self._leaves):
            match = _match(leaf, tools, keys, messages) if leaf.tools == tools else None
            if match and (best is None or _rank(match) > _rank(best)):
                best = match
        return best


def _rank(match: Match) -> tuple[int, bool]:
    return (match.position, match.same_id)


def _match(
    leaf: Turn, tools: str, keys: Sequence[MessageKey], messages: Sequence[ChatMessage]
) -> Match | None:
    """Follow a conversation from its start for as long as the request agrees with it."""
    found: Match | None = None
    position = 0
    for turn in leaf.path():
        end = position + len(turn.keys)
        if turn.tools != tools or tuple(keys[position:end]) != turn.keys:
            break
        if end == len(keys):
            return Match(turn, end, True, False)
        if not turn.continues or keys[end] != turn.reply:
            break
        position = end + 1
        found = Match(turn, position, False, messages[end].id == turn.reply_id)
    return found
