"""Messages and tools reach the renderer complete, or a clear error says what cannot."""

from __future__ import annotations

import base64
import enum
import io
import json
import pickle
import re
from datetime import UTC, date, datetime
from pathlib import Path
from typing import Any

import pytest
from inspect_ai.model import (
    ChatMessage,
    ChatMessageAssistant,
    ChatMessageSystem,
    ChatMessageTool,
    ChatMessageUser,
    Content,
    ContentAudio,
    ContentData,
    ContentDocument,
    ContentImage,
    ContentReasoning,
    ContentText,
    ContentVideo,
)
from inspect_ai.tool import ToolCall, ToolCallError, ToolInfo, ToolParam, ToolParams
from PIL import Image
from tests.tokens.conversations import BASH, SUBMIT, opening, request
from tests.tokens.formats import renderer, tokenizer
from tinker_cookbook.image_processing_utils import get_image_processor
from tinker_cookbook.renderers import ContentPart, ImagePart, Message, TextPart, get_renderer
from tinker_cookbook.renderers.qwen3 import Qwen3VLInstructRenderer
from transformers.models.qwen2_vl.image_processing_qwen2_vl import Qwen2VLImageProcessor

from inspect_tinker_plugin.contracts.errors import RendererError
from inspect_tinker_plugin.rl.models import make_renderer
from inspect_tinker_plugin.tokens.episode import DatasetRenderer, EpisodeTokens
from inspect_tinker_plugin.tokens.messages import (
    conversation_prefix,
    image_reference,
    renderer_message,
    tool_specs,
)
from inspect_tinker_plugin.tokens.prompts import flatten

INSTRUCT = "qwen3_instruct"


class PatchCounter:
    """A stand-in for a vision model's image processor, which would have to be downloaded."""

    merge_size = 2
    patch_size = 14

    def get_number_of_image_patches(
        self, height: int, width: int, images_kwargs: dict[str, Any] | None = None
    ) -> int:
        return (height // self.patch_size) * (width // self.patch_size)


@pytest.fixture
def picture(tmp_path: Path) -> Path:
    path = tmp_path / "red.png"
    Image.new("RGBA", (56, 56), "red").save(path)
    return path


def prompt_text(name: str, messages: list[ChatMessage], **options: Any) -> str:
    episode = EpisodeTokens(DatasetRenderer(renderer(name)), task="t", sample_id=1)
    prompt = episode.prompt(request(messages, **options))
    return str(tokenizer().decode(prompt.to_ints()))


def test_tools_are_described_by_name_description_and_json_schema() -> None:
    (spec,) = tool_specs([BASH])
    assert spec == {
        "name": "bash",
        "description": "Run a command.",
        "parameters": {
            "type": "object",
            "properties": {"cmd": {"type": "string", "description": "The command."}},
            "required": ["cmd"],
            "additionalProperties": False,
        },
    }


class Pace(enum.Enum):
    SLOW = "slow"


@pytest.mark.parametrize(
    ("default", "written"),
    [
        (date(2024, 5, 6), '"2024-05-06"'),
        (datetime(2024, 5, 6, tzinfo=UTC), '"2024-05-06T00:00:00Z"'),
        (Pace.SLOW, '"slow"'),
        ({1}, "[1]"),
    ],
    ids=["date", "datetime", "enum", "set"],
)
def test_a_default_of_any_type_is_written_as_json(default: object, written: str) -> None:
    parameters = ToolParams(properties={"given": ToolParam(default=default)})
    tool = ToolInfo(name="wait", description="Wait.", parameters=parameters)
    assert f'"default": {written}' in prompt_text(INSTRUCT, opening(), tools=[tool])


def test_a_parameter_without_a_type_may_be_anything_where_the_format_wants_types() -> None:
    inner = ToolParam(type="object", properties={"part": ToolParam(description="A part.")})
    properties = {"given": ToolParam(description="A thing."), "rest": ToolParam(anyOf=[inner])}
    tool = ToolInfo(name="put", description="Put.", parameters=ToolParams(properties=properties))
    described = prompt_text("kimi_k26", opening(), tools=[tool])
    anything = "string | number | boolean | {} | Array<any> | null"
    assert f"// A thing.\n  given?: {anything}" in described
    assert re.search(rf"// A part\.\s+part\?: {re.escape(anything)}", described)
    assert '"given": {"description": "A thing."}' in prompt_text(INSTRUCT, opening(), tools=[tool])


def test_tools_and_system_message_stand_in_one_opening() -> None:
    text = prompt_text(INSTRUCT, opening(), tools=[BASH, SUBMIT])
    assert text.count("<|im_start|>system") == 1
    assert text.startswith("<|im_start|>system\nYou are a careful agent.\n\n# Tools")
    assert '"name": "bash"' in text
    assert '"name": "submit"' in text


@pytest.mark.parametrize("tools", [[], [BASH]], ids=["no-tools", "tools"])
def test_leading_system_messages_are_joined_and_a_later_one_stays(tools: list[Any]) -> None:
    messages: list[ChatMessage] = [
        ChatMessageSystem(content="First."),
        ChatMessageSystem(content=[ContentText(text="Second.")]),
        ChatMessageUser(content="Hello."),
        ChatMessageSystem(content="Be brief."),
    ]
    text = prompt_text(INSTRUCT, messages, tools=tools)
    assert text.startswith("<|im_start|>system\nFirst.\n\nSecond.")
    assert "Hello.<|im_end|>\n<|im_start|>system\nBe brief.<|im_end|>" in text


def test_tool_choice_none_offers_no_tools() -> None:
    text = prompt_text(INSTRUCT, opening(), tools=[BASH], tool_choice="none")
    assert "bash" not in text


@pytest.mark.parametrize("name", ["role_colon", "llama3"])
def test_a_renderer_without_tool_format_is_refused(name: str) -> None:
    without = renderer(name)
    assert conversation_prefix(without, [], []).prefix == []
    with pytest.raises(RendererError, match=r"no format for tools.*bash, submit"):
        conversation_prefix(without, [], [BASH, SUBMIT])


def test_tool_arguments_are_json_not_python() -> None:
    call = ToolCall(id="c1", function="bash", arguments={"flag": True, "none": None, "é": [1]})
    message = renderer_message(ChatMessageAssistant(content="Go.", tool_calls=[call]), images=False)
    (converted,) = message["tool_calls"]
    assert converted.function.arguments == '{"flag": true, "none": null, "é": [1]}'
    text = prompt_text(
        INSTRUCT,
        [*opening(), ChatMessageAssistant(content="Go.", tool_calls=[call])],
        tools=[BASH],
    )
    assert json.loads(text.rpartition("<tool_call>")[2].partition("</tool_call>")[0]) == {
        "name": "bash",
        "arguments": call.arguments,
    }


def test_half_surrogate_pairs_are_spelt_out() -> None:
    """A tool may return one, and a tokenizer takes none."""
    text = "a\ud83db 😀"
    messages: list[ChatMessage] = [
        ChatMessageSystem(content=text),
        ChatMessageUser(content=[ContentText(text=text)]),
        ChatMessageAssistant(
            content="", tool_calls=[ToolCall(id="1", function="bash", arguments={"cmd": text})]
        ),
        ChatMessageTool(content=text, tool_call_id="1", function="bash"),
        ChatMessageTool(
            content="", tool_call_id="1", function="bash", error=ToolCallError("unknown", text)
        ),
    ]
    assert prompt_text("qwen3_instruct", messages).count("a\\ud83db") == len(messages)


HIDDEN = ContentReasoning(reasoning="c2VjcmV0", redacted=True)
YES = ContentText(text="Yes.")
MESSAGES: dict[str, tuple[ChatMessage, dict[str, Any]]] = {
    "a tool's error, told as Inspect does": (
        ChatMessageTool(
            content="partial", function="bash", error=ToolCallError("timeout", "Timed out.")
        ),
        {"role": "tool", "content": "Error: Timed out.", "name": "bash"},
    ),
    "a tool's result, with name and call id": (
        ChatMessageTool(
            content=[ContentText(text="one"), ContentText(text="two")],
            function="bash",
            tool_call_id="c1",
        ),
        {"role": "tool", "content": "one\ntwo", "tool_call_id": "c1", "name": "bash"},
    ),
    "reasoning": (
        ChatMessageAssistant(content=[ContentReasoning(reasoning="hm"), YES]),
        {"content": [{"type": "thinking", "thinking": "hm"}, {"type": "text", "text": "Yes."}]},
    ),
    "redacted reasoning": (ChatMessageAssistant(content=[HIDDEN, YES]), {"content": "Yes."}),
    "its summary": (
        ChatMessageAssistant(content=[HIDDEN.model_copy(update={"summary": "Sum."}), YES]),
        {"content": [{"type": "thinking", "thinking": "Sum."}, {"type": "text", "text": "Yes."}]},
    ),
}


@pytest.mark.parametrize("name", MESSAGES)
def test_a_message_reaches_the_renderer_complete(name: str) -> None:
    message, expected = MESSAGES[name]
    converted = renderer_message(message, images=False)
    assert converted == {"role": message.role, **expected}


@pytest.mark.parametrize("form", ["data", "path", "file-url"])
def test_an_image_reaches_a_vision_renderer(picture: Path, form: str) -> None:
    encoded = base64.b64encode(picture.read_bytes()).decode()
    image = {
        "data": f"data:image/png;base64,{encoded}",
        "path": str(picture),
        "file-url": picture.as_uri(),
    }[form]
    vision = Qwen3VLInstructRenderer(tokenizer(), image_processor=PatchCounter())
    episode = EpisodeTokens(DatasetRenderer(vision), task="t", sample_id=1)
    content: list[Content] = [ContentText(text="What is this?"), ContentImage(image=image)]
    prompt = episode.prompt(request([ChatMessageUser(content=content)]))
    (chunk,) = [c for c in prompt.chunks if c.type == "image"]
    assert Image.open(io.BytesIO(chunk.data)).size == (56, 56)
    assert chunk.length == 4


@pytest.fixture
def vision_model(tmp_path: Path) -> str:
    """The folder of a model: the shipped tokenizer, and an image processor of the transformers."""
    tokenizer().save_pretrained(tmp_path / "model")
    Qwen2VLImageProcessor(patch_size=16).save_pretrained(tmp_path / "model")
    return str(tmp_path / "model")


@pytest.mark.parametrize("name", ["qwen3_vl", "qwen3_5", "kimi_k25"])
def test_a_vision_renderer_has_its_models_image_processor(
    vision_model: str, picture: Path, name: str
) -> None:
    named = make_renderer(name, model=vision_model)
    context: DatasetRenderer = pickle.loads(pickle.dumps(DatasetRenderer(named)))
    content: list[Content] = [ContentImage(image=picture.as_uri()), ContentText(text="What?")]
    prompt = EpisodeTokens(context, task="t", sample_id=1).prompt(
        request([ChatMessageUser(content=content)])
    )
    theirs = get_renderer(name, tokenizer(), get_image_processor(vision_model))
    parts: list[ContentPart] = [
        ImagePart(type="image", image=picture.as_uri()),
        TextPart(type="text", text="What?"),
    ]
    whole = theirs.build_generation_prompt([Message(role="user", content=parts)])
    assert flatten(prompt.chunks) == flatten(whole.chunks)
    assert any(chunk.type == "image" for chunk in prompt.chunks)


def test_an_image_processor_is_looked_for_with_the_first_image(picture: Path) -> None:
    episode = EpisodeTokens(DatasetRenderer(renderer("qwen3_vl")), task="t", sample_id=1)
    assert episode.prompt(request([ChatMessageUser(content="No image.")])).chunks
    image = ContentImage(image=str(picture))
    with pytest.raises(RendererError, match=r"sample 1: the image processor of .* cannot be load"):
        episode.prompt(request([ChatMessageUser(content=[image])]))


def test_an_image_is_never_dropped_by_a_text_renderer() -> None:
    image = ContentImage(image="data:image/png;base64,AAAA")
    with pytest.raises(RendererError, match=r"task 't', sample 1: a user message holds an image"):
        prompt_text(INSTRUCT, [ChatMessageUser(content=[image])])


def test_an_image_that_is_nowhere_is_named() -> None:
    with pytest.raises(RendererError, match=r"'no/such\.png' is neither"):
        image_reference("no/such.png")


@pytest.mark.parametrize(
    "content",
    [
        ContentAudio(audio="data:audio/wav;base64,AAAA", format="wav"),
        ContentVideo(video="data:video/mp4;base64,AAAA", format="mp4"),
        ContentDocument(document="data:application/pdf;base64,AAAA"),
        ContentData(data={"a": 1}),
    ],
    ids=["audio", "video", "document", "data"],
)
def test_other_content_is_refused_with_task_and_sample(content: Content) -> None:
    with pytest.raises(RendererError, match=rf"sample 1: .*{content.type}"):
        prompt_text(INSTRUCT, [ChatMessageUser(content=[content])])


def test_what_a_renderer_itself_refuses_names_task_and_sample() -> None:
    messages = [*opening(), ChatMessageSystem(content="Later.")]
    episode = EpisodeTokens(DatasetRenderer(renderer("deepseekv3")), task="t", sample_id="s7")
    with pytest.raises(RendererError, match=r"task 't', sample 's7': .*only supports system"):
        episode.prompt(request(messages))
