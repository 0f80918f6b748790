from __future__ import annotations

import asyncio
import gc
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import anyio
import pytest
from inspect_ai import Task
from inspect_ai.model import ModelRole, get_model
from inspect_ai.scorer import Score, Scorer, Target, match, mean, model_graded_qa
from inspect_ai.solver import Generate, Solver, TaskState, generate
from inspect_ai.util import collect
from tests.functions import make_scorer, make_solver, make_tool
from tests.rl.policies import Words, encode, renderer, roll_out_task, tool_call, trained_tokens
from tests.rl.tasks import adding, agent, arithmetic, not_a_number, silent, sums
from tests.waiting import until
from tinker_cookbook.rl.data_processing import trajectory_to_data
from tinker_cookbook.rl.rollout_limits import ParseErrorPolicy, RolloutLimits
from tinker_cookbook.rl.rollout_runner import run_rollout
from tinker_cookbook.rl.rollouts import do_single_rollout
from tinker_cookbook.rl.types import InitialObservationOverflow, Trajectory

from inspect_tinker_plugin.contracts.errors import Cause, EpisodeError
from inspect_tinker_plugin.episode import runner as episode_runner
from inspect_tinker_plugin.rl.dataset import as_rl_dataset
from inspect_tinker_plugin.rl.env import InspectEnv


async def make_env(task: Task, **options: Any) -> InspectEnv:
    builder = as_rl_dataset(task, renderer(), **options).get_batch(0)[0]
    env = (await builder.make_envs())[0]
    assert isinstance(env, InspectEnv)
    return env


async def rollout(task: Task, lines: Sequence[Any], **options: Any) -> Trajectory:
    return await do_single_rollout(Words(lines), await make_env(task, **options))


def final(trajectory: Trajectory) -> dict[str, float | int]:
    return trajectory.transitions[-1].metrics


def total(trajectory: Trajectory) -> float:
    return sum(transition.reward for transition in trajectory.transitions)


@pytest.fixture(autouse=True)
def nothing_is_left_running() -> Any:
    yield
    gc.collect()
    assert not episode_runner._running


def one(solver: Solver | list[Solver], scorer: Scorer | None = None) -> Task:
    return Task(dataset=sums(1), solver=solver, scorer=scorer or match(), name="one")


async def test_a_right_answer_is_rewarded_and_a_wrong_one_is_not() -> None:
    right = await rollout(arithmetic(), ["1"])
    wrong = await rollout(arithmetic(), ["7"])
    assert (total(right), total(wrong)) == (1.0, 0.0)
    assert right.stop_reason == wrong.stop_reason == "completed"
    assert final(right)["score/match"] == 1.0


async def test_step_takes_extra_and_a_cut_reply_counts_as_cut() -> None:
    env = await make_env(arithmetic())
    assert not isinstance(await env.initial_observation(), InitialObservationOverflow)
    result = await env.step(encode("1"), extra={"stop_reason": "length"})
    assert result.episode_done
    assert result.metrics["stop/max_tokens"] == 1.0


async def test_a_solver_that_never_calls_the_model_ends_at_once_with_its_score() -> None:
    env = await make_env(one(silent()))
    first = await env.initial_observation()
    assert isinstance(first, InitialObservationOverflow)
    assert first.reward == 1.0
    assert first.metrics["stop/completed"] == 1.0


async def test_max_turns_ends_the_episode_scored() -> None:
    call = tool_call("add", '{"x":1,"y":0}')
    trajectory = await rollout(adding(), [call], max_turns=3)
    assert len(trajectory.transitions) == 3
    assert trajectory.stop_reason == "max_turns"
    assert final(trajectory)["limit/turn"] == 1.0
    assert "score/includes" in final(trajectory)


@make_solver
async def asks_at_once(state: TaskState, generate: Generate, calls: int) -> TaskState:
    async def ask(number: int) -> None:
        output = await get_model().generate(f"number {number}")
        state.store.set(str(number), output.completion)

    await collect(*map(ask, range(calls)))
    return state


async def test_of_calls_at_once_those_within_max_turns_are_answered() -> None:
    env = await make_env(one(asks_at_once(5)), max_turns=3)
    trajectory = await do_single_rollout(Words(["a", "b", "c"]), env)
    assert len(trajectory.transitions) == 3
    assert final(trajectory)["limit/turn"] == 1.0
    assert env.ending is not None
    kept = env.ending.result.state.store
    assert [kept.get(str(number)) for number in range(5)] == ["a", "b", "c", None, None]


async def test_a_time_limit_passes_while_the_policy_samples() -> None:
    env = await make_env(arithmetic(), time_limit=1)
    policy = Words(["1"], delay_s=1.3)
    trajectory = await do_single_rollout(policy, env)
    assert trajectory.stop_reason == "rollout_timeout"
    assert final(trajectory)["limit/time"] == 1.0


@make_solver
async def impatient(state: TaskState, generate: Generate) -> TaskState:
    """Asks again after two seconds, as a program does whose client has a time-out."""
    with anyio.move_on_after(2.0):
        return await generate(state)
    return await generate(state)


async def trained_texts(task: Task, policy: Words, **options: Any) -> list[str]:
    """Return what a group of one is trained on."""
    [trajectory] = (await roll_out_task(task, policy, **options)).trajectories_G
    kept = [trained_tokens([datum]) for datum in trajectory_to_data(trajectory, 1.0)]
    return [str(renderer().tokenizer.decode(tokens)) for tokens in kept if tokens]


async def test_a_reply_that_nobody_waited_for_is_not_trained_on() -> None:
    policy = Words(["lost", "1"], first_s=4.0)
    assert await trained_texts(one(impatient()), policy) == ["1<|im_end|>"]
    late = Words(["1"], delay_s=1.3)
    assert await trained_texts(arithmetic(1), late, time_limit=1) == []


@make_tool
async def undescribed(x: int) -> int:
    return x


@make_solver
async def asks_with_a_tool_that_nobody_described(state: TaskState, generate: Generate) -> TaskState:
    state.output = await get_model().generate(state.messages, tools=[undescribed()])
    return state


JUDGE = r"model_roles=\{'grader'"


@pytest.mark.parametrize(
    ("task", "cause", "message"),
    [
        pytest.param(one(generate(), not_a_number()), Cause.UNSCORED, None, id="score is NaN"),
        pytest.param(one(generate(), model_graded_qa()), Cause.JUDGE, JUDGE, id="no grader"),
        pytest.param(
            one(generate(), model_graded_qa(model_role=ModelRole("grader", required=True))),
            Cause.JUDGE,
            "'grader' is required",
            id="no required grader",
        ),
        pytest.param(one(generate(num_choices=2)), Cause.POLICY, None, id="two choices"),
        pytest.param(
            one(asks_with_a_tool_that_nobody_described()),
            Cause.SOLVER,
            "escription",
            id="refused by Inspect",
        ),
    ],
)
async def test_a_failure_is_raised_with_its_cause_and_never_a_zero(
    task: Task, cause: Cause, message: str | None
) -> None:
    with pytest.raises(EpisodeError, match=message) as raised:
        await rollout(task, ["1"])
    assert raised.value.cause is cause
    assert (raised.value.task, raised.value.sample_id) == ("one", "s0")


class Mute(Exception):
    def __str__(self) -> str:
        raise ValueError("no words")


@pytest.mark.parametrize(
    ("error", "shown"),
    [(ValueError("no \ud800"), r"no \\ud800"), (Mute(), "Mute: Mute")],
    ids=["half a pair", "no text"],
)
@pytest.mark.parametrize("logged", [False, True])
async def test_an_error_that_cannot_be_shown_is_an_episodes_error_like_any_other(
    error: Exception, shown: str, logged: bool, tmp_path: Path
) -> None:
    @make_scorer(mean())
    async def raising(state: TaskState, target: Target) -> Score:
        raise error

    options: dict[str, Any] = {"log_dir": tmp_path} if logged else {}
    with pytest.raises(EpisodeError, match=shown) as raised:
        await rollout(one(generate(), raising()), ["1"], **options)
    assert raised.value.cause is Cause.SCORER
    assert total(await rollout(one(generate(), raising()), ["1"], on_error=-1.0)) == -1.0


async def test_a_tool_call_budget_stops_in_the_middle_of_a_batch() -> None:
    env = await make_env(adding())
    two = tool_call("add", '{"x":1,"y":0}') + "\n" + tool_call("add", '{"x":2,"y":0}')
    limits = RolloutLimits(max_tool_calls=3)
    trajectory = await run_rollout(Words([two]), env, limits=limits)
    assert trajectory.stop_reason == "max_tool_calls"
    assert len(trajectory.transitions) == 2
    assert env.ending is not None
    results = [m for m in env.ending.result.state.messages if m.role == "tool"]
    assert [m.text for m in results] == ["1", "2", "1"]


async def test_a_parse_error_policy_counts_masks_and_ends() -> None:
    env = await make_env(adding())
    policy = ParseErrorPolicy(
        max_consecutive=1, penalty_per_error=0.25, terminal_reward=-1.0, mask_error_turns=True
    )
    bad = "<tool_call>\n{not json}\n</tool_call>"
    trajectory = await run_rollout(Words([bad]), env, parse_errors=policy)
    assert [t.reward for t in trajectory.transitions] == [-0.25, -1.0]
    assert trajectory.stop_reason == "parse_error"
    assert all(t.metrics["parse_error_masked"] == 1.0 for t in trajectory.transitions)


async def test_a_first_prompt_over_the_budget_ends_the_rollout() -> None:
    env = await make_env(arithmetic(), rollout_limits=RolloutLimits(max_trajectory_tokens=5))
    trajectory = await do_single_rollout(Words(["1"]), env)
    assert trajectory.stop_reason == "max_tokens"


async def test_what_the_cookbooks_runner_stops_is_still_scored() -> None:
    call = "The sum is 1. " + tool_call("add", '{"x":1,"y":0}')
    group = await roll_out_task(adding(), [call], rollout_limits=RolloutLimits(max_turns=1))
    assert group.trajectories_G[0].stop_reason == "max_turns"
    assert group.get_total_rewards() == [1.0]
    assert group.metrics_G[0]["score/includes"] == 1.0


async def test_a_cancelled_rollout_releases_its_episode() -> None:
    env = await make_env(agent())
    task = asyncio.create_task(do_single_rollout(Words(["x"], delay_s=30), env))
    await until(lambda: bool(episode_runner._running))
    await asyncio.sleep(0.2)
    task.cancel()
    with pytest.raises(asyncio.CancelledError):
        await task
    await until(lambda: not episode_runner._running)


async def test_a_solver_counts_tokens_as_the_policys_tokenizer_does() -> None:
    counted: list[int] = []
    text = "Ünïcödé and   print(42)\n" * 5

    @make_solver
    async def counting(state: TaskState, generate: Generate) -> TaskState:
        counted.append(await get_model().api.count_text_tokens(text))
        return await generate(state)

    await rollout(one(counting()), ["1"])
    assert counted == [len(encode(text))]
