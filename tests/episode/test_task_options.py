"""Task options that an eval refuses or acts on: honoured, refused or named, never dropped."""

from __future__ import annotations

import logging
from typing import Any

import pytest
from inspect_ai import Task
from inspect_ai.approval import ApprovalPolicy, human_approver
from inspect_ai.dataset import Sample
from inspect_ai.event import InterruptEvent, ToolEvent
from inspect_ai.model import (
    Model,
    ModelCost,
    ModelInfo,
    ModelOutput,
    get_model,
    model_roles,
    set_model_info,
)
from inspect_ai.scorer import includes
from inspect_ai.solver import Generate, Solver, TaskState, generate, solver, use_tools
from inspect_ai.tool import ask_user
from inspect_ai.util import input_screen
from tests.rl.tasks import nap

from inspect_tinker_plugin.contracts.episodes import EpisodeResult, TurnRequest
from inspect_tinker_plugin.contracts.errors import ConfigError
from inspect_tinker_plugin.episode.runner import EpisodeRunner
from inspect_tinker_plugin.options import EpisodeOptions
from inspect_tinker_plugin.testing import call, play_episode, say, scripted_model


def plain(**options: Any) -> Task:
    sample = Sample(id=1, input="?", target="!")
    return Task(name="plain", dataset=[sample], solver=generate(), scorer=includes(), **options)


@pytest.mark.parametrize("where", ["task", "options"])
def test_a_cost_limit_without_prices_is_refused(where: str) -> None:
    limit = 1.0 if where == "task" else None
    options = EpisodeOptions(cost_limit=1.0 if where == "options" else None)
    task = plain(cost_limit=limit, model_roles={"grader": get_model("mockllm/unpriced")})
    with pytest.raises(ConfigError, match="mockllm/unpriced"):
        EpisodeRunner(task, options=options)


def test_a_cost_limit_with_prices_is_taken() -> None:
    price = ModelCost(input=1, output=1, input_cache_write=1, input_cache_read=1)
    for model in ("mockllm/priced", "rl/policy"):
        set_model_info(model, ModelInfo(cost=price))
    EpisodeRunner(plain(cost_limit=1.0, model_roles={"grader": get_model("mockllm/priced")}))


def test_what_has_no_effect_is_said_once(caplog: pytest.LogCaptureFixture) -> None:
    task = plain(checkpoint=True)
    with caplog.at_level(logging.WARNING):
        for _ in range(2):
            EpisodeRunner(task)
    assert caplog.text.count("its checkpoint has no effect") == 1


async def test_a_tool_that_a_working_limit_cuts_off_is_logged_as_cancelled() -> None:
    task = Task(
        dataset=[Sample(id=1, input="?", target="!")],
        solver=[use_tools(nap()), generate()],
        scorer=includes(),
        working_limit=3,
    )
    episode = EpisodeRunner(task, keep_log=True).episode(task.dataset[0])
    assert isinstance(await episode.start(), TurnRequest)
    call = ModelOutput.for_tool_call("rl/policy", "nap", {})
    result = await episode.reply(call)
    assert isinstance(result, EpisodeResult)
    assert result.limit is not None
    assert result.limit.type == "working"
    assert result.build_log is not None
    events = result.build_log().events
    [cut] = [event for event in events if isinstance(event, ToolEvent)]
    assert cut.pending is None
    assert cut.error is not None
    assert (cut.error.type, cut.failed) == ("cancelled", True)
    [interrupt] = [event for event in events if isinstance(event, InterruptEvent)]
    assert (interrupt.source, interrupt.interrupted) == ("limit", "tool_call")
    assert interrupt.interrupted_tool_call_id == cut.id


@solver
def asks_the_judge() -> Solver:
    async def solve(state: TaskState, generate: Generate) -> TaskState:
        assert isinstance(model_roles()["judge"], Model)
        await get_model(role="judge").generate("Well?")
        return await generate(state)

    return solve


@pytest.mark.parametrize("alone", [True, False], ids=["a model", "a list of one"])
async def test_what_a_model_object_says_in_a_role_counts_for_the_role(alone: bool) -> None:
    judge = scripted_model(["Well."], name="judge")
    task = Task(dataset=[Sample(id=1, input="?")], solver=[asks_the_judge(), generate()])
    options = EpisodeOptions(model_roles={"judge": judge if alone else [judge]})
    result = await play_episode(task, ["!"], options=options)
    assert result.build_log is not None
    assert "judge" in result.build_log().role_usage
    assert judge.role is None  # another role may have the same object


@solver
def asks_a_person() -> Solver:
    async def solve(state: TaskState, generate: Generate) -> TaskState:
        with input_screen() as console:
            state.metadata["said"] = console.input("Your name? ")
        return await generate(state)

    return solve


def never(prompt: object = "") -> str:
    raise AssertionError("the console was read")


@pytest.mark.parametrize("asks", ["tool", "approver", "solver"])
async def test_nobody_is_asked_at_the_console(asks: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("builtins.input", never)
    task = Task(
        dataset=[Sample(id=1, input="?", target="!")],
        solver=[asks_a_person() if asks == "solver" else use_tools(ask_user()), generate()],
        approval=[ApprovalPolicy(human_approver(), "*")] if asks == "approver" else None,
    )
    form = {"type": "object", "properties": {"name": {"type": "string"}}}
    question = call("ask_user", message="Your name?", schema=form)
    result = await play_episode(task, [say("", question), "!"])
    assert result.error is not None
    assert result.error.cause == ("solver" if asks == "solver" else "tool")
    assert "nobody sits before a training" in str(result.error)
