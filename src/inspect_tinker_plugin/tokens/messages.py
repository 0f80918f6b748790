"""Converts Inspect's messages and tools into those of a cookbook renderer."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import NamedTuple, cast

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
)
from tinker_cookbook.renderers import ToolCall as RendererToolCall

from inspect_tinker_plugin.contracts.errors import RendererError
from inspect_tinker_plugin.contracts.surrogates import all_spelt_out, spelt_out
from inspect_tinker_plugin.tokens.message_keys import arguments_json

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


def tool_specs(tools: Sequence[ToolInfo]) -> list[ToolSpec]:
    """Return tools as the renderer describes them: name, description, JSON schema."""
    return [
        ToolSpec(
            name=spelt_out(tool.name),
            description=spelt_out(tool.description),
            parameters=all_spelt_out(tool.parameters.model_dump(exclude_none=True)),
        )
        for tool in tools
    ]


def conversation_prefix(
    renderer: Renderer, messages: Sequence[ChatMessage], tools: Sequence[ToolInfo]
) -> ConversationPrefix:
    """Turn the leading system messages, and the tools, into the renderer's own opening.

    Renderers take one system prompt. Several leading system messages are joined by a blank
    line; a later one stays where the solver put it.

    Raises:
        RendererError: The renderer has no tool format, or a system message holds an image.
    """
    consumed = 0
    while consumed < len(messages) and isinstance(messages[consumed], ChatMessageSystem):
        consumed += 1
    systems = [_plain_text(message) for message in messages[:consumed]]
    return ConversationPrefix(opening(renderer, systems, tool_specs(tools)), consumed)


def opening(renderer: Renderer, systems: Sequence[str], tools: Sequence[ToolSpec]) -> list[Message]:
    """Return the renderer's own opening of a conversation.

    Args:
        renderer: The renderer.
        systems: The leading system messages; they are joined by a blank line.
        tools: The tools on offer.

    Raises:
        RendererError: The renderer has no tool format.
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


def renderer_message(
    message: ChatMessage, *, images: bool, call_ids: Mapping[str, str] | None = None
) -> Message:
    """Return one message as the renderer takes it.

    Args:
        message: any message of a conversation.
        images: whether the renderer can carry images.
        call_ids: the policy's own ids of its tool calls, by Inspect's ids.

    Raises:
        RendererError: A content type, or an image, that the renderer cannot carry.
    """
    if isinstance(message, ChatMessageTool):
        return _tool_message(message, images=images, call_ids=call_ids or {})
    if isinstance(message, ChatMessageAssistant):
        converted = Message(
            role="assistant", content=_content(message, images=images, reasoning=True)
        )
        if message.tool_calls:
            converted["tool_calls"] = [
                _tool_call(call, call_ids or {}) for call in message.tool_calls
            ]
        return converted
    return Message(role=message.role, content=_content(message, images=images, reasoning=False))


def call_name(call: ToolCall, call_ids: Mapping[str, str]) -> CallName:
    """Return the name of a tool call, under the policy's own id."""
    return CallName(spelt_out(call_ids.get(call.id, call.id)), spelt_out(call.function))


def _tool_call(call: ToolCall, call_ids: Mapping[str, str]) -> RendererToolCall:
    """Return a tool call with its arguments as JSON."""
    named, arguments = call_name(call, call_ids), spelt_out(arguments_json(call.arguments))
    return RendererToolCall(
        id=named.id, function=RendererToolCall.FunctionBody(name=named.name, arguments=arguments)
    )


def _tool_message(
    message: ChatMessageTool, *, images: bool, call_ids: Mapping[str, str]
) -> Message:
    if message.error is not None:
        # What Inspect's own providers tell the model.
        content: str | list[ContentPart] = spelt_out(f"Error: {message.error.message}")
    else:
        content = _content(message, images=images, reasoning=False)
    converted = Message(role="tool", content=content)
    if message.tool_call_id is not None:
        call_id = message.tool_call_id
        converted["tool_call_id"] = spelt_out(call_ids.get(call_id, call_id))
    if message.function is not None:
        converted["name"] = spelt_out(message.function)
    return converted


def _plain_text(message: ChatMessage) -> str:
    content = _content(message, images=False, reasoning=False)
    assert isinstance(content, str)
    return content


def _content(message: ChatMessage, *, images: bool, reasoning: bool) -> str | list[ContentPart]:
    """Convert content; text alone becomes one string, which every renderer understands."""
    if isinstance(message.content, str):
        return spelt_out(message.content)
    parts = [
        part
        for content in message.content
        if (part := _part(content, message.role, images=images, reasoning=reasoning))
    ]
    if all(part["type"] == "text" for part in parts):
        return "\n".join(cast(TextPart, part)["text"] for part in parts)
    return parts


def _part(content: Content, role: str, *, images: bool, reasoning: bool) -> ContentPart | None:
    if isinstance(content, ContentText):
        return TextPart(type="text", text=spelt_out(content.text))
    if isinstance(content, ContentReasoning):
        # Only the model's own turns carry reasoning; Inspect's providers skip it elsewhere.
        return _thinking(content) if reasoning else None
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
    return ThinkingPart(type="thinking", thinking=spelt_out(text)) if text else None


def image_reference(image: str) -> str:
    """Return an image as a data URI or URL; a path becomes a ``file://`` URL.

    Raises:
        RendererError: The image is none of these.
    """
    if image.startswith(_URL_SCHEMES):
        return image
    path = Path(image)
    if path.is_file():
        return path.resolve().as_uri()
    shown = image if len(image) <= 80 else image[:77] + "..."
    raise RendererError(f"the image {shown!r} is neither a data URI, nor a URL, nor a file.")
