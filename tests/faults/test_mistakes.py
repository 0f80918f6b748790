"""Mistakes that earlier bridges between Inspect and RL trainers have made, each as a test."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Sequence
from dataclasses import dataclass, field
from datetime import UTC, date, datetime
from pathlib import Path
from typing import Any, cast

import pytest
import tinker
from inspect_ai import Task
from inspect_ai.dataset import Sample
from inspect_ai.model import ChatMessageUser, get_model
from inspect_ai.scorer import (
    Score,
    Target,
    accuracy,
    includes,
    mean,
    model_graded_qa,
)
from inspect_ai.solver import (
    Generate,
    TaskState,
    generate,
    use_tools,
)
from inspect_ai.tool import bash
from tests.functions import make_scorer, make_solver, make_tool
from tinker_cookbook.completers import StopCondition, TokenCompleter, TokensWithLogprobs
from tinker_cookbook.rl.data_processing import trajectory_to_data
from tinker_cookbook.rl.rollout_runner import run_rollout
from tinker_cookbook.rl.types import Trajectory

from inspect_tinker_plugin import Cause, EpisodeError, EpisodeResult, as_rl_dataset
from inspect_tinker_plugin.export.options import ExportOptions
from inspect_tinker_plugin.export.pipeline import export_task
from inspect_tinker_plugin.rl.env import InspectEnv
from inspect_tinker_plugin.tasks.reference import ResolvedTask
from inspect_tinker_plugin.testing import (
    Script,
    ScriptedPolicy,
    call,
    load_renderer,
    load_tokenizer,
    say,
)

IMAGE = "inspect-rl-test/python:1"


@dataclass
class Spy:
    """Plays a script and keeps the prompts as text."""

    script: Script
    prompts: list[str] = field(default_factory=list)

    def __post_init__(self) -> None:
        self.policy = ScriptedPolicy(load_renderer(), self.script)

    async def __call__(
        self, model_input: tinker.ModelInput, stop: StopCondition, *, max_tokens: int | None = None
    ) -> TokensWithLogprobs:
        self.prompts.append(str(load_tokenizer().decode(model_input.to_ints())))
        return await self.policy(model_input, stop, max_tokens=max_tokens)


@dataclass(frozen=True)
class Rollout:
    trajectory: Trajectory
    result: EpisodeResult
    prompts: Sequence[str]

    @property
    def reward(self) -> float:
        return sum(step.reward for step in self.trajectory.transitions)


async def roll(task: Task, script: Script, **options: Any) -> Rollout:
    """One rollout through the public API and the cookbook's own runner."""
    [builder] = as_rl_dataset(task, load_renderer(), limit=1, **options).get_batch(0)
    [env] = await builder.make_envs()
    spy = Spy(script)
    try:
        trajectory = await run_rollout(cast(TokenCompleter, spy), env)
    finally:
        await builder.cleanup()
    assert isinstance(env, InspectEnv)
    assert env.ending is not None
    return Rollout(trajectory, env.ending.result, spy.prompts)


def ask(**sample: Any) -> list[Sample]:
    return [Sample(input="The word?", target="yes", **sample)]


@make_scorer(mean())
async def gives(state: TaskState, target: Target, value: Any) -> Score:
    if isinstance(value, Exception):
        raise value
    return Score(value=value)


@make_tool
async def oracle(question: str, times: int = 1) -> str:
    """Ask the oracle of Delphi.

    Args:
        question: What to ask.
        times: How often.
    """
    return f"{question} {times}: yes"


async def test_a_scorer_that_raises_is_no_zero() -> None:
    task = Task(dataset=ask(), scorer=gives(ValueError("broken scorer")))
    with pytest.raises(EpisodeError, match="broken scorer") as caught:
        await roll(task, ["yes"])
    assert caught.value.cause is Cause.SCORER


async def test_a_cancellation_of_a_scorers_own_making_is_the_scorers_failure() -> None:
    @make_scorer(mean())
    async def cancels_itself(state: TaskState, target: Target) -> Score:
        raise asyncio.CancelledError

    with pytest.raises(EpisodeError, match="cancelled, but not by the episode") as caught:
        await roll(Task(dataset=ask(), scorer=cancels_itself()), ["yes"])
    assert caught.value.cause is Cause.SCORER


async def test_a_judge_without_a_model_is_no_zero_and_says_which_role_to_set() -> None:
    with pytest.raises(EpisodeError, match="grader") as caught:
        await roll(Task(dataset=ask(), scorer=model_graded_qa()), ["yes"])
    assert caught.value.sample_id == 1


async def test_a_judge_that_is_refused_is_no_zero_where_nobody_tells() -> None:
    @make_scorer(mean())
    async def falls_back(state: TaskState, target: Target) -> Score:
        try:
            return Score(value=(await get_model().generate("Good?")).completion)
        except Exception:
            return Score(value=0)

    with pytest.raises(EpisodeError, match="falls_back") as caught:
        await roll(Task(dataset=ask(), scorer=falls_back()), ["yes"])
    assert caught.value.cause is Cause.JUDGE


async def test_little_credit_stays_little(tmp_path: Path) -> None:
    rollout = await roll(Task(dataset=ask(), scorer=gives(0.1)), ["yes"])
    assert rollout.reward == pytest.approx(0.1)
    assert rollout.result.score_values() == {"gives": 0.1}


async def test_a_cut_reply_is_not_scored_as_a_whole_one() -> None:
    seen: list[str | None] = []

    @make_scorer(accuracy())
    async def reads_stop_reason(state: TaskState, target: Target) -> Score:
        seen.append(state.output.stop_reason)
        return Score(value=0 if state.output.stop_reason == "max_tokens" else 1)

    task = Task(dataset=ask(), scorer=reads_stop_reason())
    cut = await roll(task, [say("yes", stop_reason="max_tokens")])
    whole = await roll(task, ["yes"])
    assert seen == ["max_tokens", "stop"]
    assert (cut.reward, whole.reward) == (0.0, 1.0)
    assert cut.result.truncated
    assert cut.trajectory.transitions[-1].metrics["stop/max_tokens"] == 1.0


async def test_a_reply_without_its_end_is_a_cut_one_though_the_parser_returns_an_object() -> None:
    # a ParseTermination is truthy whatever it says
    [builder] = as_rl_dataset(Task(dataset=ask(), scorer=includes()), load_renderer()).get_batch(0)
    [env] = await builder.make_envs()
    assert isinstance(env, InspectEnv)
    await env.initial_observation()
    await env.step([int(t) for t in load_tokenizer().encode("yes", add_special_tokens=False)])
    assert env.ending is not None
    assert env.ending.result.truncated
    await builder.cleanup()


async def test_a_reply_stands_between_two_questions() -> None:
    @make_solver
    async def twice(state: TaskState, generate: Generate) -> TaskState:
        state = await generate(state)
        state.messages.append(ChatMessageUser(content="Sure?"))
        return await generate(state)

    rollout = await roll(Task(dataset=ask(), solver=twice(), scorer=includes()), ["hm", "yes"])
    roles = [line.split("\n")[0] for line in rollout.prompts[1].split("<|im_start|>")[1:]]
    assert roles == ["user", "assistant", "user", "assistant"]
    assert "hm<|im_end|>" in rollout.prompts[1]


async def test_any_tool_is_described_in_the_prompt_and_can_be_called() -> None:
    task = Task(dataset=ask(), solver=[use_tools(oracle()), generate()], scorer=includes())
    rollout = await roll(task, [say("", call("oracle", question="Rain?", times=2)), "yes"])
    for text in ('"oracle"', "Ask the oracle of Delphi.", "How often.", '"integer"'):
        assert text in rollout.prompts[0]
    assert "Rain? 2: yes" in rollout.prompts[1]


async def test_a_tool_that_times_out_is_told_to_the_model() -> None:
    @make_tool
    async def slow() -> str:
        """Be slow."""
        raise TimeoutError("too slow")

    task = Task(dataset=ask(), solver=[use_tools(slow()), generate()], scorer=includes())
    rollout = await roll(task, [say("", call("slow")), "yes"])
    assert rollout.reward == 1.0
    assert "timed out" in rollout.prompts[1]


async def test_tool_arguments_reach_prompts_as_json() -> None:
    @make_solver
    async def rewrites(state: TaskState, generate: Generate) -> TaskState:
        state = await generate(state, tool_calls="single")
        # another opening, so that the call is rendered again
        state.messages.insert(0, ChatMessageUser(content="Listen."))
        return await generate(state)

    task = Task(dataset=ask(), solver=[use_tools(oracle()), rewrites()], scorer=includes())
    [builder] = as_rl_dataset(task, load_renderer()).get_batch(0)
    [env] = await builder.make_envs()
    turns = iter([say("", call("oracle", question='it\'s "so"?', times=1)), say("yes")])
    prompts = []

    class Turns:
        async def __call__(self, prompt: tinker.ModelInput, *args: Any, **kw: Any) -> Any:
            prompts.append(str(load_tokenizer().decode(prompt.to_ints())))
            return await ScriptedPolicy(load_renderer(), [next(turns)])(prompt, [])

    await run_rollout(cast(TokenCompleter, Turns()), env)
    await builder.cleanup()
    rendered = prompts[1].split("<tool_call>\n")[-1].split("\n</tool_call>")[0]
    assert json.loads(rendered) == {
        "name": "oracle",
        "arguments": {"question": 'it\'s "so"?', "times": 1},
    }


@pytest.mark.docker
async def test_a_compose_file_beside_the_provider_is_used(tmp_path: Path) -> None:
    compose = tmp_path / "compose.yaml"
    compose.write_text(
        f"services:\n  default:\n    image: {IMAGE}\n    x-local: true\n    init: true\n"
        "    command: tail -f /dev/null\n    network_mode: none\n"
        "    environment:\n      MARK: from the compose file\n"
    )
    task = Task(
        dataset=ask(),
        solver=[use_tools(bash(timeout=30)), generate()],
        scorer=includes(),
        sandbox=("docker", str(compose)),
    )
    rollout = await roll(task, [say("", call("bash", command="echo $MARK")), "yes"])
    assert "from the compose file" in rollout.prompts[1]


async def test_a_sandbox_of_the_sample_is_used() -> None:
    task = Task(
        dataset=ask(sandbox="local", files={"note.txt": "of the sample"}),
        solver=[use_tools(bash(timeout=30)), generate()],
        scorer=includes(),
    )
    rollout = await roll(task, [say("", call("bash", command="cat note.txt")), "yes"])
    assert "of the sample" in rollout.prompts[1]


async def test_samples_of_different_shapes_are_exported_together(tmp_path: Path) -> None:
    samples = [
        Sample(input="a", target="x", files={"one.txt": "1"}, metadata={"n": 1}),
        Sample(input="b", target=["x", "y"], files={"two.txt": "2", "three": "3"}),
        Sample(
            input=[ChatMessageUser(content="c")],
            metadata={"n": "one", "due": date(2024, 2, 29), "at": datetime(2024, 1, 1, tzinfo=UTC)},
        ),
    ]
    task = Task(name="mixed", dataset=samples, scorer=includes())
    await export_task(ResolvedTask(task, None), tmp_path / "out", ExportOptions())
    import datasets

    rows = datasets.load_dataset(
        str(tmp_path / "out"), split="train", cache_dir=str(tmp_path / "cache")
    ).to_list()
    assert len(rows) == 3
    assert "2024-02-29" in json.dumps(rows[2]["info"])


async def test_compact_json_in_a_call_does_not_split_a_trajectory() -> None:
    compact = '<tool_call>\n{"name":"oracle","arguments":{"question":"Rain?"}}\n</tool_call>'
    replies = [f"{compact}<|im_end|>", f"So: {compact}<|im_end|>", "yes<|im_end|>"]
    turn = iter(replies)

    class Compact:
        async def __call__(self, *args: Any, **kwargs: Any) -> TokensWithLogprobs:
            tokens = load_tokenizer().encode(next(turn), add_special_tokens=False)
            return TokensWithLogprobs(
                tokens=[int(t) for t in tokens], maybe_logprobs=[0.0] * len(tokens)
            )

    task = Task(dataset=ask(), solver=[use_tools(oracle()), generate()], scorer=includes())
    [builder] = as_rl_dataset(task, load_renderer()).get_batch(0)
    [env] = await builder.make_envs()
    trajectory = await run_rollout(cast(TokenCompleter, Compact()), env)
    await builder.cleanup()
    assert len(trajectory.transitions) == 3
    assert len(trajectory_to_data(trajectory, 1.0)) == 1


async def test_step_takes_a_third_argument_and_does_without() -> None:
    [builder] = as_rl_dataset(Task(dataset=ask(), scorer=includes()), load_renderer()).get_batch(0)
    for extra in ({}, {"extra": {"stop_reason": "stop"}}):
        [env] = await builder.make_envs()
        await env.initial_observation()
        tokens = (
            await ScriptedPolicy(load_renderer(), ["yes"])(tinker.ModelInput.empty(), [])
        ).tokens
        step = await env.step(tokens, **cast(Any, extra))
        assert (step.reward, step.episode_done) == (1.0, True)
    await builder.cleanup()
