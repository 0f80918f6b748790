"""A scorer that gives less than it should is unscored, even if other scores are complete."""

from __future__ import annotations

from typing import Any, cast

import pytest
from inspect_ai import Task
from inspect_ai.dataset import Sample
from inspect_ai.scorer import Metric, Score, Scorer, Target, mean, scorer
from inspect_ai.solver import Generate, Solver, TaskState, generate
from tests.functions import make_scorer, make_solver
from tests.rewards.rollouts import rewards_of

from inspect_tinker_plugin.contracts.errors import Cause, EpisodeError


@make_scorer(mean())
async def none(state: TaskState, target: Target) -> Score | None:
    return None


@make_scorer(mean())
async def one(state: TaskState, target: Target) -> Score | None:
    return Score(value=1.0)


KEYS: dict[str, list[Metric]] = {"kind": [mean()], "clear": [mean()]}


@scorer(metrics=KEYS)
def judged(value: dict[str, Any]) -> Scorer:
    async def score(state: TaskState, target: Target) -> Score | None:
        return Score(value=value)

    return score


@make_solver
async def scores_itself(state: TaskState, generate: Generate, name: str, value: Any) -> TaskState:
    state.scores = {name: value}
    return state


def asking(*scorers: Scorer, own: Solver | None = None) -> Task:
    steps = [generate()] if own is None else [generate(), own]
    return Task(dataset=[Sample(input="?", target="!")], solver=steps, scorer=list(scorers))


@pytest.mark.parametrize("reward", ["mean", "min", "max", "product", "first", "score:none"])
async def test_none_beside_another_score_is_unscored(reward: str) -> None:
    with pytest.raises(EpisodeError, match="scorer 'none' gave no score") as caught:
        await rewards_of(asking(none(), one()), ["!"], reward=reward)
    assert caught.value.cause is Cause.UNSCORED


async def test_none_beside_a_score_of_the_solver_is_unscored() -> None:
    task = asking(none(), own=scores_itself("mine", Score(value=1.0)))
    with pytest.raises(EpisodeError, match="'none' gave no score"):
        await rewards_of(task, ["!"])


async def test_a_reward_that_asks_for_the_other_score_is_paid() -> None:
    assert await rewards_of(asking(none(), one()), ["!"], reward="score:one") == [1.0]
    assert await rewards_of(asking(one(), none()), ["!"], reward="first") == [1.0]


async def test_the_scores_of_a_solver_count_beside_those_of_scorers() -> None:
    task = asking(one(), own=scores_itself("mine", Score(value=0.0)))
    assert await rewards_of(task, ["!"]) == [0.5]


@pytest.mark.parametrize("reward", ["mean", "first", "score:judged"])
async def test_a_key_that_the_metrics_name_must_be_there(reward: str) -> None:
    with pytest.raises(EpisodeError, match="no key 'clear'") as caught:
        await rewards_of(asking(judged({"kind": 1.0})), ["!"], reward=reward)
    assert caught.value.cause is Cause.UNSCORED
    whole = {"kind": 1.0, "clear": 0.0}
    assert await rewards_of(asking(judged(whole)), ["!"], reward=reward) == [0.5]


@pytest.mark.parametrize("given", [0.5, "C", [1.0]], ids=repr)
async def test_a_scorer_that_returns_no_score_object_fails(given: Any) -> None:
    @make_scorer(mean())
    async def wrong(state: TaskState, target: Target) -> Score | None:
        return cast(Score, given)

    with pytest.raises(EpisodeError) as caught:
        await rewards_of(asking(wrong(), one()), ["!"])
    assert caught.value.cause is Cause.SCORER


async def test_a_solver_that_stores_no_score_object_fails() -> None:
    with pytest.raises(EpisodeError):
        await rewards_of(asking(one(), own=scores_itself("mine", 0.5)), ["!"])
