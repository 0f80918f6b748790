"""A model call over the context window is answered as a model API answers it, and is no failure."""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence
from typing import Any

import pytest
from inspect_ai import Task, eval_async
from inspect_ai.agent import react
from inspect_ai.dataset import Sample
from inspect_ai.model import ChatMessage, CompactionTrim, ModelOutput, ModelUsage, get_model
from inspect_ai.scorer import includes
from inspect_ai.solver import Generate, TaskState, basic_agent, generate, use_tools
from tests.functions import make_solver, make_tool
from tests.rl.policies import END, Words, encode, renderer, tool_call, trained_tokens
from tinker_cookbook.completers import StopCondition, TokensWithLogprobs
from tinker_cookbook.rl.data_processing import trajectory_to_data
from tinker_cookbook.rl.rollout_limits import RolloutLimits
from tinker_cookbook.rl.rollout_strategy import RetryOnFailure
from tinker_cookbook.rl.rollouts import do_group_rollout
from tinker_cookbook.rl.types import TrajectoryGroup

from inspect_tinker_plugin.contracts.errors import ConfigError
from inspect_tinker_plugin.rl.dataset import as_rl_dataset
from inspect_tinker_plugin.rl.env import InspectEnv

WINDOW = 2_000


@make_tool
async def read(words: int) -> str:
    """Read.

    Args:
        words: How many.
    """
    return "plum " * words


@make_solver
async def stubborn(state: TaskState, generate: Generate) -> TaskState:
    """Asks on, whatever the model says."""
    for _ in range(4):
        state = await generate(state, tool_calls="single")
    return state


class Sampler(Words):
    """Refuses prompts over its window, as a completer of the cookbook's does, and counts tokens."""

    def __init__(self, lines: Sequence[str], window: int) -> None:
        super().__init__(lines)
        self.window = window
        self.room: list[int | None] = []

    async def __call__(
        self, model_input: Any, stop: StopCondition, *, max_tokens: int | None = None
    ) -> TokensWithLogprobs:
        if model_input.length >= self.window:
            raise ValueError(f"Prompt length ({model_input.length}) exceeds context window")
        assert max_tokens is None or model_input.length + max_tokens <= self.window
        self.room.append(max_tokens)
        return await super().__call__(model_input, stop)


def task(made: Any) -> Task:
    sample = Sample(id=1, input="Read, then say plum.", target="plum")
    return Task(dataset=[sample], solver=made, scorer=includes(), message_limit=40, name="reading")


SHORT, LONG, SAY = tool_call("read", '{"words":3}'), tool_call("read", '{"words":3000}'), "plum"
SOME = tool_call("read", '{"words":200}')
OVER = None
"""A call that no sampler could answer."""

SOLVERS: dict[str, tuple[Callable[[], Any], list[str | None]]] = {
    "generate": (lambda: [use_tools(read()), generate()], [SHORT, LONG, OVER]),
    "react": (lambda: react(tools=[read()]), [SHORT, LONG, OVER]),
    "react, truncated": (
        lambda: react(tools=[read()], truncation="auto"),
        [*[SOME] * 3, OVER, "so", tool_call("submit", '{"answer":"plum"}')],
    ),
    "basic_agent": (lambda: basic_agent(tools=[read()]), [LONG, OVER]),
    "stubborn": (lambda: [use_tools(read()), stubborn()], [LONG, OVER, OVER, OVER]),
}


async def roll(
    made: Any, script: Sequence[str | None], **options: Any
) -> tuple[TrajectoryGroup, Sampler, InspectEnv]:
    dataset = as_rl_dataset(task(made), renderer(), context_window=WINDOW, **options)
    [builder] = dataset.get_batch(0)
    envs: list[Any] = []
    make = builder.make_envs

    async def made_envs() -> Sequence[Any]:
        envs.extend(await make())
        return envs

    builder.make_envs = made_envs  # type: ignore[method-assign]
    sampler = Sampler([line for line in script if line is not None], WINDOW)
    group = await do_group_rollout(builder, sampler, strategy=RetryOnFailure())
    return group, sampler, envs[0]


def make_outputs(script: Sequence[str | None]) -> list[ModelOutput]:
    """Write what an eval's model says: the same replies, and a model API's answer to the others."""
    outputs = []
    for line in script:
        if line is None:
            outputs.append(ModelOutput.from_content("mock", "too long", stop_reason="model_length"))
        elif "<tool_call>" in line:
            call = json.loads(line.split("<tool_call>")[1].split("</tool_call>")[0])
            outputs.append(
                ModelOutput.for_tool_call("mock", call["name"], call["arguments"], content="")
            )
        else:
            outputs.append(ModelOutput.from_content("mock", line))
    for output in outputs:  # else its tokens are counted, with an encoding from the network
        output.usage = ModelUsage(input_tokens=1, output_tokens=1, total_tokens=2)
    return outputs


def shown(messages: Sequence[ChatMessage]) -> list[tuple[str, str]]:
    return [
        (
            each.role,
            "over" if "too long" in each.text or "The prompt has" in each.text else each.text,
        )
        for each in messages
    ]


@pytest.mark.parametrize("name", SOLVERS)
async def test_a_call_over_the_window_ends_as_in_an_eval(name: str) -> None:
    made, script = SOLVERS[name]
    group, sampler, env = await roll(made(), script)
    model = get_model("mockllm/model", custom_outputs=make_outputs(script), memoize=False)
    [log] = await eval_async(task(made()), model=model, log_dir="memory://over")
    assert log.status == "success", log.error
    assert log.samples is not None
    [sample] = log.samples
    assert env.ending is not None
    result = env.ending.result
    assert shown(result.state.messages) == shown(sample.messages)
    assert sample.scores is not None
    value = sample.scores["includes"].value
    assert group.get_total_rewards() == [1.0 if value == "C" else 0.0]
    assert len(sampler.room) == sum(line is not None for line in script)
    metrics = group.trajectories_G[0].transitions[-1].metrics
    assert metrics["tokens/over_window"] == script.count(OVER)
    sampled = [token for line in script if line is not None for token in encode(line + END)]
    assert trained_tokens(trajectory_to_data(group.trajectories_G[0], 1.0)) == sampled


async def test_a_first_prompt_over_the_window_is_scored_without_a_turn() -> None:
    group, sampler, _ = await roll([use_tools(read()), long_first()], [OVER])
    assert sampler.room == []
    assert group.get_total_rewards() == [0.0]


@make_solver
async def long_first(state: TaskState, generate: Generate) -> TaskState:
    state.user_prompt.text = "plum " * 3_000
    return await generate(state)


@pytest.mark.parametrize("named", [None, "rl/policy"])
async def test_a_share_of_the_window_brings_compaction_on(named: str | None) -> None:
    trim = CompactionTrim(threshold=0.9, preserve=0.5)
    script = [*[SOME] * 6, tool_call("submit", '{"answer":"plum"}')]
    group, sampler, _ = await roll(react(tools=[read()], model=named, compaction=trim), script)
    assert len(sampler.room) == len(script)
    assert group.get_total_rewards() == [1.0]
    assert group.trajectories_G[0].transitions[-1].metrics["tokens/over_window"] == 0


async def test_replies_stay_within_the_window() -> None:
    limits = RolloutLimits(max_trajectory_tokens=1_500, max_turns=7)
    _, sampler, env = await roll(
        [use_tools(read()), generate()], [SHORT, SAY], rollout_limits=limits
    )
    assert all(room is not None and room < 1_500 for room in sampler.room)
    assert env.rollout_limits is not None
    assert env.rollout_limits.max_turns == 7


def test_a_window_without_tokens_is_refused() -> None:
    with pytest.raises(ConfigError, match="context_window"):
        as_rl_dataset(task(generate()), renderer(), context_window=0)
