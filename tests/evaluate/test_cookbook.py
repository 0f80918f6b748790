"""The same sampler through the cookbook's evaluator and through the provider: where they differ.

docs/evaluate.md has the table; this holds it.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

import pytest
from inspect_ai.model import (
    ChatMessageSystem,
    ChatMessageTool,
    ChatMessageUser,
    GenerateConfig,
    Model,
    ModelOutput,
)
from inspect_ai.tool import ToolInfo, ToolParam, ToolParams
from tests.evaluate.test_provider import Client, model
from tinker_cookbook.eval.inspect_utils import InspectAPIFromTinkerSampling

from inspect_tinker_plugin.testing import tokenizer_path
from inspect_tinker_plugin.testing.policy import load_renderer

# The cookbook calls a method of the SDK that is about to go.
pytestmark = pytest.mark.filterwarnings("ignore:(?s).*sample_async:FutureWarning")


class Both(Client):
    """Answers the calls that either side makes."""

    async def sample_async(self, prompt: Any, sampling_params: Any, num_samples: int) -> Any:
        unasked = {"topk_sample_logprobs": 0, "include_prompt_logprobs": False}
        return await self.sample(prompt, num_samples, sampling_params, **unasked)


@dataclass
class Side:
    prompts: list[list[int]] = field(default_factory=list)
    outputs: list[ModelOutput] = field(default_factory=list)
    stops: list[Any] = field(default_factory=list)


def cookbook(renderer: str, sampler: Any) -> Model:
    name = str(tokenizer_path())
    return Model(
        InspectAPIFromTinkerSampling(renderer, name, sampling_client=sampler), GenerateConfig()
    )


def provider(renderer: str, sampler: Any) -> Model:
    return model(sampler, renderer=renderer)


async def play(
    make: Any, reply: str, *, first: str = "Say plum.", renderer: str = "qwen3", **config: Any
) -> Side:
    """Ask twice; the second prompt continues the first reply, with a result if it is a call."""
    client = Both(reply)
    asked: Model = make(renderer, client)
    parameters = ToolParams(properties={"a": ToolParam(type="number")}, required=["a"])
    tools = [ToolInfo(name="add", description="Adds.", parameters=parameters)]
    messages: list[Any] = [ChatMessageSystem(content="Be brief."), ChatMessageUser(content=first)]
    side = Side()
    for _ in range(2):
        output = await asked.generate(messages, tools, config=GenerateConfig(**config))
        side.outputs.append(output)
        messages.append(output.message)
        calls = output.message.tool_calls or []
        messages += [
            ChatMessageTool(content="3", tool_call_id=call.id, function=call.function)
            for call in calls
        ] or [ChatMessageUser(content="Again.")]
    side.prompts = [each["prompt"].to_ints() for each in client.asked]
    side.stops = [each["params"].stop for each in client.asked]
    return side


END = "<|im_end|>"
CALL = '<tool_call>\n{"name": "add", "arguments": {"a":  1.50}}\n</tool_call>'
XML_CALL = (
    "<tool_call>\n<function=add>\n<parameter=a>\n1.50\n</parameter>\n</function>\n</tool_call>"
)

DIFFERENCES: dict[str, tuple[dict[str, Any], set[str]]] = {
    "a plain reply": ({"reply": f"plum{END}", "renderer": "qwen3_instruct"}, set()),
    "space around a message": (
        {"reply": f"plum{END}", "first": " Say plum.\n", "renderer": "qwen3_instruct"},
        {"first prompt", "second prompt"},
    ),
    "a reply with reasoning": ({"reply": f"<think>\nhm\n</think>\n\nplum{END}"}, {"reasoning"}),
    "reasoning before a tool call": (
        {"reply": f"hm\n</think>\n{XML_CALL}{END}", "renderer": "nemotron3"},
        {"reasoning", "stop reason", "second prompt"},
    ),
    "a reply that is cut": (
        {"reply": "plum plum plum", "renderer": "qwen3_instruct"},
        {"stop reason"},
    ),
    "a tool call": (
        {"reply": f"{CALL}{END}", "renderer": "qwen3_instruct"},
        {"stop reason", "second prompt"},
    ),
    "a stop sequence": (
        {"reply": f"plum{END}", "stop_seqs": ["X"], "renderer": "qwen3_instruct"},
        {"stop sequences"},
    ),
}
"""How to play, and what differs."""


@pytest.mark.parametrize("name", DIFFERENCES)
async def test_where_the_cookbooks_evaluator_differs(name: str) -> None:
    how, expected = DIFFERENCES[name]
    theirs, ours = await play(cookbook, **how), await play(provider, **how)
    found = {
        "first prompt": theirs.prompts[0] != ours.prompts[0],
        "second prompt": theirs.prompts[1] != ours.prompts[1],
        "reasoning": theirs.outputs[0].message.content != ours.outputs[0].message.content
        and "hm" in str(ours.outputs[0].message.content),
        "stop reason": theirs.outputs[0].stop_reason != ours.outputs[0].stop_reason,
        "stop sequences": theirs.stops != ours.stops,
    }
    assert {each for each, differs in found.items() if differs} == expected
    assert theirs.outputs[0].completion.strip() == ours.outputs[0].completion.strip()
    if "reasoning" not in expected:  # which templates may drop
        sampled = load_renderer("qwen3_instruct").tokenizer.encode(how["reply"])
        begun = [*ours.prompts[0], *sampled]
        assert ours.prompts[1][: len(begun)] == begun, "the provider continues what was sampled"
