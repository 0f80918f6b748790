"""Turns sampled tokens into the assistant message that Inspect's solvers receive."""

from __future__ import annotations

import functools
import json
import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from inspect_ai.model import ChatMessageAssistant, Content, ContentReasoning, ContentText
from inspect_ai.tool import ToolCall, ToolInfo
from inspect_ai.util import JSONSchema
from tinker_cookbook.renderers import (
    ContentPart,
    Message,
    ParseTermination,
    Renderer,
    TextPart,
    UnparsedToolCall,
)
from tinker_cookbook.renderers import ToolCall as RendererToolCall
from tinker_cookbook.tokenizer_utils import Tokenizer

from inspect_tinker_plugin.contracts.wording import spell_all_out, spell_out
from inspect_tinker_plugin.inspect_internals import (
    unique_id,
)
from inspect_tinker_plugin.tokens.messages import Write, read_calls, written_parts
from inspect_tinker_plugin.tokens.tokenizers import ControlTokens

_BLANKS_IN_CALL = re.compile(r"(?>.*?<\W{0,2}tool.call[^<>\s]*>).*\s{1000}", re.DOTALL)
"""What takes some renderers hours: they look for the parts of a call in the cube of its blanks."""

_CALL_BEGINS = re.compile(r"(?:<\W?tool.calls.(?:section.)?begin\W?>\s*)?<\W?tool.call.begin\W?>")
"""Tokens that begin a call, or a section of calls and its first one: Kimi K2, DeepSeek V3."""


@dataclass(frozen=True)
class ParsedReply:
    """A parsed reply, for Inspect and for the renderer."""

    message: ChatMessageAssistant
    """The message for the solver."""

    rendering: Message
    """The same for the renderer, in case the reply has to be rendered again."""

    call_ids: dict[str, str]
    """The policy's own ids of its tool calls, by the ids that the solver sees."""

    truncated: bool
    """Whether the token limit of the sampler, or of the solver, cut the reply off."""

    stop_seq: str | None
    """The solver's stop sequence that the text was cut at."""

    kept: int
    """Number of sampled tokens that the solver saw: those before its stop sequence, within its
    token limit, and up to the end of the turn."""

    continues: bool
    """Whether those tokens say exactly what the solver saw, so that the next prompt may contain
    them. They do not where a stop sequence begins within a token."""


class ReplyParser:
    """Parses replies of one renderer."""

    def __init__(
        self,
        renderer: Renderer,
        tokenizer: Tokenizer,
        *,
        stops: list[str] | list[int],
        control: ControlTokens,
        model: str,
    ) -> None:
        self._control = control
        self._renderer = renderer
        self._tokenizer = tokenizer
        self._stop_ids = [stop for stop in stops if isinstance(stop, int)]
        self._stop_texts = [stop for stop in stops if isinstance(stop, str)]
        self._model = model

    @functools.cached_property
    def opens_thinking(self) -> bool:
        """Whether the prompt ends within a block of reasoning, which replies then continue."""
        prompt = self._renderer.build_generation_prompt([Message(role="user", content="x")])
        return str(self._tokenizer.decode(prompt.to_ints())).rstrip().endswith("<think>")

    @functools.cached_property
    def _reads_thinking(self) -> bool:
        """Whether the format has reasoning between these tags; others cannot even render it."""
        thought = self._tokenizer.encode("<think>x</think>y", add_special_tokens=False)
        message, _ = self._parse(list(thought), None)
        return any(part["type"] == "thinking" for part in _parts(message))

    def parse(
        self,
        tokens: Sequence[int],
        *,
        stop_reason: str | None,
        stop_seqs: Sequence[str],
        max_tokens: int | None,
        tools: Sequence[ToolInfo],
    ) -> ParsedReply:
        """Parse what the policy sampled.

        Args:
            tokens: all sampled tokens, with the stop token if there was one.
            stop_reason: the sampler's ``"length"`` or ``"stop"``, if it is known. After a stop the
                reply is complete, even when the stop token itself is left out.
            stop_seqs: the solver's stop sequences; the text ends before the first of them.
            max_tokens: how many tokens the solver wants at most, the stop token included; the
                reply ends there, as if the sampler had reached that limit.
            tools: tools offered. Without any, a tool call is text, as with a provider
                that was given none.
        """
        body, stop, ended_at = self._body(list(tokens))
        if max_tokens and ended_at > max_tokens:
            body, stop, ended_at = list(tokens[:max_tokens]), None, max_tokens
            stop_reason = "length"
        kept, stop_seq, exact = self._before(body, stop_seqs)
        if stop_seq is None:
            kept, exact = ended_at, True
        elif exact:
            body, stop = body[:kept], None
        rendering, ended = self._parse(body, stop)
        if stop_seq is not None and not exact:
            _cut_text(rendering, stop_seq)
        complete = stop_reason == "stop" or (ended and stop_reason != "length")
        truncated = not complete and stop_seq is None
        if truncated and self._reads_thinking:
            self._open_thinking(rendering, body)
        content, calls = self._contents(rendering, body, tools)
        call_ids = _own_ids(rendering, calls)
        return ParsedReply(
            message=ChatMessageAssistant(
                id=unique_id(),
                content=content,
                tool_calls=calls or None,
                source="generate",
                model=self._model,
            ),
            rendering=_replayable(
                rendering,
                write=self._writer(body),
            ),
            call_ids=call_ids,
            truncated=truncated,
            stop_seq=stop_seq,
            kept=kept,
            continues=exact,
        )

    def _writer(self, body: list[int]) -> Write:
        """Return how the reply's texts are written where it is rendered again.

        What the policy sampled as a control token stays one, what it spelled stays text. Where
        there is both, all becomes text.
        """
        control = self._control
        sampled = sum(map(control.ids.__contains__, body))
        if sampled and len(control.find_spelled(str(self._tokenizer.decode(body)))) == sampled:
            return spell_out
        return lambda text: control.break_control(spell_out(text))

    def _body(self, tokens: list[int]) -> tuple[list[int], int | None, int]:
        """Return the tokens before the stop token, that token, and the length of the turn.

        A stop string stays in the tokens: it need not begin at a token's start. Tokens that a
        sampler sent after the end of the turn do not belong to it.
        """
        ends = [tokens.index(stop) for stop in self._stop_ids if stop in tokens]
        if ends:
            first = min(ends)
            return tokens[:first], tokens[first], first + 1
        text = str(self._tokenizer.decode(tokens)) if self._stop_texts else ""
        found = [stop for stop in self._stop_texts if stop in text]
        if not found:
            return tokens, None, len(tokens)
        end = self._first_with(tokens, min(found, key=text.index))
        return tokens[:end], None, end

    def _first_with(self, tokens: list[int], text: str) -> int:
        """Return how many tokens it takes until the decoded text contains a given text."""
        low, high = 1, len(tokens)
        while low < high:
            middle = (low + high) // 2
            if text in str(self._tokenizer.decode(tokens[:middle])):
                high = middle
            else:
                low = middle + 1
        return low

    def _before(self, body: list[int], stop_seqs: Sequence[str]) -> tuple[int, str | None, bool]:
        """Find the first of the solver's stop sequences.

        Returns:
            How many tokens stand wholly before it, the sequence, and whether they say all of the
            text before it.
        """
        if not stop_seqs:
            return len(body), None, True
        text = str(self._tokenizer.decode(body))
        found = [(at, seq) for seq in stop_seqs if seq and (at := text.find(seq)) >= 0]
        if not found:
            return len(body), None, True
        at, seq = min(found)
        kept = self._first_with(body, seq) - 1
        while kept and len(said := str(self._tokenizer.decode(body[:kept]))) >= at:
            if said == text[:at]:
                return kept, seq, True
            kept -= 1
        return kept, seq, at == 0

    def _parse(self, body: list[int], stop: int | None) -> tuple[Message, bool]:
        """Return the renderer's message, and whether the reply is complete."""
        text = str(self._tokenizer.decode(body))
        if self._stop_ids:
            # A reply without a stop token is parsed as if it had one: renderers return the
            # raw text otherwise, with the reasoning as a part of the answer.
            end = self._stop_ids[0] if stop is None else stop
            message, _ = self._read(text, [*body, end])
            return message, stop is not None
        message, termination = self._read(text, body)
        return message, termination.is_clean or any(stop in text for stop in self._stop_texts)

    def _read(self, text: str, tokens: list[int]) -> tuple[Message, ParseTermination]:
        """Let the renderer parse; what makes it or Python's JSON reader give up is a call unparsed.

        Renderers expect only ``JSONDecodeError`` of it. Numbers with thousands of digits and lists
        thousands deep raise others, and no policy may end its episode with them.
        """
        try:
            if blanks := _BLANKS_IN_CALL.match(text):
                raise json.JSONDecodeError("over 1,000 blanks in a row", text, blanks.end())
            message, termination = self._renderer.parse_response(tokens)
            if message["content"] == text and self._is_silent(message, tokens):
                message["content"] = ""
            self._note_lost_call(message, text, tokens)
            return message, termination
        except (ValueError, RecursionError) as error:
            digits = "integer string conversion" in str(error)  # it has no type of its own
            if not digits and not isinstance(error, RecursionError | json.JSONDecodeError):
                raise
            raw = UnparsedToolCall(raw_text=text, error=str(error))
            message = Message(role="assistant", content=text, unparsed_tool_calls=[raw])
            return message, ParseTermination.MALFORMED

    def _note_lost_call(self, message: Message, text: str, tokens: Sequence[int]) -> None:
        """Note a call that the renderer has passed over: without a name, or in a second section."""
        said = text.rpartition("</think>")[2]
        begun = [each.start() for each in _CALL_BEGINS.finditer(said)]
        if not begun or "unparsed_tool_calls" in message:
            return
        control = [
            str(self._tokenizer.decode([each])) for each in tokens if each in self._control.ids
        ]
        sampled = sum(bool(_CALL_BEGINS.fullmatch(each)) for each in control)  # others are spelled
        if min(len(begun), sampled) > len(message.get("tool_calls", [])):
            raw = UnparsedToolCall(raw_text=said[begun[-1] :], error="it has another form")
            message["unparsed_tool_calls"] = [raw]

    def _is_silent(self, message: Message, tokens: list[int]) -> bool:
        """Whether a reply has no text: the renderer of gpt-oss takes all of it for the text then.

        It has calls, or a letter at its end would be its only text.
        """
        if message.get("tool_calls"):
            return True
        if not self._control.ids.intersection(tokens[:-1]):
            return False
        letter = self._tokenizer.encode("x", add_special_tokens=False)
        longer, _ = self._renderer.parse_response([*tokens[:-1], *letter, tokens[-1]])
        return [part["text"].strip() for part in _parts(longer) if part["type"] == "text"] == ["x"]

    def _open_thinking(self, rendering: Message, body: list[int]) -> None:
        """Make reasoning of a block that the token limit left open, in place."""
        begun = self.opens_thinking and "</think>" not in str(self._tokenizer.decode(body))
        parts = _parts(rendering)
        for call in rendering.get("unparsed_tool_calls", []):
            parts = [_without(part, call.raw_text) for part in parts]
        if (opened := _open_thinking(parts, begun=begun)) != parts:
            rendering["content"] = opened

    def _contents(
        self, rendering: Message, body: list[int], tools: Sequence[ToolInfo]
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
        if parsed:
            thought = any(part["type"] == "thinking" for part in parts)
            parsed = self._fit_calls(parsed, body, tools, thought=thought)
            rendering["tool_calls"] = parsed
        calls = read_calls(parsed, unparsed, tools)
        return _inspect_content(parts, bool(calls)), calls

    def _fit_calls(
        self,
        calls: Sequence[RendererToolCall],
        body: list[int],
        tools: Sequence[ToolInfo],
        *,
        thought: bool,
    ) -> list[RendererToolCall]:
        """Return calls whose arguments are read as the tool's schema has them.

        In formats without quotes, the text ``42`` looks like the number. Renderers read what they
        can as JSON, and strip texts. Each text is looked at once, in the order of the calls.
        """
        offered = {tool.name: tool.parameters.properties for tool in tools}
        said = str(self._tokenizer.decode(body))
        if thought:  # where a call may be drafted
            said = said.partition("</think>")[2]
        texts_of = functools.cache(functools.partial(_texts_of_argument, text=said))
        return [_fit_call(call, offered.get(call.function.name, {}), texts_of) for call in calls]


def _fit_call(
    call: RendererToolCall,
    properties: Mapping[str, JSONSchema],
    texts_of: Callable[[str], Iterator[str]],
) -> RendererToolCall:
    try:
        values = json.loads(call.function.arguments)
    except (TypeError, ValueError, RecursionError):  # the call has a parsing error
        return call
    read: dict[str, Any] = {}
    for name, value in values.items() if isinstance(values, dict) else ():
        kinds = _find_kinds(properties.get(name))
        is_text = isinstance(value, str)
        if "string" in kinds and (is_text or not kinds & {None, *_KINDS[type(value)]}):
            said = next((text for text in texts_of(name) if _reads_as(text, value)), value)
            if said != value:
                read[name] = said
        elif is_text and value in _IN_PYTHON:
            meant = _IN_PYTHON[value]
            if kinds & _KINDS[type(meant)] and value in map(str.strip, texts_of(name)):
                read[name] = meant
    if not read:
        return call
    function = RendererToolCall.FunctionBody(
        name=call.function.name, arguments=json.dumps({**values, **read})
    )
    return call.model_copy(update={"function": function})


_IN_PYTHON = {"True": True, "False": False, "None": None}
"""Values that the templates of Qwen3.5 and Nemotron 3 write in Python's way."""

_KINDS: dict[type, set[str]] = {
    bool: {"boolean"},
    int: {"integer", "number"},
    float: {"number"},
    dict: {"object"},
    list: {"array"},
    type(None): {"null"},
}
"""Types of a schema that a value, other than a text, may have."""


def _find_kinds(schema: JSONSchema | None) -> set[str | None]:
    """Return the types that a parameter may have; ``None`` among them stands for any."""
    if schema is None:
        return set()
    if schema.anyOf:
        return set[str | None]().union(*map(_find_kinds, schema.anyOf))
    return set(schema.type if isinstance(schema.type, list) else [schema.type])


def _texts_of_argument(name: str, text: str) -> Iterator[str]:
    """Yield what stands where an argument of this name may be; in linear time, of any reply."""
    for piece in text.split("</parameter>")[:-1]:  # Qwen3.5, Nemotron 3
        _, given, said = piece.rpartition(f"<parameter={name}>")
        if given:
            yield said.removeprefix("\n").removesuffix("\n")
    for piece in text.split("</arg_value>")[:-1]:  # GLM 5
        _, given, said = piece.rpartition(f"<arg_key>{name}</arg_key>")
        if given:
            yield said.lstrip().removeprefix("<arg_value>")


def _reads_as(text: str, value: Any) -> bool:
    """Return whether a renderer reads a text as a value: without white space, or as JSON."""
    try:
        return value in (text, text.strip()) or json.dumps(json.loads(text)) == json.dumps(value)
    except (ValueError, RecursionError):
        return False


def _written_call(call: RendererToolCall, write: Write) -> RendererToolCall:
    """Write a call as the solver sees it: renderers may write its values, not their JSON."""
    name, arguments = call.function.name, call.function.arguments
    if "\\u" not in arguments and (write(name), write(arguments)) == (name, arguments):
        return call
    try:
        values = json.loads(arguments)
    except (ValueError, RecursionError):
        arguments = write(arguments)
    else:
        if (written := spell_all_out(values, write)) != values:
            arguments = json.dumps(written, ensure_ascii=False)
    function = RendererToolCall.FunctionBody(name=write(name), arguments=arguments)
    return call.model_copy(update={"function": function})


def _own_ids(rendering: Message, calls: Sequence[ToolCall]) -> dict[str, str]:
    """Pair the ids of calls with the policy's own; calls without an id get the solver's."""
    own: dict[str, str] = {}
    if not calls:
        return own
    renamed = []
    for said, call in zip(rendering.get("tool_calls", []), calls, strict=False):
        if said.id:
            own[call.id] = said.id
            renamed.append(said)
        else:
            renamed.append(said.model_copy(update={"id": call.id}))
    if renamed:
        rendering["tool_calls"] = renamed
    return own


def _parts(message: Message) -> list[ContentPart]:
    content = message["content"]
    return [TextPart(type="text", text=content)] if isinstance(content, str) else list(content)


def _inspect_content(parts: Sequence[ContentPart], calls: bool) -> str | list[Content]:
    """Return content for Inspect, without white space that only separates parts."""
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


def _strip_end(message: Message) -> None:
    """Strip the end of the message's text, in place."""
    content = message["content"]
    if isinstance(content, str):
        message["content"] = content.rstrip()
        return
    parts = list(content)
    while parts and parts[-1]["type"] == "text":
        text = parts[-1]["text"].rstrip()
        if text:
            parts[-1] = TextPart(type="text", text=text)
            break
        parts.pop()
    message["content"] = parts


def _cut_text(message: Message, stop_seq: str) -> None:
    """Cut the message's text before the stop sequence, in place."""
    parts = _parts(message)
    for index, part in enumerate(parts):
        if part["type"] == "text" and (at := part["text"].find(stop_seq)) >= 0:
            parts = [*parts[:index], TextPart(type="text", text=part["text"][:at])]
            break
    only_text = isinstance(message["content"], str) and parts and parts[0]["type"] == "text"
    message["content"] = parts[0]["text"] if only_text else parts  # type: ignore[typeddict-item]


def _without(part: ContentPart, raw: str) -> ContentPart:
    """Drop a call that was opened but never closed, with everything after it."""
    if part["type"] != "text" or raw not in part["text"]:
        return part
    return TextPart(type="text", text=part["text"][: part["text"].index(raw)])


def _open_thinking(parts: list[ContentPart], *, begun: bool) -> list[ContentPart]:
    """Treat a block of reasoning that the token limit left open as reasoning."""
    if begun and all(part["type"] == "text" for part in parts):
        text = "".join(part["text"] for part in parts if part["type"] == "text")
        if text:
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


def _replayable(message: Message, *, write: Write) -> Message:
    """Keep calls that did not parse as text, since renderers leave them out; write all texts."""
    if calls := message.get("tool_calls"):
        message["tool_calls"] = [_written_call(call, write) for call in calls]
        _strip_end(message)  # renderers write their own white space before calls
    unparsed = message.pop("unparsed_tool_calls", [])
    if unparsed:
        parts = _parts(message)
        text = "".join(part["text"] for part in parts if part["type"] == "text")
        missing = [call.raw_text for call in unparsed if call.raw_text not in text]
        if missing:
            message["content"] = [*parts, TextPart(type="text", text="\n".join(missing))]
    content = message["content"]
    message["content"] = (
        write(content) if isinstance(content, str) else written_parts(content, write)
    )
    return message
