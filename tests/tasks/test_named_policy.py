"""The policy under its name: in the body of a task function, and from a solver or scorer."""

from __future__ import annotations

import asyncio
from pathlib import Path
from typing import Any

import pytest
from inspect_ai import Task, task
from inspect_ai.model import ChatMessageAssistant, GenerateConfig, Model, get_model
from inspect_ai.scorer import Score, Target, mean
from inspect_ai.solver import Generate, TaskState
from tests.functions import make_scorer, make_solver
from tests.rl.policies import Words, roll_out_task
from tests.rl.tasks import sums

from inspect_tinker_plugin.contracts.episodes import TurnRequest
from inspect_tinker_plugin.contracts.errors import Cause, EpisodeError
from inspect_tinker_plugin.testing import check_parity_async, play_episode, scripted_model


@make_solver
async def asking(
    state: TaskState, generate: Generate, model: Model | None = None, role: str | None = None
) -> TaskState:
    """Ask a model that was made before, or one by the name of the policy."""
    asked = model or get_model(str(state.model))
    state.output = await asked.generate(state.messages)
    state.messages.append(ChatMessageAssistant(content=state.output.completion))
    return state


@make_scorer(mean())
async def right(
    state: TaskState, target: Target, judge: Model | None = None, *, by_name: bool = False
) -> Score:
    grader = get_model(str(state.model)) if by_name else judge
    if grader is not None:
        await grader.generate("Is it right?")
    return Score(value=float(target.text in state.output.completion))


@task
def model_in_body() -> Task:
    return Task(sums(1), solver=asking(get_model()), scorer=right())


@task
def model_by_name() -> Task:
    return Task(sums(1), solver=asking(), scorer=right())


@task
def judge_in_body() -> Task:
    return Task(sums(1), solver=asking(), scorer=right(get_model()))


@task
def judge_by_name() -> Task:
    return Task(sums(1), solver=asking(), scorer=right(by_name=True))


@task
def role_in_body() -> Task:
    return Task(sums(1), solver=asking(get_model(role="user")), scorer=right())


def play(task: Any, **options: Any) -> tuple[list[float], Words]:
    words = Words(["1"])
    group = asyncio.run(roll_out_task(task, words, **options))
    return group.get_total_rewards(), words


@pytest.mark.parametrize("task", [model_in_body, model_by_name])
@pytest.mark.parametrize("by", ["function", "file"])
def test_the_episode_s_policy_answers_under_its_name(task: Any, by: str) -> None:
    asked = task if by == "function" else f"{Path(__file__)}@{task.__name__}"
    rewards, words = play(asked, group_size=2)
    assert rewards == [1.0, 1.0]
    assert len(words.prompts) == 2


def test_more_episodes_wait_than_a_pool_of_connections_has_places() -> None:
    """Inspect's pools begin with 20 places; parked calls would hold them for ever."""
    rewards, _ = play(model_by_name, group_size=50)
    assert rewards == [1.0] * 50


@pytest.mark.parametrize("task", [judge_in_body, judge_by_name])
def test_a_scorer_is_refused_under_any_name(task: Any) -> None:
    with pytest.raises(EpisodeError, match="asked the model under training to grade") as failed:
        play(task)
    assert failed.value.cause is Cause.JUDGE


def test_a_role_in_the_body_is_the_role_s_model() -> None:
    rewards, words = play(role_in_body, model_roles={"user": scripted_model(["1"])})
    assert rewards == [1.0]
    assert not words.prompts
    assert len(play(role_in_body)[1].prompts) == 1  # nobody else plays it, as in an eval


@pytest.mark.parametrize("by_role", [False, True], ids=["model", "role"])
@pytest.mark.parametrize("where", ["task", "call"])
async def test_no_option_of_transport_reaches_it(
    where: str, by_role: bool, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setenv("INSPECT_CACHE_DIR", str(tmp_path))
    options = GenerateConfig(cache=True, timeout=1, attempt_timeout=1, max_connections=1)
    own = GenerateConfig() if where == "task" else options

    @make_solver
    async def asking_twice(state: TaskState, generate: Generate) -> TaskState:
        name = str(state.model)
        named = get_model(default=name, role="user") if by_role else get_model(name)
        said = [await named.generate("?", config=own) for _ in range(2)]
        state.output = said[-1]
        state.metadata["said"] = [each.completion for each in said]
        return state

    asked: list[GenerateConfig] = []

    def answer(request: TurnRequest) -> str:
        asked.append(request.config)
        return str(len(asked))

    task = Task(sums(1), solver=asking_twice(), config=options)
    for first in (1, 3):
        result = await play_episode(task, answer)
        assert result.error is None
        assert result.state.metadata["said"] == [str(first), str(first + 1)]
    for config in asked:
        assert (config.cache, config.timeout, config.attempt_timeout) == (None, None, None)
        assert config.max_connections is not None
        assert config.max_connections > 1000


@pytest.mark.parametrize("task", [model_in_body, model_by_name])
def test_it_agrees_with_an_eval(task: Any) -> None:
    [report] = asyncio.run(check_parity_async(task, script=["1"]))
    assert report.agrees, report
