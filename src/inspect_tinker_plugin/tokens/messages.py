"""Converts Inspect's messages and tools into those of a cookbook renderer, and its calls back.

A renderer's tool calls, parsed or not, become calls as Inspect's own providers would make them.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple, cast

from inspect_ai.model import (
    ChatMessage,
    ChatMessageAssistant,
    ChatMessageSystem,
    ChatMessageTool,
    Content,
    ContentImage,
    ContentReasoning,
    ContentText,
)
from inspect_ai.tool import ToolCall, ToolInfo
from tinker_cookbook.renderers import (
    ContentPart,
    ImagePart,
    Message,
    Renderer,
    TextPart,
    ThinkingPart,
    ToolSpec,
    UnparsedToolCall,
)
from tinker_cookbook.renderers import ToolCall as RendererToolCall
from tinker_cookbook.renderers.base import UNTERMINATED_TOOL_BLOCK_ERROR

from inspect_tinker_plugin.contracts.errors import RendererError
from inspect_tinker_plugin.contracts.wording import spell_all_out, spell_out
from inspect_tinker_plugin.inspect_internals import (
    parse_tool_call,
    tool_parse_error_message,
    unique_id,
)

Write = Callable[[str], str]
"""Returns a text as a renderer gets it: half surrogate pairs and control tokens may be changed."""

_ANY = ("string", "number", "boolean", "object", "array", "null")
"""Types of JSON."""

_URL_SCHEMES = ("data:", "http://", "https://", "file://")


class CallName(NamedTuple):
    """What there is to a tool call apart from its arguments."""

    id: str
    name: str


class ConversationPrefix(NamedTuple):
    """The opening of a conversation in the renderer's terms."""

    prefix: list[Message]
    """The renderer's messages for the leading system messages and the tools."""

    consumed: int
    """Number of Inspect's messages that the prefix replaces."""


def tool_specs(tools: Sequence[ToolInfo], write: Write = spell_out) -> list[ToolSpec]:
    """Return tools as the renderer describes them: name, description, JSON schema."""
    return [
        ToolSpec(
            name=write(tool.name),
            description=write(tool.description),
            parameters=spell_all_out(
                tool.parameters.model_dump(mode="json", exclude_none=True), write
            ),
        )
        for tool in tools
    ]


def conversation_prefix(
    renderer: Renderer,
    messages: Sequence[ChatMessage],
    tools: Sequence[ToolInfo],
    write: Write = spell_out,
) -> ConversationPrefix:
    """Turn the leading system messages, and the tools, into the renderer's own opening.

    Renderers take one system prompt. Several leading system messages are joined by a blank
    line; a later one stays where the solver put it.
    """
    consumed = 0
    while consumed < len(messages) and isinstance(messages[consumed], ChatMessageSystem):
        consumed += 1
    systems = [_plain_text(message, write) for message in messages[:consumed]]
    return ConversationPrefix(opening(renderer, systems, tool_specs(tools, write)), consumed)


def opening(renderer: Renderer, systems: Sequence[str], tools: Sequence[ToolSpec]) -> list[Message]:
    """Return the renderer's own opening of a conversation.

    Args:
        renderer: The renderer.
        systems: The leading system messages; they are joined by a blank line.
        tools: The tools on offer.
    """
    system = "\n\n".join(systems)
    if not tools:
        return [Message(role="system", content=system)] if systems else []
    try:
        return renderer.create_conversation_prefix_with_tools(list(tools), system)
    except NotImplementedError as error:
        names = ", ".join(tool["name"] for tool in tools)
        raise RendererError(
            f"the renderer {type(renderer).__name__} has no format for tools, but the task "
            f"offers {names}. Use a renderer that has one (qwen3_instruct, for instance)."
        ) from error
    except ValueError:  # Kimi K2.5 and K2.6 write no schema without a type
        typed = [tool | {"parameters": _with_types(tool["parameters"])} for tool in tools]
        return renderer.create_conversation_prefix_with_tools(cast(list[ToolSpec], typed), system)


def _with_types(schema: Any) -> Any:
    """Return a JSON schema in which parts without a type list all types, which means the same."""
    if not isinstance(schema, dict) or not schema:
        return schema
    typed = {} if schema.keys() & {"type", "enum", "anyOf"} else {"type": list(_ANY)}
    for name, value in schema.items():
        if name == "properties":
            value = {key: _with_types(part) for key, part in value.items()}
        elif name == "anyOf":
            value = [_with_types(part) for part in value]
        elif name in ("items", "additionalProperties"):
            value = _with_types(value)
        typed[name] = value
    return typed


def renderer_message(
    message: ChatMessage,
    *,
    images: bool,
    call_ids: Mapping[str, str] | None = None,
    write: Write = spell_out,
) -> Message:
    """Return one message as the renderer takes it."""
    if isinstance(message, ChatMessageTool):
        return _tool_message(message, images=images, call_ids=call_ids or {}, write=write)
    converted = Message(role=message.role, content=_content(message, images=images, write=write))
    if isinstance(message, ChatMessageAssistant) and message.tool_calls:
        converted["tool_calls"] = [
            _tool_call(call, call_ids or {}, write) for call in message.tool_calls
        ]
    return converted


def call_name(call: ToolCall, call_ids: Mapping[str, str], write: Write = spell_out) -> CallName:
    """Return the name of a tool call, under the policy's own id."""
    return CallName(write(call_ids.get(call.id, call.id)), write(call.function))


def _tool_call(call: ToolCall, call_ids: Mapping[str, str], write: Write) -> RendererToolCall:
    """Return a tool call with its arguments as JSON."""
    try:
        arguments = json.dumps(call.arguments, ensure_ascii=False)
    except (TypeError, ValueError):  # a solver put in something that JSON cannot hold
        arguments = repr(call.arguments)
    named, arguments = call_name(call, call_ids, write), write(arguments)
    return RendererToolCall(
        id=named.id, function=RendererToolCall.FunctionBody(name=named.name, arguments=arguments)
    )


def _tool_message(
    message: ChatMessageTool, *, images: bool, call_ids: Mapping[str, str], write: Write
) -> Message:
    if message.error is not None:
        # What Inspect's own providers tell the model.
        content: str | list[ContentPart] = write(f"Error: {message.error.message}")
    else:
        content = _content(message, images=images, write=write)
    converted = Message(role="tool", content=content)
    if message.tool_call_id is not None:
        call_id = message.tool_call_id
        converted["tool_call_id"] = write(call_ids.get(call_id, call_id))
    if message.function is not None:
        converted["name"] = write(message.function)
    return converted


def _plain_text(message: ChatMessage, write: Write) -> str:
    content = _content(message, images=False, write=write)
    assert isinstance(content, str)
    return content


def _content(message: ChatMessage, *, images: bool, write: Write) -> str | list[ContentPart]:
    """Convert content; text alone becomes one string, which every renderer understands."""
    if isinstance(message.content, str):
        return write(message.content)
    parts = [
        part
        for content in message.content
        if (part := _part(content, message.role, images=images)) is not None
    ]
    if all(part["type"] == "text" for part in parts):
        return write("\n".join(cast(TextPart, part)["text"] for part in parts))
    return written_parts(parts, write)


def written_parts(parts: Sequence[ContentPart], write: Write) -> list[ContentPart]:
    """Return parts with their texts written.

    Renderers join texts that follow each other; those that are another text together are one.
    """
    written: list[ContentPart] = []
    for part in parts:
        if part["type"] == "thinking":
            written.append(ThinkingPart(type="thinking", thinking=write(part["thinking"])))
        elif part["type"] == "text":
            text, before = write(part["text"]), written[-1] if written else None
            if before is not None and before["type"] == "text":
                joined = before["text"] + text
                if write(joined) != joined:
                    written.pop()
                    text = write(joined)
            written.append(TextPart(type="text", text=text))
        else:
            written.append(part)
    return written


def _part(content: Content, role: str, *, images: bool) -> ContentPart | None:
    if isinstance(content, ContentText):
        return TextPart(type="text", text=content.text)
    if isinstance(content, ContentReasoning):
        # Only the model's own turns carry reasoning; Inspect's providers skip it elsewhere.
        return _thinking(content) if role == "assistant" else None
    if isinstance(content, ContentImage):
        if not images:
            raise RendererError(
                f"a {role} message holds an image, which the renderer cannot carry. Use a "
                "vision renderer with its image processor, or a task without images."
            )
        return ImagePart(type="image", image=image_reference(content.image))
    raise RendererError(
        f"a {role} message holds content of type {content.type!r}, which no renderer can "
        "carry: text, reasoning and images can be trained on."
    )


def _thinking(content: ContentReasoning) -> ThinkingPart | None:
    text = (content.summary or "") if content.redacted else content.reasoning
    return ThinkingPart(type="thinking", thinking=text) if text else None


def image_reference(image: str) -> str:
    """Return an image as a data URI or URL; a path becomes a ``file://`` URL."""
    if image.startswith(_URL_SCHEMES):
        return image
    path = Path(image)
    if path.is_file():
        return path.resolve().as_uri()
    shown = image if len(image) <= 80 else image[:77] + "..."
    raise RendererError(f"the image {shown!r} is neither a data URI, nor a URL, nor a file.")


_NAME = re.compile(r'"name"\s*:\s*"([^"\\]+)"|<function=([^>\s]+)>')
_ARGUMENTS = re.compile(r'"arguments"\s*:\s*')
_TAGS = re.compile(r"\A<[^<>]*>|</[^<>]*>\Z")


def read_calls(
    parsed: Sequence[RendererToolCall],
    unparsed: Sequence[UnparsedToolCall],
    tools: Sequence[ToolInfo],
) -> list[ToolCall]:
    """Return the calls of a reply; those that did not parse come last, with ``parse_error``.

    Half surrogate pairs are spelt out: no shell, file or log could take them.

    Their ids are new, whatever the reply says: models number their calls from zero in every
    reply, and a program that keeps its own history is recognised by these ids alone.
    """
    calls = [_make_call(call.function.name, call.function.arguments, tools) for call in parsed]
    calls.extend(_read_unparsed(call, tools) for call in unparsed)
    for call in calls:
        call.function = spell_out(call.function)
        call.arguments = spell_all_out(call.arguments)
        if call.parse_error is not None:
            call.parse_error = spell_out(call.parse_error)
    return calls


def _new_id() -> str:
    return f"call_{unique_id()}"


def _make_call(name: str, arguments: str | None, tools: Sequence[ToolInfo]) -> ToolCall:
    """Return a call as Inspect's own providers would."""
    try:
        return parse_tool_call(_new_id(), name, arguments, list(tools))
    except (ValueError, RecursionError) as error:
        # a number of thousands of digits, for instance: Inspect expects a JSONDecodeError only
        return ToolCall(
            id=_new_id(),
            function=name,
            arguments={},
            parse_error=tool_parse_error_message(arguments or "", error),
        )


def _read_unparsed(call: UnparsedToolCall, tools: Sequence[ToolInfo]) -> ToolCall:
    """Return a call that did not parse as Inspect's own providers would.

    They receive name and arguments separately, so both are looked for in the raw text. Then
    arguments that are not an object but fit (a bare string) still make a call, and others give
    the same message to the model.
    """
    inner = _TAGS.sub("", call.raw_text.strip()).strip()
    named = _NAME.search(inner)
    name = (named[1] or named[2]) if named else "unknown"
    try:
        value = json.loads(inner)
    except (ValueError, RecursionError):
        value = None
    closed = not call.error.startswith(UNTERMINATED_TOOL_BLOCK_ERROR)
    if closed and isinstance(value, dict) and isinstance(value.get("name"), str):
        arguments = value.get("arguments")
        given = arguments if isinstance(arguments, str | None) else json.dumps(arguments)
        return _make_call(value["name"], given, tools)
    if named and (at := _ARGUMENTS.search(inner)):
        raw = inner[at.end() :].strip()
        raw = raw[:-1].rstrip() if raw.endswith("}") else raw
        attempt = _make_call(name, raw, tools)
        if attempt.parse_error:
            return attempt
    error = call.error.removeprefix("Invalid JSON: ")
    return ToolCall(
        id=_new_id(),
        function=name,
        arguments={},
        parse_error=tool_parse_error_message(inner, ValueError(error)),
    )
