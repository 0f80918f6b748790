"""Scores as numbers: Inspect's own conversion, and never a silent zero."""

from __future__ import annotations

import logging
import math
from typing import Any

import pytest
from inspect_ai.scorer import Score, value_to_float
from tests.rewards.episodes import finished

from inspect_tinker_plugin.rewards import UnscoredError, resolve_reward

VALUES: list[Any] = ["C", "I", "P", "N", True, False, 1, 0, 0.1, -2.5, "0.25", "1e-3", "yes", "No"]


@pytest.mark.parametrize("value", VALUES, ids=repr)
async def test_a_value_means_what_it_means_to_inspect(value: Any) -> None:
    reward = await resolve_reward("mean")(finished({"match": value}))
    assert reward.value == value_to_float()(value)
    assert reward.metrics == {"score/match": reward.value}


@pytest.mark.parametrize(
    "value",
    [
        math.nan,
        math.inf,
        10**400,
        "banana",
        "",
        "nan",
        {},
        [],
        {"a": 1, "b": None},
        {"a": "banana"},
    ],
    ids=lambda value: f"{value!r:.20}",
)
@pytest.mark.parametrize("expression", ["mean", "first", "score:match"])
async def test_what_is_no_number_is_unscored_not_zero(
    value: Any, expression: str, caplog: pytest.LogCaptureFixture
) -> None:
    with caplog.at_level(logging.WARNING), pytest.raises(UnscoredError, match="'match"):
        await resolve_reward(expression)(finished({"match": value}))
    assert not caplog.records, "Inspect's fallback to 0 was taken"


async def test_an_unscored_score_says_why() -> None:
    score = Score.unscored(reason="grader_failed", explanation="the judge timed out")
    with pytest.raises(UnscoredError, match=r"unscored.*grader_failed") as caught:
        await resolve_reward("mean")(finished({"match": 1, "judge": score}))
    assert caught.value.scorer == "judge"


@pytest.mark.parametrize("expression", ["mean", "first", "min", "score:match", "weighted(match=1)"])
async def test_an_episode_without_scores_has_no_reward(expression: str) -> None:
    with pytest.raises(UnscoredError, match="no score"):
        await resolve_reward(expression)(finished())


async def test_a_dict_score_is_the_mean_of_its_keys_unless_one_is_named() -> None:
    result = finished({"judge": {"helpful": 1, "brief": 0.5}})
    whole = await resolve_reward("mean")(result)
    assert whole.value == 0.75
    assert whole.metrics == {
        "score/judge": 0.75,
        "score/judge.helpful": 1.0,
        "score/judge.brief": 0.5,
    }
    assert (await resolve_reward("score:judge.brief")(result)).value == 0.5


async def test_a_list_score_is_read_by_index() -> None:
    result = finished({"steps": [1, 0, 1]})
    assert (await resolve_reward("score:steps.0")(result)).value == 1
    assert (await resolve_reward("mean")(result)).value == pytest.approx(2 / 3)


async def test_a_scorer_name_with_dots_wins_over_a_key() -> None:
    result = finished({"a.b": 0.25, "a": {"b": 1}})
    assert (await resolve_reward("score:a.b")(result)).value == 0.25


async def test_a_missing_key_is_named_with_those_that_are_there() -> None:
    with pytest.raises(UnscoredError, match="no key 'kind'; its keys are 'helpful'") as caught:
        await resolve_reward("score:judge.kind")(finished({"judge": {"helpful": 1}}))
    assert (caught.value.scorer, caught.value.key) == ("judge", "kind")


async def test_a_missing_scorer_is_named_with_those_that_are_there() -> None:
    with pytest.raises(UnscoredError, match="no score named 'acuracy'; there is 'accuracy'"):
        await resolve_reward("weighted(acuracy=1)")(finished({"accuracy": 1}))
