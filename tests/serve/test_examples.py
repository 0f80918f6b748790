"""A real model behind the API of vLLM plays the example tasks as in a training with it."""

from __future__ import annotations

import asyncio
from pathlib import Path
from typing import Any

import pytest
from inspect_ai import Task
from tests.rl.policies import renderer
from tests.serve.engine import serving
from tests.serve.server import hosted
from tests.serve.tiny_model import TinyModel
from tinker_cookbook.rl.data_processing import trajectory_to_data
from tinker_cookbook.rl.rollouts import do_group_rollout

from inspect_tinker_plugin import TaskRef, as_rl_dataset
from inspect_tinker_plugin.serve.samplers import Form, LentSampler

FOLDER = Path(__file__).parents[2] / "example_tasks"
OPTIONS: dict[str, Any] = {"group_size": 2, "message_limit": 8, "score_sandbox": None}
EXAMPLES = [
    pytest.param("science_quiz", {}, id="single turn"),
    pytest.param("log_search", {"sandbox": "local"}, id="react with tools"),
    pytest.param("write_function", {"sandbox": "local"}, id="sandbox"),
    pytest.param("travel_desk", {}, id="several agents"),
]


def example(name: str, args: dict[str, Any]) -> Task:
    return TaskRef(f"{FOLDER / name}.py@{name}", args).resolve()


@pytest.mark.parametrize("form", ["completions", "generate"])
@pytest.mark.parametrize(("name", "args"), EXAMPLES)
def test_an_example_task_is_the_same_over_the_wire(
    name: str, args: dict[str, Any], form: Form
) -> None:
    model = TinyModel()

    async def train() -> tuple[list[float], list[Any]]:
        task = example(name, args)
        [builder] = as_rl_dataset(task, renderer(), limit=1, **OPTIONS).get_batch(0)
        group = await do_group_rollout(builder, model)
        assert group is not None
        data = [each for made in group.trajectories_G for each in trajectory_to_data(made, 1.0)]
        return group.get_total_rewards(), data

    async def ask() -> Any:
        task = example(name, args)
        async with serving(model) as url, hosted(task, **OPTIONS) as served:
            lent = LentSampler(url=url, form=form).model_dump(exclude_none=True)
            body = {"task": task.name, "sample": 0, "sampler": lent}
            return (await served.post("/v1/rollouts", body))[1]["rollouts"]

    rewards, data = asyncio.run(train())
    rollouts = asyncio.run(ask())
    assert model.asked
    assert [each["reward"] for each in rollouts] == rewards
    branches = [branch for each in rollouts for branch in each["branches"]]
    assert len(branches) == len(data)
    for branch, datum in zip(branches, data, strict=True):
        assert branch["tokens"][:-1] == datum.model_input.to_ints()
        inputs = datum.loss_fn_inputs
        assert branch["mask"][1:] == inputs["mask"].tolist()
        assert branch["logprobs"][1:] == pytest.approx(inputs["logprobs"].tolist(), rel=1e-6)
