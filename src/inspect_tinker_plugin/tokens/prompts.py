"""Renders prompts: only what a conversation gained since the policy's last reply.

The tokens of new messages do not depend on the text before them, but on its structure: that a
message is not the first, that a reply with these tool calls precedes it. So the new
messages are rendered after a stub of that structure, one user message and a one-letter reply
with the same calls, and everything up to the end of the stub is removed again. This
needs only the renderer's public ``build_generation_prompt`` and costs the same however long
the conversation is. The first prompts that the episodes of a group have in common are rendered
once and kept (:class:`PromptCache`).
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import tinker
from tinker_cookbook.renderers import (
    ContentPart,
    Message,
    Renderer,
    TextPart,
    ThinkingPart,
)
from tinker_cookbook.renderers import ToolCall as RendererToolCall
from tinker_cookbook.tokenizer_utils import Tokenizer

from inspect_tinker_plugin.tokens.message_keys import MessageKey, ToolsKey
from inspect_tinker_plugin.tokens.messages import CallName

_STUB = "x"

FlatPrompt = list[int | tinker.ModelInputChunk]
"""Tokens, with every other chunk (an image) as one element: the cookbook's flat form."""


@dataclass(frozen=True)
class PromptTail:
    """The tokens that follow a reply."""

    terminator: tuple[int, ...]
    """Tokens that end a reply; needed when the sampled tokens do not end with them."""

    chunks: list[tinker.ModelInputChunk]
    """The new messages and the opening of the next reply."""


def flatten(chunks: Sequence[tinker.ModelInputChunk]) -> FlatPrompt:
    """Return chunks as one list of tokens (and of other chunks)."""
    flat: FlatPrompt = []
    for chunk in chunks:
        if isinstance(chunk, tinker.EncodedTextChunk):
            flat.extend(chunk.tokens)
        else:
            flat.append(chunk)
    return flat


def merge_chunks(chunks: Sequence[tinker.ModelInputChunk]) -> list[tinker.ModelInputChunk]:
    """Return chunks with adjacent text chunks merged."""
    result: list[tinker.ModelInputChunk] = []
    tokens: list[int] = []
    for chunk in chunks:
        if isinstance(chunk, tinker.EncodedTextChunk):
            tokens.extend(chunk.tokens)
            continue
        if tokens:
            result.append(tinker.EncodedTextChunk(tokens=tokens))
            tokens = []
        result.append(chunk)
    if tokens:
        result.append(tinker.EncodedTextChunk(tokens=tokens))
    return result


class Extension:
    """Renders tails for one renderer."""

    def __init__(
        self, renderer: Renderer, tokenizer: Tokenizer, stops: list[str] | list[int]
    ) -> None:
        self._renderer = renderer
        self._tokenizer = tokenizer
        self._stop_ids = frozenset(stop for stop in stops if isinstance(stop, int))
        self._stop_texts = [stop for stop in stops if isinstance(stop, str)]
        self._heads: dict[bool, FlatPrompt] = {}
        # A format that opens every reply with reasoning writes replies without it differently.
        self._stubs: list[str | list[ContentPart]] = [
            _STUB,
            [ThinkingPart(type="thinking", thinking=_STUB), TextPart(type="text", text=_STUB)],
        ]

    def after_reply(
        self, *, calls: Sequence[CallName], follows_user: bool, new: Sequence[Message]
    ) -> PromptTail | None:
        """Render what follows a reply.

        Args:
            calls: ids and names of the tool calls of the reply.
            follows_user: whether there is a user message anywhere before the reply.
            new: messages after the reply.

        Returns:
            The tail, or ``None`` when the end of the stub cannot be found with certainty and the
            whole conversation has to be rendered.
        """
        anchor = Message(role="user" if follows_user else "system", content=_STUB)
        for content in self._stubs:
            tail = self._behind(anchor, _stub_reply(content, calls), calls, new)
            if tail is not None:
                self._stubs.sort(key=lambda other: other is not content)
                return tail
        return None

    def _behind(
        self,
        anchor: Message,
        stub: Message,
        calls: Sequence[CallName],
        new: Sequence[Message],
    ) -> PromptTail | None:
        try:
            chunks = self._renderer.build_generation_prompt([anchor, stub, *new]).chunks
            head = self._head(anchor)
            if flatten(chunks)[: len(head)] != head:
                return None
            if self._stop_texts:
                return self._split_at_text(chunks, len(head))
            # Some formats end a reply by the next message's role token, and have no end at all
            # before an unusual role: then the first stop token is not the stub's.
            usual = bool(new) and new[0]["role"] == ("tool" if calls else "user")
            if not usual and (
                self._first_stop(chunks, len(head)) != self._stub_length(anchor, stub, calls)
            ):
                return None
            return self._split_at_token(chunks, len(head))
        except Exception:
            # The renderer may refuse the stub and not the conversation. Rendering the whole
            # conversation, which happens next, shows which, and reports what is wrong.
            return None

    def close_reply(self, sampled: Sequence[int], tail: PromptTail) -> list[tinker.ModelInputChunk]:
        """Return a reply's own tokens, with the end of turn if they lack it."""
        tokens = list(sampled)
        if self._stop_texts:
            text = str(self._tokenizer.decode(tokens))
            ended = any(stop in text for stop in self._stop_texts)
        else:
            ended = tuple(tokens[-len(tail.terminator) :]) == tail.terminator
        if not ended:
            tokens.extend(tail.terminator)
        return [tinker.EncodedTextChunk(tokens=tokens)]

    def _head(self, anchor: Message) -> FlatPrompt:
        user = anchor["role"] == "user"
        if user not in self._heads:
            self._heads[user] = flatten(self._renderer.build_generation_prompt([anchor]).chunks)
        return self._heads[user]

    def _stub_length(self, anchor: Message, stub: Message, calls: Sequence[CallName]) -> int | None:
        """Return where the stub ends when the usual messages follow it."""
        usual = [
            Message(role="tool", content=_STUB, tool_call_id=call.id, name=call.name)
            for call in calls
        ] or [Message(role="user", content=_STUB)]
        chunks = self._renderer.build_generation_prompt([anchor, stub, *usual]).chunks
        return self._first_stop(chunks, len(self._head(anchor)))

    def _first_stop(self, chunks: Sequence[tinker.ModelInputChunk], start: int) -> int | None:
        flat = flatten(chunks)
        return next((i for i in range(start, len(flat)) if flat[i] in self._stop_ids), None)

    def _split_at_token(
        self, chunks: Sequence[tinker.ModelInputChunk], start: int
    ) -> PromptTail | None:
        position = 0
        for number, chunk in enumerate(chunks):
            if not isinstance(chunk, tinker.EncodedTextChunk):
                position += 1
                continue
            tokens = list(chunk.tokens)
            for index, token in enumerate(tokens):
                if position + index >= start and token in self._stop_ids:
                    rest = tokens[index + 1 :]
                    first = [tinker.EncodedTextChunk(tokens=rest)] if rest else []
                    return PromptTail((token,), [*first, *chunks[number + 1 :]])
            position += len(tokens)
        return None

    def _split_at_text(
        self, chunks: Sequence[tinker.ModelInputChunk], start: int
    ) -> PromptTail | None:
        """Split where the text behind the head is the stub and a stop string, no more."""
        position = 0
        seen: list[int] = []
        for number, chunk in enumerate(chunks):
            if not isinstance(chunk, tinker.EncodedTextChunk):
                return None
            skip = max(0, start - position)
            seen.extend(list(chunk.tokens)[skip:])
            position += len(chunk.tokens)
            text = str(self._tokenizer.decode(seen)).lstrip()
            for stop in self._stop_texts:
                if text == _STUB + stop:
                    terminator = self._tokenizer.encode(stop, add_special_tokens=False)
                    return PromptTail(tuple(terminator), list(chunks[number + 1 :]))
            if len(text) > len(_STUB) + max(map(len, self._stop_texts)):
                return None
        return None


def _stub_reply(content: str | list[ContentPart], calls: Sequence[CallName]) -> Message:
    stub = Message(role="assistant", content=content)
    if calls:
        stub["tool_calls"] = [
            RendererToolCall(
                id=call.id,
                function=RendererToolCall.FunctionBody(name=call.name, arguments="{}"),
            )
            for call in calls
        ]
    return stub


PromptKey = tuple[ToolsKey, tuple[MessageKey, ...]]
"""What determines a prompt: the tools offered, and the contents of its messages."""


_MOST_PROMPTS = 8


class PromptCache:
    """The first prompts that the episodes of a group have in common; pickles empty.

    A group asks for one prompt, or for a few when its solver adds something random.
    """

    def __init__(self) -> None:
        self._prompts: dict[PromptKey, list[tinker.ModelInputChunk]] = {}

    def find_or_make(
        self, key: PromptKey, make: Callable[[], list[tinker.ModelInputChunk]]
    ) -> list[tinker.ModelInputChunk]:
        """Return the chunks of a prompt; it is rendered the first time."""
        if key not in self._prompts:
            self._prompts[key] = make()
            if len(self._prompts) > _MOST_PROMPTS:
                del self._prompts[next(iter(self._prompts))]
        return self._prompts[key]

    def __reduce__(self) -> tuple[type[PromptCache], tuple[()]]:
        """Pickle without the prompts: another process renders its own."""
        return (type(self), ())
