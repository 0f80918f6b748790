"""Hooks in a dataset: the additions of plugins and options reach every rollout."""

from __future__ import annotations

import json
import pickle
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import pytest
from inspect_ai import Task
from inspect_ai.dataset import Sample
from inspect_ai.scorer import includes
from inspect_ai.solver import Generate, TaskState, generate, use_tools
from inspect_ai.util import sandbox
from tests.functions import make_solver
from tests.rl.policies import Words, renderer, tool_call
from tests.tools.runs import add, ran
from tinker_cookbook.rl.rollouts import do_group_rollout
from tinker_cookbook.rl.types import TrajectoryGroup

from inspect_tinker_plugin import as_rl_dataset

ADD = tool_call("add", '{"x": 1, "y": 2}')


def add_then_say(prompt: str) -> str:
    return "3" if "<tool_response>" in prompt else ADD


@pytest.fixture(autouse=True)
def _nothing_ran() -> None:
    ran.clear()


def adding(**options: Any) -> Task:
    return Task(
        name="adding",
        dataset=[Sample(input="one plus two?", target="3"), Sample(input="x", target="x")],
        solver=[use_tools(add()), generate()],
        scorer=includes(),
        **options,
    )


async def rollout(
    task: Task, lines: Sequence[str | Callable[[str], str]], **options: Any
) -> TrajectoryGroup:
    dataset = as_rl_dataset(task, renderer(), **options)
    [builder] = dataset.get_batch(0)
    return await do_group_rollout(builder, Words(lines))


async def test_tool_calls_of_a_group_share_a_cache() -> None:
    await rollout(adding(), [add_then_say], group_size=3)
    assert len(ran) == 3
    ran.clear()
    await rollout(adding(), [add_then_say], group_size=3, tool_executor="cached")
    assert ran == [("add", 1, 2)]


async def test_tools_are_answered_by_pattern() -> None:
    group = await rollout(adding(), [add_then_say], tool_executor={"ad*": "scripted(add='three')"})
    assert ran == []
    assert group.get_total_rewards() == [1.0]


async def test_hooks_work_in_the_process_that_a_builder_was_sent_to() -> None:
    dataset = as_rl_dataset(
        adding(metadata={"acme_answer_words": True}),
        renderer(),
        tool_executor={"ad*": "scripted(add='three')"},
        reward="score:answer_words",
    )
    [builder] = pickle.loads(pickle.dumps(dataset.get_batch(0)))
    group = await do_group_rollout(builder, Words([ADD, "it is 3"]))
    assert group.get_total_rewards() == [3.0]


async def test_inspect_rl_scorers() -> None:
    task = adding(metadata={"acme_answer_words": True})
    group = await rollout(task, ["it is 3"], reward="weighted(includes=1, answer_words=0.5)")
    assert group.get_total_rewards() == [2.5]


def test_inspect_rl_samples() -> None:
    dataset = as_rl_dataset(adding(metadata={"acme_max_words": 1}), renderer())
    assert len(dataset) == 1
    [builder] = dataset.get_batch(0)
    assert (builder.sample.id, builder.sample.input) == (2, "X")


@make_solver
async def where(state: TaskState, generate: Generate) -> TaskState:
    state.metadata["says"] = (await sandbox().exec(["echo", "here"])).stdout
    return await generate(state)


async def test_inspect_rl_sandbox_providers() -> None:
    asking = Task(
        dataset=[Sample(input="?", target="3", sandbox="docker")], solver=where(), scorer=includes()
    )
    for sandbox_option in ("on_this_machine", {"docker": "local"}):
        group = await rollout(asking, ["3"], sandbox=sandbox_option)
        assert group.get_total_rewards() == [1.0]


async def test_inspect_rl_episode_observers(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    alone = await rollout(adding(), [add_then_say], group_size=2)
    file = tmp_path / "episodes.jsonl"
    monkeypatch.setenv("ACME_EPISODES", str(file))
    watched = await rollout(adding(), [add_then_say], group_size=2)
    assert watched.get_total_rewards() == alone.get_total_rewards() == [1.0, 1.0]
    assert [
        [t.ob.to_ints() for t in trajectory.transitions] for trajectory in watched.trajectories_G
    ] == [[t.ob.to_ints() for t in trajectory.transitions] for trajectory in alone.trajectories_G]
    events = [json.loads(line) for line in file.read_text().splitlines()]
    for episode in {event["episode"] for event in events}:
        own = [event for event in events if event["episode"] == episode]
        assert [event["event"] for event in own] == ["start", "turn", "turn", "end"]
        assert own[-1]["reward"] == 1.0
