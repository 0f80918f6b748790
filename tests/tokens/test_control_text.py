"""Text that spells a control token stays text, in each of the cookbook's renderers."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import pytest
import tinker
from inspect_ai.model import (
    ChatMessage,
    ChatMessageAssistant,
    ChatMessageSystem,
    ChatMessageTool,
    ChatMessageUser,
    Content,
    ContentReasoning,
    ContentText,
)
from inspect_ai.tool import ToolCall, ToolInfo, ToolParam, ToolParams
from tests.tokens.conversations import BASH, Rollout, request, tool_results
from tests.tokens.formats import tokenizer
from tests.tokens.test_renderers import NAMES, made
from tinker_cookbook.renderers import Renderer
from tinker_cookbook.renderers.qwen3 import Qwen3VLInstructRenderer

from inspect_tinker_plugin.contracts.errors import RendererError
from inspect_tinker_plugin.tokens.dataset_renderer import DatasetRenderer
from inspect_tinker_plugin.tokens.episode import EpisodeTokens
from inspect_tinker_plugin.tokens.messages import conversation_prefix, renderer_message

TRIED = [name for name in NAMES if name != "tml_v0"]  # which needs a tokenizer of its own
SPLITS_ITS_TEXT = {"qwen3", "qwen3_instruct", "qwen3_disable_thinking"}
HONEST = "Is 3 < 4 || 4 > 3?  Write <b>yes</b> in <think>…</think>, <|so|>; **or** „nein\u201d.\n\n"


def tool(text: str) -> ToolInfo:
    """Return a tool that says a text wherever it may."""
    parameter = ToolParam(type="string", description=text, enum=["a", text])
    return ToolInfo(
        name="bash",
        description=text,
        parameters=ToolParams(properties={"cmd": parameter}, required=["cmd"]),
    )


def conversation(text: str) -> list[ChatMessage]:
    """Return a conversation that says a text in each of its messages."""
    call = ToolCall(id="call_1", function="bash", arguments={"cmd": text, "more": [text]})
    return [
        ChatMessageSystem(content=f"Be careful. {text}"),
        ChatMessageUser(content=text),
        ChatMessageAssistant(content=f"I look. {text}", tool_calls=[call]),
        ChatMessageTool(content=f"1 {text} 2", function="bash", tool_call_id="call_1"),
        ChatMessageUser(content=[ContentText(text="Again:"), ContentText(text=text)]),
    ]


def renderer(name: str) -> Renderer:
    found = made(name)
    assert found is not None
    return found


def rendered(
    context: DatasetRenderer, text: str, *, tools: bool
) -> tuple[tinker.ModelInput, EpisodeTokens]:
    episode = EpisodeTokens(context, task="t", sample_id=1)
    messages = conversation(text)
    if not tools:
        messages = [messages[0], messages[1], messages[4]]
    return episode.prompt(request(messages, tools=[tool(text)] if tools else [])), episode


def has_tools(context: DatasetRenderer) -> bool:
    try:
        context.check_tools([BASH])
    except RendererError:
        return False
    return True


def control(context: DatasetRenderer, prompt: tinker.ModelInput) -> list[int]:
    return [token for token in prompt.to_ints() if token in context.control.ids]


@pytest.mark.parametrize("name", TRIED)
def test_a_control_token_in_a_text_is_no_control_token(name: str) -> None:
    context = DatasetRenderer(renderer(name))
    tools = has_tools(context)
    spelled = [
        *(context.tokenizer.decode([stop]) for stop in context.stops if isinstance(stop, int)),
        "<|im_start|>",
        "<｜User｜>",
        "<|user|>",
    ]
    plain, _ = rendered(context, "text", tools=tools)
    for hostile in spelled:
        prompt, episode = rendered(context, f"a {hostile}b{hostile}", tools=tools)
        assert control(context, prompt) == control(context, plain)
        text = context.tokenizer.decode(prompt.to_ints())
        assert text.count(f"a {hostile}b{hostile}") >= (8 if tools else 3) or "\\u" in text
        metrics = episode.metrics
        assert metrics["tokens/control_in_text"] == (2 * 10 if tools else 2 * 3)


@pytest.mark.parametrize("name", TRIED)
def test_an_honest_text_has_the_tokens_of_the_renderer_itself(name: str) -> None:
    given = renderer(name)
    context = DatasetRenderer(given)
    tools = has_tools(context)
    prompt, episode = rendered(context, HONEST, tools=tools)
    messages = (
        conversation(HONEST) if tools else [*conversation(HONEST)[:2], conversation(HONEST)[4]]
    )
    prefix, _ = conversation_prefix(given, messages[:1], [tool(HONEST)] if tools else [])
    own = given.build_generation_prompt(
        [*prefix, *(renderer_message(message, images=False) for message in messages[1:])]
    )
    assert prompt.to_ints() == own.to_ints()
    assert episode.metrics["tokens/control_in_text"] == 0
