"""The scripted policy plays its script in tokens, for one episode or for many at once."""

from __future__ import annotations

import asyncio
import json
from typing import Any, cast

import pytest
import tinker
from inspect_ai import Task
from inspect_ai.agent import react
from inspect_ai.dataset import Sample
from inspect_ai.scorer import includes
from tests.functions import make_tool
from tests.tokens import formats
from tinker_cookbook.completers import TokenCompleter
from tinker_cookbook.rl.data_processing import trajectory_to_data
from tinker_cookbook.rl.rollout_runner import run_rollout

from inspect_tinker_plugin import as_rl_dataset
from inspect_tinker_plugin.contracts.errors import RendererError
from inspect_tinker_plugin.testing import (
    ScriptedPolicy,
    ScriptTurn,
    call,
    load_renderer,
    say,
    submit,
)
from inspect_tinker_plugin.testing.policy import reply_tokens
from inspect_tinker_plugin.testing.replies import ScriptExhausted


@make_tool
async def multiply(x: int, y: int) -> int:
    """Multiply.

    Args:
        x: First.
        y: Second.
    """
    return x * y


def agent_task() -> Task:
    return Task(
        dataset=[Sample(input="6 times 7?", target="42")],
        solver=react(tools=[multiply()]),
        scorer=includes(),
    )


SCRIPT: list[ScriptTurn] = [say("I multiply.", call("multiply", x=6, y=7)), submit("42")]


async def test_one_policy_serves_a_group() -> None:
    renderer = load_renderer()
    dataset = as_rl_dataset(agent_task(), renderer, group_size=4)
    [builder] = dataset.get_batch(0)
    envs = await builder.make_envs()
    policy = ScriptedPolicy(renderer, SCRIPT)
    try:
        trajectories = await asyncio.gather(
            *[run_rollout(cast(TokenCompleter, policy), env) for env in envs]
        )
    finally:
        await builder.cleanup()
    for trajectory in trajectories:
        assert sum(step.reward for step in trajectory.transitions) == 1.0
        assert len(trajectory.transitions) == 2
        assert len(trajectory_to_data(trajectory, 1.0)) == 1
    assert policy.calls == 8


def prompt(*tokens: int) -> tinker.ModelInput:
    return tinker.ModelInput.from_ints(list(tokens))


async def test_the_turn_is_told_from_the_prompt() -> None:
    policy = ScriptedPolicy(load_renderer(), ["first", "second"])
    first = await policy(prompt(1, 2), [])
    again = await policy(prompt(1, 2), [])
    second = await policy(prompt(1, 2, *first.tokens, 3), [])
    assert first.tokens == again.tokens
    assert second.tokens != first.tokens
    with pytest.raises(ScriptExhausted, match="2 replies, but turn 2"):
        await policy(prompt(1, 2, *first.tokens, 3, *second.tokens, 4), [])


@pytest.mark.parametrize("name", ["qwen3", "qwen3_instruct", "qwen3_disable_thinking"])
def test_a_reply_comes_back_through_the_renderer(name: str) -> None:
    renderer = load_renderer(name)
    tokens = reply_tokens(renderer, say("Look.", call("find", what="käse", n=[1, 2])))
    message, termination = renderer.parse_response(tokens)
    assert termination.is_clean
    [tool_call] = message["tool_calls"]
    assert tool_call.function.name == "find"
    assert json.loads(tool_call.function.arguments) == {"what": "käse", "n": [1, 2]}


@pytest.mark.parametrize("name", ["qwen3", "qwen3_5", "kimi_k2", "kimi_k25", "kimi_k26"])
def test_reasoning_is_said_in_the_format_of_the_renderer(name: str) -> None:
    tokens = reply_tokens(formats.renderer(name), say("Six.", reasoning="Two times three."))
    message, _ = formats.renderer(name).parse_response(tokens)
    assert message["content"] == [
        {"type": "thinking", "thinking": "Two times three."},
        {"type": "text", "text": "Six."},
    ]


@pytest.mark.parametrize("name", ["llama3", "role_colon"])
def test_a_format_without_reasoning_is_an_error_that_says_so(name: str) -> None:
    with pytest.raises(RendererError, match="no format for a scripted reply"):
        reply_tokens(formats.renderer(name), say("Six.", reasoning="Two times three."))


@pytest.mark.parametrize(
    ("policy_room", "call_room", "length"), [(3, None, 3), (None, 2, 2), (4, 2, 2)]
)
async def test_a_long_reply_is_cut(
    policy_room: int | None, call_room: int | None, length: int
) -> None:
    policy = ScriptedPolicy(load_renderer(), ["a long reply " * 9], max_tokens=policy_room)
    reply = await policy(prompt(1), [], max_tokens=call_room)
    assert (len(reply.tokens), reply.stop_reason) == (length, "length")
    assert reply.maybe_logprobs == [0.0] * length


async def test_a_cut_reply_of_the_script_has_no_stop_token() -> None:
    renderer = load_renderer()
    whole = reply_tokens(renderer, say("half"))
    cut = await ScriptedPolicy(renderer, [say("half", stop_reason="max_tokens")])(prompt(1), [])
    assert cut.tokens == whole[: len(cut.tokens)]
    assert not set(cut.tokens) & set(cast(Any, renderer.get_stop_sequences()))
    assert cut.stop_reason == "length"


async def test_functions_without_a_request_see_the_prompt_as_text() -> None:
    renderer = load_renderer()
    policy = ScriptedPolicy(renderer, lambda request: say(request.messages[0].text.upper()))
    asked = renderer.tokenizer.encode("how many?", add_special_tokens=False)
    reply = await policy(prompt(*asked), [])
    message, _ = renderer.parse_response(reply.tokens)
    assert message["content"] == "HOW MANY?"
