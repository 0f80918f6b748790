"""Sampled tokens as the assistant message that Inspect's solvers work with."""

from __future__ import annotations

import functools
from collections.abc import Sequence
from dataclasses import dataclass

from inspect_ai.model import ChatMessageAssistant, Content, ContentReasoning, ContentText
from inspect_ai.tool import ToolCall, ToolInfo
from tinker_cookbook.renderers import (
    ContentPart,
    Message,
    Renderer,
    TextPart,
)
from tinker_cookbook.tokenizer_utils import Tokenizer

from inspect_tinker_plugin.rl.tool_calls import read_calls


@dataclass(frozen=True)
class ParsedReply:
    """A reply in both worlds."""

    message: ChatMessageAssistant
    """The message for the solver."""

    rendering: Message
    """The same for the renderer, in case it has to be rendered again."""

    truncated: bool
    """The sampler's token limit cut the reply off."""

    stop_seq: str | None
    """The solver's stop sequence that the text was cut at."""

    continues: bool
    """Whether the solver saw all that was sampled, so that it may stand in the next prompt."""


class ReplyParser:
    """Parses replies of one renderer.

    Args:
        renderer: decides about the format of reasoning and tool calls.
        tokenizer: the renderer's tokenizer.
        stops: the renderer's own stop sequences.
        model: name of the policy in messages and logs.
    """

    def __init__(
        self,
        renderer: Renderer,
        tokenizer: Tokenizer,
        *,
        stops: list[str] | list[int],
        model: str,
    ) -> None:
        self._renderer = renderer
        self._tokenizer = tokenizer
        self._stop_ids = [stop for stop in stops if isinstance(stop, int)]
        self._stop_texts = [stop for stop in stops if isinstance(stop, str)]
        self._model = model

    @functools.cached_property
    def _opens_thinking(self) -> bool:
        """Whether the prompt ends within a block of reasoning, which replies then go on with."""
        prompt = self._renderer.build_generation_prompt([Message(role="user", content="x")])
        return str(self._tokenizer.decode(prompt.to_ints())).rstrip().endswith("<think>")

    def parse(
        self,
        tokens: Sequence[int],
        *,
        at_limit: bool,
        stop_seqs: Sequence[str],
        tools: Sequence[ToolInfo],
    ) -> ParsedReply:
        """Parse what the policy sampled.

        Args:
            tokens: all sampled tokens, with the stop token if there was one.
            at_limit: whether the sampler said that it ran into its token limit.
            stop_seqs: the solver's stop sequences; the text ends before the first of them.
            tools: tools on offer. Without any, a tool call is text, as with a provider
                that was given none.
        """
        body, stop, overrun = self._body(list(tokens))
        body, stop_seq, beyond = self._before(body, stop_seqs)
        rendering, ended = self._parse(body, stop)
        if stop_seq is not None:
            _cut_text(rendering, stop_seq)
        truncated = (at_limit or not ended) and stop_seq is None
        content, calls = self._contents(rendering, body, tools, truncated=truncated)
        return ParsedReply(
            message=ChatMessageAssistant(
                content=content, tool_calls=calls or None, source="generate", model=self._model
            ),
            rendering=_replayable(rendering),
            truncated=truncated,
            stop_seq=stop_seq,
            continues=not (overrun or beyond),
        )

    def _body(self, tokens: list[int]) -> tuple[list[int], int | None, bool]:
        """Return the tokens before the stop token, that token, and whether more came after.

        A stop string is left in the tokens: they need not be cut where it begins.
        """
        for index, token in enumerate(tokens):
            if token in self._stop_ids:
                return tokens[:index], token, index + 1 < len(tokens)
        if not self._stop_texts:
            return tokens, None, False
        text = str(self._tokenizer.decode(tokens))
        return tokens, None, any(text.count(stop) > 1 for stop in self._stop_texts)

    def _before(
        self, body: list[int], stop_seqs: Sequence[str]
    ) -> tuple[list[int], str | None, bool]:
        """Cut behind the token that completes the first of the solver's stop sequences."""
        if not stop_seqs:
            return body, None, False
        text = str(self._tokenizer.decode(body))
        found = [(at, seq) for seq in stop_seqs if seq and (at := text.find(seq)) >= 0]
        if not found:
            return body, None, False
        _, seq = min(found)
        low, high = 1, len(body)
        while low < high:
            middle = (low + high) // 2
            if seq in str(self._tokenizer.decode(body[:middle])):
                high = middle
            else:
                low = middle + 1
        return body[:low], seq, low < len(body)

    def _parse(self, body: list[int], stop: int | None) -> tuple[Message, bool]:
        """Return the renderer's message, and whether the reply came to an end."""
        if self._stop_ids:
            # A reply without a stop token is parsed as if it had one: renderers return the
            # raw text otherwise, with the reasoning as a part of the answer.
            end = self._stop_ids[0] if stop is None else stop
            message, _ = self._renderer.parse_response([*body, end])
            return message, stop is not None
        message, termination = self._renderer.parse_response(body)
        text = str(self._tokenizer.decode(body))
        return message, termination.is_clean or any(stop in text for stop in self._stop_texts)

    def _contents(
        self, rendering: Message, body: list[int], tools: Sequence[ToolInfo], *, truncated: bool
    ) -> tuple[str | list[Content], list[ToolCall]]:
        unparsed = rendering.get("unparsed_tool_calls", [])
        parsed = rendering.get("tool_calls", [])
        if not tools and (parsed or unparsed):
            text = str(self._tokenizer.decode(body)).rpartition("</think>")[2].lstrip("\n")
            thinking: list[ContentPart] = [
                part for part in _parts(rendering) if part["type"] == "thinking"
            ]
            return _inspect_content([*thinking, TextPart(type="text", text=text)], False), []
        parts = _parts(rendering)
        for call in unparsed:
            parts = [_without(part, call.raw_text) for part in parts]
        if truncated:
            parts = _open_thinking(parts, begun=self._opens_thinking)
        calls = read_calls(parsed, unparsed, tools)
        return _inspect_content(parts, bool(calls)), calls


def _parts(message: Message) -> list[ContentPart]:
    content = message["content"]
    return [TextPart(type="text", text=content)] if isinstance(content, str) else list(content)


def _inspect_content(parts: Sequence[ContentPart], calls: bool) -> str | list[Content]:
    """Return content for Inspect, without the white space that only frames other parts."""
    contents: list[Content] = []
    for part in parts:
        if part["type"] == "thinking":
            contents.append(ContentReasoning(reasoning=part["thinking"]))
        elif part["type"] == "text":
            text = part["text"].strip() if calls else part["text"]
            if contents and isinstance(contents[-1], ContentReasoning):
                text = text.lstrip("\n")
            if text.strip() or not (calls or contents):
                contents.append(ContentText(text=text))
    if all(isinstance(content, ContentText) for content in contents):
        separator = "\n" if calls else ""
        return separator.join(c.text for c in contents if isinstance(c, ContentText))
    return contents


def _cut_text(message: Message, stop_seq: str) -> None:
    """End the message's text before the stop sequence, in place."""
    parts = _parts(message)
    for index, part in enumerate(parts):
        if part["type"] == "text" and (at := part["text"].find(stop_seq)) >= 0:
            parts = [*parts[:index], TextPart(type="text", text=part["text"][:at])]
            break
    only_text = isinstance(message["content"], str) and parts and parts[0]["type"] == "text"
    message["content"] = parts[0]["text"] if only_text else parts  # type: ignore[typeddict-item]


def _without(part: ContentPart, raw: str) -> ContentPart:
    """Drop a call that was opened but never closed; what follows it belongs to it."""
    if part["type"] != "text" or raw not in part["text"]:
        return part
    return TextPart(type="text", text=part["text"][: part["text"].index(raw)])


def _open_thinking(parts: list[ContentPart], *, begun: bool) -> list[ContentPart]:
    """Read a block of reasoning that the token limit left open as reasoning.

    Args:
        parts: content of a reply.
        begun: whether the prompt opened the block already.
    """
    if begun and all(part["type"] == "text" for part in parts):
        text = "".join(part["text"] for part in parts if part["type"] == "text")
        if text and "</think>" not in text:
            return [{"type": "thinking", "thinking": text.strip("\n")}]
    result: list[ContentPart] = []
    for part in parts:
        if part["type"] == "text" and "<think>" in part["text"]:
            before, _, after = part["text"].partition("<think>")
            if before.strip():
                result.append(TextPart(type="text", text=before))
            result.append({"type": "thinking", "thinking": after.strip("\n")})
        else:
            result.append(part)
    return result


def _replayable(message: Message) -> Message:
    """Keep calls that did not parse as text: renderers leave them out."""
    unparsed = message.pop("unparsed_tool_calls", [])
    if unparsed:
        parts = _parts(message)
        text = "".join(part["text"] for part in parts if part["type"] == "text")
        missing = [call.raw_text for call in unparsed if call.raw_text not in text]
        if missing:
            message["content"] = [*parts, TextPart(type="text", text="\n".join(missing))]
    return message
