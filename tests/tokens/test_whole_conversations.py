"""A renderer that renders whole conversations only (``tml_v0``) and takes a reasoning effort."""

from __future__ import annotations

from typing import Any

import pytest
from inspect_ai import Task
from inspect_ai.agent import react
from inspect_ai.dataset import Sample
from inspect_ai.model import ChatMessage, ChatMessageUser, GenerateConfig
from inspect_ai.scorer import includes
from tests.tokens.conversations import BASH, Rollout, bash, opening, request, tool_results
from tests.tokens.test_renderers import made
from tinker_cookbook.renderers import Renderer

from inspect_tinker_plugin.testing import Script, call, say, submit
from inspect_tinker_plugin.testing.policy import reply_tokens
from inspect_tinker_plugin.testing.sides import Conditions, run_eval, run_rollout
from inspect_tinker_plugin.testing.traces import compare_traces
from inspect_tinker_plugin.tokens.episode import DatasetRenderer, EpisodeTokens


def whole() -> Renderer:
    renderer = made("tml_v0")
    assert renderer is not None
    return renderer


def task() -> Task:
    sample = Sample(input="List the files, then answer x.", target="x", id=1)
    return Task(dataset=[sample], solver=react(tools=[bash()]), scorer=includes())


async def test_a_scripted_episode_is_as_in_an_eval() -> None:
    script: Script = [say("I look.", call("bash", cmd="ls")), "Hm.", submit("x")]
    expected = await run_eval(task, script)
    found = await run_rollout(task, script, Conditions(renderer=whole()))
    assert not compare_traces(expected, found, same_tokens=False)


@pytest.mark.parametrize("effort", [None, "low"])
async def test_prompts_continue_with_the_sampled_tokens(effort: Any) -> None:
    context = DatasetRenderer(whole())
    episode = EpisodeTokens(context, task="t", sample_id=1)
    config = GenerateConfig(reasoning_effort=effort)
    messages: list[ChatMessage] = opening()
    before: list[int] = []
    for turn in range(5):
        asked = request(messages, tools=[BASH], config=config)
        prompt = episode.prompt(asked).to_ints()
        assert prompt[: len(before)] == before
        again = EpisodeTokens(context, task="t", sample_id=1)
        assert again.prompt(asked).to_ints() == prompt  # as the renderer writes it whole
        said = say("", call("bash", cmd=f"ls {turn}")) if turn % 2 else say(f"Turn {turn}.")
        sampled = reply_tokens(context.renderer, said)
        output = episode.parse(sampled, stop_reason="stop", request=asked)
        before = [*prompt, *sampled]
        messages = [
            *messages,
            output.message,
            *tool_results(output, "a.py"),
            ChatMessageUser(content="On."),
        ]
    assert episode.metrics["tokens/segments"] == 1
    assert episode.metrics["tokens/continued"] == 4
    shown = context.tokenizer.decode(before)
    assert ("Thinking effort level: 0.3" if effort else "Thinking effort level: 0.9") in shown


def test_another_effort_is_another_conversation(caplog: pytest.LogCaptureFixture) -> None:
    rollout = Rollout(DatasetRenderer(whole()))
    messages: list[ChatMessage] = opening()
    for effort in ("high", "high", "none", "xhigh"):
        output = rollout.turn(messages, "Yes.", config=GenerateConfig(reasoning_effort=effort))
        messages = [*messages, output.message, ChatMessageUser(content="And?")]
    levels = [
        rollout.context.tokenizer.decode(step.ob.to_ints())
        .partition("level: ")[2]
        .partition("<")[0]
        for step in rollout.transitions
    ]
    assert levels == ["0.9", "0.9", "0", "0.99"]
    assert len(rollout.data()) == 3
    assert not caplog.text


def test_an_effort_that_the_renderer_does_not_take_warns(caplog: pytest.LogCaptureFixture) -> None:
    renderer = made("qwen3_instruct")
    assert renderer is not None
    rollout = Rollout(DatasetRenderer(renderer))
    rollout.turn(opening(), "Yes.", config=GenerateConfig(reasoning_effort="low"))
    assert "sets reasoning_effort" in caplog.text
