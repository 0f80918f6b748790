from __future__ import annotations

import asyncio
import pickle
import re
import threading
from collections.abc import Sequence
from concurrent.futures import ProcessPoolExecutor, ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest
import tinker
from inspect_ai import Task, eval_async
from inspect_ai.agent import handoff, react
from inspect_ai.dataset import Sample
from inspect_ai.scorer import Score, match, model_graded_qa
from inspect_ai.solver import (
    Generate,
    TaskState,
    basic_agent,
    generate,
    multiple_choice,
    self_critique,
)
from inspect_ai.tool import bash, mcp_server_stdio, python, text_editor, think
from tests.commands import forking
from tests.functions import make_solver
from tests.rl.policies import END, TOKENIZER, Words, encode, renderer, roll_out_task, tool_call
from tests.rl.tasks import adding, arithmetic, crashing, sums
from tinker_cookbook.completers import TokenCompleter, TokensWithLogprobs
from tinker_cookbook.rl.rollouts import do_group_rollout
from tinker_cookbook.rl.types import TrajectoryGroup

from inspect_tinker_plugin.contracts.episodes import EpisodeResult
from inspect_tinker_plugin.contracts.errors import (
    ConfigError,
    EpisodeError,
    RendererError,
    TaskError,
)
from inspect_tinker_plugin.rl.builder import InspectRLDatasetBuilder
from inspect_tinker_plugin.rl.dataset import InspectRLDataset, as_rl_dataset
from inspect_tinker_plugin.rl.group import InspectGroupBuilder
from inspect_tinker_plugin.rl.task_handle import _received
from inspect_tinker_plugin.testing import scripted_model

HERE = Path(__file__).parent


def ids(groups: Sequence[InspectGroupBuilder]) -> list[Any]:
    return [group.sample.id for group in groups]


def test_batches_cover_every_sample_once_an_epoch() -> None:
    dataset = as_rl_dataset(arithmetic(5), renderer(), batch_size=2, epochs=2)
    assert len(dataset) == 6
    assert [ids(dataset.get_batch(i)) for i in range(3)] == [["s0", "s1"], ["s2", "s3"], ["s4"]]
    assert ids(dataset.get_batch(3)) == ["s0", "s1"]
    endless = as_rl_dataset(arithmetic(5), renderer(), batch_size=2, epochs=10**20)
    assert len(ids(endless.get_batch(len(endless) - 1))) == 2


def test_shuffling_visits_every_sample_in_another_order_each_epoch() -> None:
    dataset = as_rl_dataset(
        arithmetic(50), renderer(), batch_size=50, epochs=2, shuffle=True, seed=7
    )
    first, second = ids(dataset.get_batch(0)), ids(dataset.get_batch(1))
    assert sorted(first) == sorted(second)
    assert first != second
    again = as_rl_dataset(arithmetic(50), renderer(), batch_size=50, shuffle=True, seed=7)
    assert ids(again.get_batch(0)) == first


def test_what_is_no_renderer_or_solver_is_one_clear_line() -> None:
    for wrong in (None, "qwen3"):
        with pytest.raises(RendererError, match="not a renderer"):
            as_rl_dataset(arithmetic(), wrong)  # type: ignore[arg-type]
    for wrong_solver in ("generate", 3, [generate(), "generate"]):
        with pytest.raises(ConfigError, match="neither a solver nor an agent"):
            as_rl_dataset(arithmetic(), renderer(), solver=wrong_solver)  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("options", "message"),
    [
        pytest.param({"batch_size": 0}, "batch_size", id="batch_size"),
        pytest.param({"group_size": -1}, "group_size", id="group_size"),
        pytest.param({"max_turns": 0}, "max_turns", id="max_turns"),
        pytest.param({"reward": "meen"}, "meen", id="reward"),
        pytest.param({"on_error": {"weather": 0.0}}, "weather", id="cause"),
        pytest.param({"on_error": "ignore"}, "ignore", id="on_error"),
        pytest.param({"sample_ids": ["nope"]}, "nope", id="sample id"),
        pytest.param({"sample_ids": []}, "sample_ids is empty", id="no sample ids"),
        pytest.param({"sandbox": "no-such-sandbox"}, "no-such-sandbox", id="sandbox"),
    ],
)
def test_an_impossible_option_is_one_clear_line(options: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError, match=re.escape(message)) as raised:
        as_rl_dataset(arithmetic(), renderer(), **options)
    assert "\n" not in str(raised.value)


def test_a_task_without_scorer_is_refused() -> None:
    with pytest.raises(TaskError, match="no scorer"):
        as_rl_dataset(Task(dataset=sums(1), solver=generate()), renderer())


async def test_a_task_without_scorer_is_paid_by_what_its_solver_scores() -> None:
    @make_solver
    async def scores_itself(state: TaskState, generate: Generate) -> TaskState:
        state = await generate(state)
        state.scores = {"mine": Score(value=0.5)}
        return state

    def double(result: EpisodeResult) -> float:
        return 2 * result.scores["mine"].score.as_float()

    task = Task(dataset=sums(1), solver=scores_itself())
    for reward, paid in (("score:mine", 0.5), (double, 1.0)):
        assert (await roll_out_task(task, ["x"], reward=reward)).get_total_rewards() == [paid]
    with pytest.raises(EpisodeError, match="no score named 'other'; there is 'mine'"):
        await roll_out_task(task, ["x"], reward="score:other")


async def test_a_renderer_without_tools_is_refused_for_a_task_with_tools() -> None:
    [builder] = as_rl_dataset(adding(), renderer("role_colon")).get_batch(0)
    with pytest.raises(RendererError, match="has no format for tools"):
        await do_group_rollout(builder, Words(["x"]))


async def test_a_task_by_file_and_by_function_and_by_task_is_the_same() -> None:
    for task in (f"{HERE / 'tasks.py'}@arithmetic", arithmetic, arithmetic()):
        assert (await roll_out_task(task, ["1"])).get_total_rewards() == [1.0]


async def test_the_builder_makes_train_and_test_sets_from_plain_data() -> None:
    builder = InspectRLDatasetBuilder(
        task=f"{HERE / 'tasks.py'}@arithmetic",
        task_args={"count": 6},
        model_name=str(TOKENIZER),
        renderer_name="qwen3_instruct",
        batch_size=4,
        group_size=2,
        test_task=f"{HERE / 'tasks.py'}@adding",
    )
    train, test = await builder()
    assert test is not None
    assert (len(train), len(test)) == (2, 1)
    group = await do_group_rollout(train.get_batch(0)[0], Words(["x"]))
    assert len(group.get_total_rewards()) == 2


async def test_the_builder_asks_for_a_renderer_of_an_unknown_model() -> None:
    builder = InspectRLDatasetBuilder(task="any", model_name="acme/model-1", batch_size=1)
    with pytest.raises(ConfigError, match="'acme/model-1'; give renderer_name"):
        await builder()


# other processes


def _rollout(builder: InspectGroupBuilder, lines: list[str]) -> TrajectoryGroup:
    return asyncio.run(do_group_rollout(builder, Words(lines)))


def _closure_task() -> Task:
    secret = "1"

    def target() -> str:
        return secret

    return Task(
        dataset=[Sample(id="c", input="0+1?", target=target())],
        solver=generate(),
        scorer=match(),
        name="closure",
    )


@pytest.mark.forks
async def test_a_builder_of_a_task_by_value_runs_in_another_process() -> None:
    builder = as_rl_dataset(_closure_task(), renderer(), group_size=2).get_batch(0)[0]
    with ProcessPoolExecutor(1, mp_context=forking()) as pool:
        group = await asyncio.get_running_loop().run_in_executor(pool, _rollout, builder, ["1"])
    assert group.get_total_rewards() == [1.0, 1.0]


@pytest.mark.parametrize(
    "solver",
    [
        pytest.param(lambda: react(tools=[bash(), python(), text_editor()]), id="tools"),
        pytest.param(
            lambda: react(tools=[handoff(react(name="helper", description="Helps."))]),
            id="handoff",
        ),
        pytest.param(lambda: react(tools=[mcp_server_stdio(command="none")]), id="mcp"),
        pytest.param(lambda: basic_agent(tools=[think()]), id="basic_agent"),
        pytest.param(lambda: [multiple_choice(cot=True), self_critique()], id="plain solvers"),
    ],
)
def test_solvers_of_inspect_travel_by_value(solver: Any) -> None:
    task = Task(dataset=sums(1), solver=solver(), scorer=[match(), model_graded_qa()])
    for dataset in (as_rl_dataset(task, renderer()), _with_solver(solver())):
        builder = dataset.get_batch(0)[0]
        _received.clear()
        assert pickle.loads(pickle.dumps(builder)).handle.parts().runner.plan


def _with_solver(solver: Any) -> InspectRLDataset:
    return as_rl_dataset(arithmetic(), renderer(), solver=solver)


async def test_a_task_changed_after_it_was_made_travels_as_it_is() -> None:
    task = arithmetic()
    task.scorer = [crashing()]
    builder = pickle.loads(pickle.dumps(as_rl_dataset(task, renderer()).get_batch(0)[0]))
    with pytest.raises(EpisodeError, match="the scorer is broken"):
        await do_group_rollout(builder, Words(["1"]))


async def test_a_used_builder_still_pickles_and_small() -> None:
    dataset = as_rl_dataset(arithmetic(2000), renderer())
    builder = dataset.get_batch(0)[0]
    await do_group_rollout(builder, Words(["1"]))
    data = pickle.dumps(builder)
    assert len(data) < 50_000
    group = await do_group_rollout(pickle.loads(data), Words(["1"]))
    assert group.get_total_rewards() == [1.0]


def test_a_sample_that_cannot_be_sent_to_a_process_is_named() -> None:
    for thing in (lambda: None, threading.Lock()):
        sample = Sample(id="mine", input="1+1?", target="2", metadata={"check": thing})
        [builder] = as_rl_dataset(Task([sample], scorer=match()), renderer()).get_batch(0)
        with pytest.raises(TaskError, match=r"sample 'mine'.*metadata must be plain data"):
            pickle.dumps(builder)


async def test_metadata_that_cannot_be_copied_is_named() -> None:
    sample = Sample(id="mine", input="1+1?", target="2", metadata={"lock": threading.Lock()})
    with pytest.raises(TaskError, match=r"sample 'mine'.*cannot be copied.*must be plain data"):
        await roll_out_task(Task([sample], scorer=match()), ["2"])


async def test_clean_up_of_one_rollout_leaves_another_of_the_same_builder_alone() -> None:
    [builder] = as_rl_dataset(arithmetic(1), renderer(), group_size=2).get_batch(0)
    quick_is_done = asyncio.Event()

    class Slow(Words):
        async def __call__(self, *args: Any, **more: Any) -> TokensWithLogprobs:
            await quick_is_done.wait()
            return await super().__call__(*args, **more)

    async def quick() -> list[float]:
        group = await do_group_rollout(builder, Words(["1"]))
        quick_is_done.set()
        return group.get_total_rewards()

    slow = asyncio.create_task(do_group_rollout(builder, Slow(["1"])))
    assert await asyncio.create_task(quick()) == [1.0, 1.0]
    assert (await slow).get_total_rewards() == [1.0, 1.0]


# one process, many episodes, an eval among them


async def test_an_eval_on_the_same_loop_disturbs_neither_side(tmp_path: Path) -> None:
    dataset = as_rl_dataset(adding(), renderer(), group_size=50)
    call = tool_call("add", '{"x":1,"y":0}')

    def line(prompt: str) -> str:
        return "It is 1." if "<tool_response>" in prompt else call

    rollouts = asyncio.create_task(
        do_group_rollout(dataset.get_batch(0)[0], Words([line], delay_s=0.3))
    )
    await asyncio.sleep(0.1)
    for _ in range(3):
        [log] = await eval_async(
            arithmetic(),
            model=scripted_model(["1"] * 4),
            log_dir=str(tmp_path),
        )
        assert log.status == "success"
    group = await rollouts
    assert group.get_total_rewards() == [1.0] * 50


def test_threads_with_loops_of_their_own_share_a_dataset() -> None:
    dataset = as_rl_dataset(adding(), renderer(), group_size=20)
    call, answer = (encode(t + END) for t in (tool_call("add", '{"x":1,"y":0}'), "It is 1."))
    start = threading.Barrier(3)

    class Tokens(TokenCompleter):
        """Says what was encoded before: the tokenizer is for the episodes alone."""

        async def __call__(
            self, model_input: tinker.ModelInput, stop: Any, **budget: Any
        ) -> TokensWithLogprobs:
            said = answer if model_input.length > first else call
            return TokensWithLogprobs(said, [-0.5] * len(said), stop_reason="stop")

    async def first_prompt() -> int:
        builder = dataset.get_batch(0)[0]
        observed = await (await builder.make_envs())[0].initial_observation()
        await builder.cleanup()
        assert isinstance(observed, tuple)
        return observed[0].length

    def roll_out() -> list[float]:
        start.wait()
        group = asyncio.run(do_group_rollout(dataset.get_batch(0)[0], Tokens()))
        return group.get_total_rewards()

    first = asyncio.run(first_prompt())
    with ThreadPoolExecutor(3) as threads:
        done = [threads.submit(roll_out) for _ in range(3)]
        assert [each.result(timeout=60) for each in done] == [[1.0] * 20] * 3
