"""Programs that ask for other models get what ``side_models`` says."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from tests.agents.sandboxed import agent, free_port, task_of
from tests.packages import require_agent_clients
from tests.rl.policies import renderer, roll_out_task
from tinker_cookbook.rl.data_processing import trajectory_to_data

from inspect_tinker_plugin.contracts.errors import ConfigError
from inspect_tinker_plugin.options import DatasetOptions
from inspect_tinker_plugin.rl.dataset import as_rl_dataset
from inspect_tinker_plugin.testing.replies import scripted_model

require_agent_clients()

ASK = """
import sys
sys.path.insert(0, "agent")
import program
items = [{"role": "user", "content": "Do it."}]
for model in MODELS:
    title = {"model": model, "messages": [{"role": "user", "content": f"A title, {model}?"}]}
    main = {"model": MAIN, "messages": items}
    try:
        print(program.post(PORT, "/v1/chat/completions", title)["choices"][0]["message"]["content"])
    except RuntimeError as ex:
        print("refused" if " 404 " in str(ex) else ex)
    said = program.post(PORT, "/v1/chat/completions", main)["choices"][0]["message"]
    items.append({"role": "assistant", "content": said["content"]})
    items.append({"role": "user", "content": "Go on."})
"""


async def roll(
    folder: Path, rules: dict[str, str], *models: str, main: str = "inspect"
) -> tuple[list[str], Any, dict[str, float]]:
    """Run a program that asks each model for a title; return what it printed, data and metrics."""
    port = free_port()
    text = f"PORT, MODELS, MAIN = {port}, {models!r}, {main!r}" + ASK
    printed: list[str] = []
    task = task_of("local", folder, agent(["python3", "-c", text], port=port, printed=printed))
    roles = {"small": scripted_model(["said by the role"], name="small")}
    lines = [lambda prompt: "A title." if "A title," in prompt else "plum"]
    group = await roll_out_task(task, lines, side_models=rules, model_roles=roles)
    (trajectory,) = group.trajectories_G
    metrics = group.metrics_G[0] | trajectory.transitions[-1].metrics
    return printed, trajectory_to_data(trajectory, 1.0), metrics


def trained(data: Any) -> int:
    return sum(1 for datum in data if any(datum.loss_fn_inputs["mask"].data))


async def test_the_policy_answers_by_default_and_is_not_trained_on_it(tmp_path: Path) -> None:
    printed, data, metrics = await roll(tmp_path, {}, "small-1", "small-2")
    assert printed == ["A title.", "A title."]
    assert metrics["side_models/policy"] == 2
    assert len(data) == 3
    assert trained(data) == 1


@pytest.mark.parametrize("name", ["rl/policy", "policy", "inspect/rl/policy"])
async def test_the_name_of_the_model_under_training_means_that_model(
    tmp_path: Path, name: str
) -> None:
    _, data, metrics = await roll(tmp_path, {"*policy": "refuse"}, "small-1", main=name)
    assert metrics["side_models/policy"] == 1
    assert len(data) == 2
    assert trained(data) == 1


async def test_what_is_to_be_trained_is(tmp_path: Path) -> None:
    _, data, metrics = await roll(tmp_path, {"small-?": "train"}, "small-1", "other")
    assert metrics["side_models/train"] == metrics["side_models/policy"] == 1
    assert trained(data) == 2


async def test_roles_replies_and_refusals_ask_no_policy(tmp_path: Path) -> None:
    rules = {"a": "role:small", "b*": "reply:Fixed: text", "*": "refuse"}
    printed, data, metrics = await roll(tmp_path, rules, "a", "bc", "d")
    assert printed == ["said by the role", "Fixed: text", "refused"]
    assert len(data) == trained(data) == 1
    assert [metrics[f"side_models/{how}"] for how in ("role", "reply", "refuse")] == [1, 1, 1]


async def test_a_program_without_a_main_line_is_trained_as_a_whole(tmp_path: Path) -> None:
    _, data, _ = await roll(tmp_path, {}, "small-1", main="gpt-5")
    assert trained(data) == len(data) == 2


@pytest.mark.parametrize("value", ["", "nobody", "role:", "role", "policy:x"])
def test_an_unknown_value_is_refused_when_the_dataset_is_made(value: str) -> None:
    with pytest.raises(ConfigError, match="side_models"):
        DatasetOptions(side_models={"x": value})


def test_a_role_that_is_not_set_is_refused_at_once(tmp_path: Path) -> None:
    task = task_of("local", tmp_path, agent(port=free_port()))
    with pytest.raises(ConfigError, match="nobody"):
        as_rl_dataset(task, renderer(), side_models={"small": "role:nobody"})
