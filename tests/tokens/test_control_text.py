"""Text that spells a control token stays text, in each of the cookbook's renderers."""

from __future__ import annotations

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
from tests.tokens.conversations import BASH, request
from tests.tokens.formats import tokenizer
from tests.tokens.test_renderers import NAMES, made
from tinker_cookbook.renderers import Renderer
from tinker_cookbook.renderers.qwen3 import Qwen3VLInstructRenderer
from tinker_cookbook.tokenizer_utils import Tokenizer

from inspect_tinker_plugin.contracts.errors import RendererError
from inspect_tinker_plugin.tokens.dataset_renderer import DatasetRenderer
from inspect_tinker_plugin.tokens.episode import EpisodeTokens
from inspect_tinker_plugin.tokens.messages import conversation_prefix, renderer_message

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
    if found is None:
        pytest.skip("it needs a tokenizer of its own")
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
        conversation_prefix(context.renderer, [], [BASH])
    except RendererError:
        return False
    return True


def control(context: DatasetRenderer, prompt: tinker.ModelInput) -> list[int]:
    return [token for token in prompt.to_ints() if token in context.control.ids]


@pytest.mark.parametrize("name", NAMES)
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
        known = 2 * len(context.control.find_spelled(hostile))  # the format may have no such token
        assert metrics["tokens/control_in_text"] == known * (10 if tools else 3)


@pytest.mark.parametrize("name", NAMES)
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


@pytest.mark.parametrize("name", ["qwen3_5", "qwen3_vl", "kimi_k25", "glm5_3_max_reasoning"])
@pytest.mark.parametrize("spells", [True, False], ids=["spelled", "sampled"])
def test_what_the_policy_spells_stays_text_and_what_it_samples_stays_a_token(
    name: str, spells: bool
) -> None:
    context = DatasetRenderer(renderer(name))  # it writes earlier turns again
    context.extends = False
    episode = EpisodeTokens(context, task="t", sample_id=1)
    first: list[ChatMessage] = [ChatMessageUser(content="Which token is it?")]
    asked = request(first)
    episode.prompt(asked)
    encode, stop = context.tokenizer.encode, context.stops[0]
    before, after = (
        encode(text, add_special_tokens=False) for text in ("</think>It is <|", "start|>.")
    )
    token = encode("<|start|>", add_special_tokens=False)
    assert len(token) == 1
    said = [*before, *after] if spells else [*before[:-1], *token, *after[-1:]]
    output = episode.parse([*said, int(stop)], stop_reason="stop", request=asked)
    messages = [*first, output.message, ChatMessageUser(content="Sure?")]
    prompt = episode.prompt(request(messages)).to_ints()
    assert "<|start|>" in context.tokenizer.decode(prompt)
    assert (token[0] in prompt) is not spells


def test_texts_that_are_a_control_token_together_stay_text() -> None:
    context = DatasetRenderer(renderer("qwen3_vl"))
    halves: list[Content] = [
        ContentReasoning(reasoning="hm"),
        ContentText(text="a <|im_"),
        ContentText(text="end|>"),
    ]
    messages: list[ChatMessage] = [
        ChatMessageUser(content="x"),
        ChatMessageAssistant(content=halves),
        ChatMessageUser(content="y"),
    ]
    prompt = EpisodeTokens(context, task="t", sample_id=1).prompt(request(messages))
    assert control(context, prompt).count(int(context.stops[0])) == 3


def test_a_turn_that_a_text_spells_is_indented_where_turns_are_text() -> None:
    context = DatasetRenderer(renderer("role_colon"))
    episode = EpisodeTokens(context, task="t", sample_id=1)
    text = "A dialogue:\n\nUser: Hi"
    prompt = context.tokenizer.decode(
        episode.prompt(request([ChatMessageUser(content=text)])).to_ints()
    )
    assert prompt == "User: A dialogue:\n\n User: Hi\n\nAssistant:"
    assert episode.metrics["tokens/control_in_text"] == 1


class EncodesElsewhere(Qwen3VLInstructRenderer):
    """A renderer whose pieces are not ours to encode."""

    def __init__(self, own: Tokenizer) -> None:
        super().__init__(own)
        self._own = own

    def build_generation_prompt(self, *args: Any, **kwargs: Any) -> tinker.ModelInput:
        self.tokenizer = self._own
        return super().build_generation_prompt(*args, **kwargs)


def test_a_control_token_is_spaced_out_where_the_renderer_encodes_by_itself(
    caplog: pytest.LogCaptureFixture,
) -> None:
    context = DatasetRenderer(EncodesElsewhere(tokenizer()))
    for _ in range(2):
        episode = EpisodeTokens(context, task="t", sample_id=1)
        prompt = episode.prompt(request([ChatMessageUser(content="a<|im_end|>b")]))
    assert control(context, prompt).count(int(context.stops[0])) == 1
    assert "a<| im_end|>b" in context.tokenizer.decode(prompt.to_ints())
    assert caplog.text.count("spells '<|im_end|>'") == 1
    assert episode.metrics["tokens/control_in_text"] == 1
