"""A conversation is unchanged exactly when the key of each of its messages is."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import pytest
from inspect_ai.model import (
    ChatMessage,
    ChatMessageAssistant,
    ChatMessageTool,
    ChatMessageUser,
    ContentImage,
    ContentReasoning,
    ContentText,
)
from inspect_ai.tool import ToolCall, ToolCallError, ToolInfo, ToolParams
from inspect_ai.util import JSONSchema

from inspect_tinker_plugin.tokens.message_keys import (
    message_key,
    spoken_letters,
    tools_key,
)


def rich() -> list[ChatMessage]:
    return [
        ChatMessageUser(content=[ContentText(text="Look."), ContentImage(image="data:,a")]),
        ChatMessageAssistant(
            content=[ContentReasoning(reasoning="Hm."), ContentText(text="I look.")],
            tool_calls=[
                ToolCall(id="1", function="ls", arguments={"a": 1, "b": {"c": [True, "x"]}}),
                ToolCall(id="2", function="ls", arguments={"a": "x", "b": "y"}),
            ],
        ),
        ChatMessageTool(
            content="no", tool_call_id="1", error=ToolCallError("permission", "not yours")
        ),
        ChatMessageTool(content="files", tool_call_id="2", function="ls"),
    ]


def swap(arguments: dict[str, Any]) -> None:
    arguments["a"] = arguments.pop("a")


CHANGES: dict[str, Callable[[Any], object]] = {
    "a part's text": lambda m: setattr(m[0].content[0], "text", "look."),
    "an image": lambda m: setattr(m[0].content[1], "image", "data:,b"),
    "a part more": lambda m: m[0].content.append(ContentText(text="")),
    "a part less": lambda m: m[0].content.pop(),
    "parts in another order": lambda m: m[1].content.reverse(),
    "reasoning": lambda m: setattr(m[1].content[0], "reasoning", "hm."),
    "reasoning that is redacted": lambda m: setattr(m[1].content[0], "redacted", True),
    "a call's id": lambda m: setattr(m[1].tool_calls[0], "id", "3"),
    "a call's function": lambda m: setattr(m[1].tool_calls[0], "function", "cat"),
    "a parse error": lambda m: setattr(m[1].tool_calls[0], "parse_error", "no JSON"),
    "a call less": lambda m: m[1].tool_calls.pop(),
    "no calls": lambda m: setattr(m[1], "tool_calls", None),
    "calls in another order": lambda m: m[1].tool_calls.reverse(),
    "an argument": lambda m: m[1].tool_calls[1].arguments.update(a="z"),
    "an argument's type": lambda m: m[1].tool_calls[0].arguments.update(a=True),
    "an argument as a float": lambda m: m[1].tool_calls[0].arguments.update(a=1.0),
    "a nested argument": lambda m: m[1].tool_calls[0].arguments["b"]["c"].append(2),
    "a nested argument's type": lambda m: m[1].tool_calls[0].arguments["b"].update(c=[1, "x"]),
    "an argument more": lambda m: m[1].tool_calls[0].arguments.update(z=None),
    "arguments in another order": lambda m: swap(m[1].tool_calls[1].arguments),
    "an error's message": lambda m: setattr(m[2].error, "message", "mine"),
    "an error less": lambda m: setattr(m[2], "error", None),
    "a result's call": lambda m: setattr(m[3], "tool_call_id", "1"),
    "a result's function": lambda m: setattr(m[3], "function", "cat"),
    "a result": lambda m: setattr(m[3], "content", "Files"),
    "a message less": lambda m: m.pop(1),
}


@pytest.mark.parametrize("change", CHANGES)
def test_every_change_in_place_is_noticed(change: str) -> None:
    messages = rich()
    seen = list(map(message_key, messages))
    assert list(map(message_key, copy.deepcopy(messages))) == seen
    CHANGES[change](messages)
    assert list(map(message_key, messages)) != seen
    assert list(map(message_key, rich())) == seen


class Titled(ToolParams):
    """Parameters with one more field."""

    title: str = "one"


def tools() -> list[ToolInfo]:
    schemas = {
        "text": JSONSchema(type="string", description="A text.", default="x"),
        "many": JSONSchema(type="array", items=JSONSchema(type="integer", minimum=0)),
        "either": JSONSchema(anyOf=[JSONSchema(type="integer"), JSONSchema(type="null")]),
    }
    parameters = ToolParams(properties=schemas, required=["text"])
    return [
        ToolInfo(name="plain", description="Does it.", parameters=parameters),
        ToolInfo(name="titled", description="Does it.", parameters=Titled()),
    ]


def of_plain(
    change: Callable[[dict[str, JSONSchema]], object],
) -> Callable[[list[ToolInfo]], object]:
    return lambda offered: change(offered[0].parameters.properties)


OFFERS: dict[str, Callable[[list[ToolInfo]], object]] = {
    "a name": lambda offered: setattr(offered[0], "name", "other"),
    "a description": lambda offered: setattr(offered[1], "description", "Does more."),
    "a tool less": lambda offered: offered.pop(),
    "another order": lambda offered: offered.reverse(),
    "what is required": lambda offered: offered[0].parameters.required.append("many"),
    "what more there may be": lambda offered: setattr(
        offered[0].parameters, "additionalProperties", True
    ),
    "a field of a class of its own": lambda offered: setattr(offered[1].parameters, "title", "two"),
    "a parameter's description": of_plain(lambda p: setattr(p["text"], "description", "More.")),
    "a default of one": of_plain(lambda p: setattr(p["text"], "default", 1)),
    "a default of true": of_plain(lambda p: setattr(p["text"], "default", True)),
    "a default of 1.0": of_plain(lambda p: setattr(p["text"], "default", 1.0)),
    "no default": of_plain(lambda p: setattr(p["text"], "default", None)),
    "a schema within": of_plain(lambda p: setattr(p["many"].items, "minimum", 1)),
    "an alternative": of_plain(lambda p: p["either"].anyOf.reverse()),  # type: ignore[union-attr]
    "a parameter's name": of_plain(lambda p: p.update(other=p.pop("text"))),
    "the order of parameters": of_plain(lambda p: p.update(text=p.pop("text"))),
}


def test_offers_of_tools_have_keys_by_what_they_say() -> None:
    def changed(change: Callable[[list[ToolInfo]], object]) -> list[ToolInfo]:
        offered = tools()
        change(offered)
        return offered

    offers = [tools(), *map(changed, OFFERS.values())]
    keys = list(map(tools_key, offers))
    assert len(set(keys)) == len(keys)
    for offered, key in zip(offers, keys, strict=True):
        assert tools_key(copy.deepcopy(offered)) == key


def test_odd_tools_have_keys_too() -> None:
    odd = tools()
    odd[0].parameters.properties["text"].default = "\ud800"
    assert tools_key(odd) == tools_key(copy.deepcopy(odd)) != tools_key(tools())


@pytest.mark.parametrize(
    ("text", "visible"),
    [
        ("<think>a</think> b <think x='1'>c</think>d", "bd"),
        ("<think>a<think>b</think>c</think>d", "c</think>d"),
        ("a</think>b<think>c", "a</think>b<think>c"),
        ("a<think>b", "a<think>b"),
    ],
)
def test_only_closed_thoughts_in_tags_are_not_visible(text: str, visible: str) -> None:
    assert spoken_letters(ChatMessageAssistant(content=text)) == visible


@pytest.mark.parametrize("text", ["<think>" * 300_000, "<think" * 300_000 + "</think>"])
def test_thoughts_that_never_end_are_read_in_linear_time(text: str) -> None:
    """A program under the bridge sends back whatever a policy said; hours in the event loop."""
    assert spoken_letters(ChatMessageAssistant(content=text)) == text
