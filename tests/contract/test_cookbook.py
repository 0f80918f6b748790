"""The parts of tinker_cookbook that the package depends on: a change there fails here first."""

from __future__ import annotations

import asyncio
import contextlib
import inspect
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, get_type_hints

import pytest
import tinker
from tinker_cookbook import renderers
from tinker_cookbook.completers import TinkerTokenCompleter, TokenCompleter, TokensWithLogprobs
from tinker_cookbook.model_info import get_recommended_renderer_name
from tinker_cookbook.renderers import Renderer
from tinker_cookbook.renderers.base import ParseTermination, RenderContext
from tinker_cookbook.rl.data_processing import trajectory_to_data
from tinker_cookbook.rl.rollout_limits import ParseErrorPolicy, RolloutLimits
from tinker_cookbook.rl.rollout_runner import run_rollout
from tinker_cookbook.rl.rollouts import do_group_rollout, set_rollout_executor
from tinker_cookbook.rl.types import (
    ActionExtra,
    Env,
    EnvGroupBuilder,
    InitialObservationOverflow,
    RLDataset,
    RLDatasetBuilder,
    StepResult,
    StopReason,
    Trajectory,
    Transition,
)

from inspect_tinker_plugin.contracts.errors import EpisodeClosedError
from inspect_tinker_plugin.rl.dataset import InspectRLDataset, as_rl_dataset
from inspect_tinker_plugin.rl.env import InspectEnv
from inspect_tinker_plugin.rl.group import InspectGroupBuilder, in_branch_order
from inspect_tinker_plugin.testing import load_renderer
from inspect_tinker_plugin.tokens.continuation import Turn


def parameters(function: Callable[..., Any]) -> list[str]:
    return [name for name in inspect.signature(function).parameters if name != "self"]


@pytest.mark.parametrize(
    ("function", "expected"),
    [
        (Env.initial_observation, []),
        (Env.step, ["action", "extra"]),
        (EnvGroupBuilder.make_envs, []),
        (EnvGroupBuilder.compute_group_rewards, ["trajectory_group", "env_group"]),
        (EnvGroupBuilder.logging_tags, []),
        (EnvGroupBuilder.cleanup, []),
        (RLDataset.get_batch, ["index"]),
        (RLDatasetBuilder.__call__, []),
        (TokenCompleter.__call__, ["model_input", "stop", "max_tokens"]),
        (Renderer.get_stop_sequences, []),
        (Renderer.parse_response, ["response"]),
        (Renderer.render_message, ["message", "ctx"]),
        (Renderer.create_conversation_prefix_with_tools, ["tools", "system_prompt"]),
        (get_recommended_renderer_name, ["model_name"]),
        (set_rollout_executor, ["executor"]),
    ],
    ids=lambda value: getattr(value, "__qualname__", ""),
)
def test_parameters_that_we_implement_or_pass_by_position(
    function: Callable[..., Any], expected: list[str]
) -> None:
    assert parameters(function) == expected


@pytest.mark.parametrize(
    ("function", "needed"),
    [
        (Renderer.build_generation_prompt, {"messages"}),
        (renderers.get_renderer, {"name", "tokenizer"}),
        (run_rollout, {"policy", "env", "limits", "parse_errors"}),
        (do_group_rollout, {"env_group_builder", "policy", "strategy"}),
        (trajectory_to_data, {"traj"}),
        (TinkerTokenCompleter, {"sampling_client", "max_tokens", "temperature"}),
        (TokensWithLogprobs, {"tokens", "maybe_logprobs", "stop_reason"}),
        (RenderContext, {"idx", "is_last", "prev_message", "last_user_index"}),
        (StepResult, {"reward", "episode_done", "next_observation", "next_stop_condition"}),
        (StepResult, {"metrics", "logs"}),
        (InitialObservationOverflow, {"reward", "metrics", "logs"}),
        (Trajectory, {"transitions", "final_ob", "stop_reason"}),
        (Transition, {"ob", "ac", "reward", "episode_done", "metrics", "logs"}),
        (RolloutLimits, {"max_turns", "max_trajectory_tokens", "max_tool_calls"}),
        (ParseErrorPolicy, {"max_consecutive", "penalty_per_error", "terminal_reward"}),
        (ParseErrorPolicy, {"mask_error_turns", "retry_message_template"}),
    ],
    ids=lambda value: getattr(value, "__qualname__", ""),
)
def test_parameters_that_we_pass_by_name(function: Callable[..., Any], needed: set[str]) -> None:
    assert needed <= set(parameters(function))


@pytest.mark.parametrize(
    ("base", "ours", "methods"),
    [
        (Env, InspectEnv, ["initial_observation", "step"]),
        (EnvGroupBuilder, InspectGroupBuilder, ["make_envs", "compute_group_rewards", "cleanup"]),
        (EnvGroupBuilder, InspectGroupBuilder, ["logging_tags"]),
        (RLDataset, InspectRLDataset, ["get_batch", "__len__"]),
    ],
    ids=lambda value: getattr(value, "__name__", ""),
)
def test_our_classes_keep_the_signatures_of_their_bases(
    base: type, ours: type, methods: list[str]
) -> None:
    assert issubclass(ours, base)
    for method in methods:
        assert parameters(getattr(ours, method)) == parameters(getattr(base, method))


def test_the_cookbook_asks_nothing_more_of_our_classes() -> None:
    abstract = {
        name for base in InspectEnv.__mro__ for name in vars(base).get("__abstractmethods__", ())
    }
    assert abstract == {"initial_observation", "step"}
    for ours in (InspectEnv, InspectGroupBuilder, InspectRLDataset):
        assert not inspect.isabstract(ours)


def test_stop_reasons_that_episodes_report() -> None:
    assert {
        "completed",
        "context_overflow",
        "max_tokens",
        "max_tool_calls",
        "max_turns",
        "parse_error",
        "rollout_timeout",
        "tool_stopped",
    } <= {str(reason) for reason in StopReason}


def test_the_sampler_says_why_it_stopped() -> None:
    assert "stop_reason" in get_type_hints(ActionExtra)


def test_the_verdict_of_a_parse_is_not_a_truth_value() -> None:
    # Every member is a non-empty string, so `if termination:` would always hold.
    assert all(bool(member) for member in ParseTermination)
    assert {member.is_clean for member in ParseTermination} == {True, False}


@dataclass
class Identified(TokensWithLogprobs):
    """What 0.6 samples: the asynchronous loss refuses datums of actions without a sequence's id."""

    sequence_id: str | None = None


def test_a_reply_that_is_cut_at_its_end_is_still_of_its_sequence() -> None:
    prompt = tinker.ModelInput.from_ints([1, 2])
    action = Identified(tokens=[5, 6, 7], maybe_logprobs=[-1.0, -2.0, -3.0], sequence_id="s:1")
    turn = Turn(has_user=True, prompt=prompt, length=2, sampled=(5, 6, 7), kept=2)
    given = Transition(ob=prompt, ac=action, reward=0.0, episode_done=True)
    [kept] = in_branch_order([given], [turn])
    assert (kept.ac.tokens, kept.ac.maybe_logprobs) == ([5, 6], [-1.0, -2.0])
    assert getattr(kept.ac, "sequence_id", None) == "s:1"


async def test_clean_up_that_is_shielded_ends_all_episodes_of_a_cancelled_group() -> None:
    """As in 0.6: once, however often the rollout is cancelled during it."""
    from tests.rl.tasks import arithmetic

    builder = as_rl_dataset(arithmetic(1), load_renderer(), group_size=2).get_batch(0)[0]
    envs = list(await builder.make_envs())
    await asyncio.gather(*(env.initial_observation() for env in envs))
    clean_up = asyncio.ensure_future(builder.cleanup())

    async def rollout() -> None:
        while not clean_up.done():
            with contextlib.suppress(asyncio.CancelledError):
                await asyncio.shield(clean_up)

    running = asyncio.ensure_future(rollout())
    for _ in range(3):
        await asyncio.sleep(0)
        running.cancel()
    await running
    assert not clean_up.cancelled()
    for env in envs:
        assert isinstance(env, InspectEnv)
        with pytest.raises(EpisodeClosedError):
            await env.step([1], extra={"stop_reason": "stop"})
