"""The policy plays a role that is not set, as in an eval: it is reported once, by name."""

from __future__ import annotations

import logging
from typing import Any

import pytest
from inspect_ai import Task
from inspect_ai.dataset import Sample
from inspect_ai.model import get_model
from inspect_ai.scorer import includes
from inspect_ai.solver import Generate, Solver, TaskState
from tests.functions import make_solver
from tests.rewards.rollouts import rewards_of

from inspect_tinker_plugin import as_rl_dataset
from inspect_tinker_plugin.contracts.errors import ConfigError
from inspect_tinker_plugin.testing import load_renderer, scripted_model


@make_solver
async def asks_a_user(state: TaskState, generate: Generate, /, **arguments: Any) -> TaskState:
    for _ in range(2):
        await get_model(role="user", **arguments).generate("What do you want?")
    return await generate(state)


def task(*steps: Solver) -> Task:
    return Task(
        name="desk", dataset=[Sample(input="?", target="yes")], solver=[*steps], scorer=includes()
    )


def warnings(caplog: pytest.LogCaptureFixture) -> list[str]:
    return [
        record.getMessage()
        for record in caplog.records
        if record.levelno == logging.WARNING and "role" in record.getMessage()
    ]


async def test_an_unset_role_is_warned_about_once_per_task(
    caplog: pytest.LogCaptureFixture,
) -> None:
    rewards = await rewards_of(task(asks_a_user()), lambda request: "yes", group_size=3)
    assert rewards == [1.0, 1.0, 1.0]
    [warning] = warnings(caplog)
    assert "task 'desk' asks for the model role 'user', which is not set" in warning
    assert "model_roles={'user': 'provider/model'}" in warning


@pytest.mark.parametrize("several", [False, True], ids=["model", "list"])
async def test_a_role_that_is_set_is_played_by_its_model(
    caplog: pytest.LogCaptureFixture, several: bool
) -> None:
    user = scripted_model(lambda request: "tea", name="user")
    roles: dict[str, Any] = {"user": [user, user] if several else user}
    assert await rewards_of(task(asks_a_user()), ["yes"], model_roles=roles) == [1.0]
    assert not warnings(caplog)


async def test_a_default_plays_an_unset_role(caplog: pytest.LogCaptureFixture) -> None:
    default = scripted_model(lambda request: "tea", name="user")
    assert await rewards_of(task(asks_a_user(default=default)), ["yes"]) == [1.0]
    [warning] = warnings(caplog)
    assert "unless the task has a default" in warning


@pytest.mark.parametrize(
    ("bound", "problem"),
    [
        ([], "name a model"),
        (None, "name a model"),
        ("nosuch/model", "not recognized"),
        ("mistral/any", r"requires optional dependencies\. Install with: pip install mistralai$"),
    ],
)
def test_a_role_that_cannot_be_filled_is_refused_with_the_reason(bound: Any, problem: str) -> None:
    with pytest.raises(ConfigError, match=problem) as caught:
        as_rl_dataset(task(asks_a_user()), load_renderer(), model_roles={"user": bound})
    assert "[" not in str(caught.value).replace("= []", "")
