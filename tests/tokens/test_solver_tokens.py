"""Real solvers with the token layer: Inspect's changes to messages split nothing."""

from __future__ import annotations

import json
from collections.abc import Sequence
from typing import Any

import pytest
from inspect_ai import Task
from inspect_ai.agent import as_tool, handoff, react
from inspect_ai.dataset import Sample
from inspect_ai.scorer import includes
from inspect_ai.solver import (
    Generate,
    Solver,
    TaskState,
    basic_agent,
    fork,
    generate,
    system_message,
    use_tools,
)
from tests.functions import make_solver
from tests.tokens.conversations import Rollout, bash, play_out
from tests.tokens.formats import renderer

from inspect_tinker_plugin.contracts.episodes import EpisodeResult
from inspect_tinker_plugin.tokens.episode import DatasetRenderer


def call(name: str, **arguments: Any) -> str:
    payload = json.dumps({"name": name, "arguments": arguments}, separators=(",", ":"))
    return f"<tool_call>\n{payload}\n</tool_call>"


async def play(
    chain: Solver | Any, texts: Sequence[str], *, name: str = "qwen3_instruct"
) -> tuple[Rollout, EpisodeResult]:
    """Run a solver with a scripted policy; the whole script has to be used."""
    sample = Sample(input="Do it.", target="x", id=1)
    task = Task(dataset=[sample], solver=chain, scorer=includes())
    rollout = Rollout(DatasetRenderer(renderer(name)))
    script = list(texts)
    outcome = await play_out(task, lambda request: rollout.answer(request, script.pop(0)))
    assert outcome.error is None
    assert not script
    return rollout, outcome


AGENT = [
    call("bash", cmd="ls"),
    "I think about it.",
    "I look again.\n\n" + call("bash", cmd="cat a"),
    '<tool_call>\n{"name": "bash", "arguments": {"cmd": oops}}\n</tool_call>',
    call("nonsense"),
    call("bash"),
    call("bash", cmd="1") + "\n" + call("bash", cmd="2"),
    call("submit", answer="x"),
]


@pytest.mark.parametrize(
    "make", [lambda: react(tools=[bash()]), lambda: basic_agent(tools=[bash()])],
    ids=["react", "basic_agent"],
)  # fmt: skip
async def test_an_agent_with_every_kind_of_call_is_one_datum(make: Any) -> None:
    rollout, result = await play(make(), AGENT)
    assert len(rollout.data()) == 1
    assert rollout.tokens.metrics["tokens/resampled"] == 0
    assert result.scores["includes"].score.value == "C"
    assert result.usage.output_tokens == rollout.tokens.metrics["tokens/sampled"]


async def test_an_agent_that_reasons_is_one_datum() -> None:
    texts = [f"<think>\nHm.\n</think>\n\n{text}" for text in AGENT]
    rollout, _ = await play(react(tools=[bash()]), texts, name="qwen3_keep_thinking")
    assert len(rollout.data()) == 1


async def test_a_tool_loop_of_generate_is_one_datum() -> None:
    chain = [system_message("Be good."), use_tools(bash()), generate()]
    rollout, _ = await play(chain, [call("bash", cmd="ls"), call("bash", cmd="ls"), "x"])
    assert len(rollout.data()) == 1


async def test_a_sub_agent_as_a_tool_costs_one_more_segment_and_no_sampled_token() -> None:
    sub = react(name="sub", description="Helps.", tools=[bash()])
    texts = [
        call("sub", input="go"),
        call("bash", cmd="ls"),
        call("submit", answer="done"),
        "I see.",
        call("submit", answer="x"),
    ]
    rollout, _ = await play(react(tools=[as_tool(sub)]), texts)
    assert len(rollout.data()) == 2
    assert rollout.tokens.metrics["tokens/segments"] == 2
    assert rollout.tokens.metrics["tokens/resampled"] == 0


async def test_a_handoff_reports_what_it_rewrote() -> None:
    sub = react(name="sub", description="Helps.", tools=[bash()])
    texts = [
        call("transfer_to_sub"),
        call("bash", cmd="ls"),
        call("submit", answer="done"),
        call("submit", answer="x"),
    ]
    rollout, _ = await play(react(tools=[handoff(sub)]), texts)
    assert rollout.tokens.metrics["tokens/segments"] == len(rollout.data()) > 1
    assert rollout.tokens.metrics["tokens/resampled"] > 0


@make_solver
async def two_turns(state: TaskState, generate: Generate) -> TaskState:
    state = await generate(state)
    state.messages.append(state.user_prompt.model_copy(update={"content": "More."}))
    return await generate(state)


async def test_branches_of_a_fork_each_continue_their_own_prompt() -> None:
    @make_solver
    async def forked(state: TaskState, generate: Generate) -> TaskState:
        return (await fork(state, [two_turns(), two_turns()]))[0]

    rollout, _ = await play(forked(), ["One.", "Two.", "Three.", "Four."])
    assert rollout.tokens.metrics["tokens/resampled"] == 0
    assert rollout.continues(2, 0)
    assert rollout.continues(3, 1)
