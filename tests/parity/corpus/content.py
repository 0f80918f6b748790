"""Content other than text: images, reasoning, documents, several kinds in one message."""

from __future__ import annotations

import base64
import struct
import zlib
from dataclasses import replace

from inspect_ai import Task
from inspect_ai.dataset import Sample
from inspect_ai.model import (
    ChatMessage,
    ChatMessageAssistant,
    ChatMessageUser,
    ContentImage,
    ContentReasoning,
    ContentText,
    GenerateConfig,
    ModelOutput,
    get_model,
)
from inspect_ai.scorer import exact, includes
from inspect_ai.solver import Generate, TaskState, generate, use_tools
from inspect_ai.tool import ToolResult
from tests.folders import made_folder
from tests.functions import make_solver, make_tool
from tests.parity.cases import Expect, case

from inspect_tinker_plugin.testing.replies import call, say

NO_IMAGES = "the renderer of a text model carries no images"


def png(size: int = 2) -> bytes:
    """A red square."""

    def chunk(kind: bytes, body: bytes) -> bytes:
        check = zlib.crc32(kind + body)
        return struct.pack(">I", len(body)) + kind + body + struct.pack(">I", check)

    rows = b"".join(b"\x00" + b"\xff\x00\x00" * size for _ in range(size))
    header = struct.pack(">IIBBBBB", size, size, 8, 2, 0, 0, 0)
    return (
        b"\x89PNG\r\n\x1a\n"
        + chunk(b"IHDR", header)
        + chunk(b"IDAT", zlib.compress(rows))
        + chunk(b"IEND", b"")
    )


def data_uri() -> str:
    return f"data:image/png;base64,{base64.b64encode(png()).decode()}"


SEEN = Expect(turns=1, scores={"exact": "C"}, says=["data:image/png;base64,iVBOR"])


def image_sample(image: str) -> Sample:
    shown = ContentImage(image=image, detail="low")
    message = ChatMessageUser(content=[ContentText(text="Which colour?"), shown])
    return Sample(input=[message], target="red")


@case(script=["red"], expect=SEEN, tokens=NO_IMAGES)
def image_in_the_prompt() -> Task:
    return Task(dataset=[image_sample(data_uri())], scorer=exact())


@case(script=["red"], expect=SEEN, tokens=NO_IMAGES)
def image_file_in_the_prompt() -> Task:
    path = made_folder("parity") / "red.png"
    path.write_bytes(png())
    return Task(dataset=[image_sample(str(path))], scorer=exact())


@case(script=[], expect=Expect(turns=0, error="FileNotFoundError"))
def image_file_that_is_missing() -> Task:
    return Task(dataset=[image_sample("/nowhere/red.png")], scorer=exact())


def colour() -> list[Sample]:
    return [Sample(input="A colour?", target="red")]


@make_tool
async def look() -> ToolResult:
    """Take a picture."""
    return [ContentText(text="taken"), ContentImage(image=data_uri())]


@case(script=[say("", call("look")), "red"], expect=replace(SEEN, turns=2), tokens=NO_IMAGES)
def image_in_a_tool_result() -> Task:
    return Task(
        dataset=[Sample(input="Look.", target="red")],
        solver=[use_tools(look()), generate()],
        scorer=exact(),
    )


@make_solver
async def asks_again(state: TaskState, generate: Generate) -> TaskState:
    state = await generate(state)
    state.messages.append(ChatMessageUser(content="Are you sure?"))
    return await generate(state)


THOUGHT = say("red", reasoning="Roses are red.")


@case(
    script=[THOUGHT, say("red", reasoning="Still.")],
    expect=Expect(turns=2, scores={"exact": "C"}, says=["Roses are red."]),
    renderer="qwen3",
)
def reasoning_content() -> Task:
    return Task(dataset=colour(), solver=asks_again(), scorer=exact())


@case(
    script=[THOUGHT, "red"],
    expect=Expect(
        turns=2,
        scores={"exact": "C"},
        holds=lambda trace: "Roses" not in repr(trace.requests[1]),
    ),
    renderer="qwen3",
)
def reasoning_that_is_not_sent_back() -> Task:
    return Task(
        dataset=colour(),
        config=GenerateConfig(reasoning_history="none"),
        solver=asks_again(),
        scorer=exact(),
    )


@case(
    script=["red"],
    expect=Expect(turns=1, scores={"exact": "C"}),
    renderer="qwen3",
)
def reasoning_in_the_input() -> Task:
    messages: list[ChatMessage] = [
        ChatMessageUser(content="A colour?"),
        ChatMessageAssistant(content=[ContentReasoning(reasoning="Hm."), ContentText(text="blue")]),
        ChatMessageUser(content="Another?"),
    ]
    return Task(dataset=[Sample(input=messages, target="red")], scorer=exact())


@case(
    script=["<think>Roses.</think>red"],
    expect=Expect(turns=1, scores={"exact": "I", "includes": "C"}),
    tokens="the renderer parses the tags",
)
def thoughts_in_the_text() -> Task:
    return Task(dataset=colour(), scorer=[exact(), includes()])


@case(
    script=[say("The colour is", stop_reason="max_tokens")],
    expect=Expect(
        turns=1,
        scores={"includes": "I"},
        holds=lambda trace: trace.output["choices"][0]["stop_reason"] == "max_tokens",
    ),
)
def reply_that_was_cut() -> Task:
    return Task(dataset=colour(), scorer=includes())


@case(script=[""], expect=Expect(turns=1, scores={"includes": "I"}))
def empty_reply() -> Task:
    return Task(dataset=colour(), scorer=includes())


@make_solver
async def asks_again_after_a_refusal(state: TaskState, generate: Generate) -> TaskState:
    refused = await get_model().generate(state.messages)
    state.metadata["refused"] = (refused.empty, refused.error)
    return await generate(state)


@case(
    script=[ModelOutput(model="policy", error="refused"), "red"],
    expect=Expect(turns=2, scores={"includes": "C"}),
    tokens="what is sampled always makes a message",
)
def output_without_a_message() -> Task:
    return Task(
        dataset=colour(),
        solver=asks_again_after_a_refusal(),
        scorer=includes(),
    )


@case(
    script=['Ünïcödé ☃ "quotes" \\n {braces} <|tag|> 🧊 red'],
    expect=Expect(turns=1, scores={"includes": "C"}),
)
def unusual_characters() -> Task:
    return Task(
        dataset=[Sample(input="Ünïcödé ☃\n\t🧊 {x} <|im_start|>?", target="red")],
        scorer=includes(),
    )
