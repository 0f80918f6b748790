"""Built-in aggregators, their expressions, and functions of users."""

from __future__ import annotations

import asyncio
import pickle
from typing import Any

import numpy as np
import pytest
from inspect_ai.model import ChatMessageTool
from inspect_ai.tool import ToolCallError
from tests.rewards.episodes import finished

from inspect_tinker_plugin.contracts.episodes import EpisodeResult
from inspect_tinker_plugin.contracts.errors import ConfigError
from inspect_tinker_plugin.plugins import ExpressionError
from inspect_tinker_plugin.rewards import (
    AggregatorError,
    LengthPenalty,
    Mean,
    Reward,
    ScoreReward,
    Term,
    Weighted,
    resolve_reward,
)

SCORES = {"accuracy": 0.5, "format": 1, "judge": {"kind": 1, "clear": 0}}


@pytest.mark.parametrize(
    ("expression", "value"),
    [
        ("mean", 2 / 3),
        ("mean()", 2 / 3),
        ("mean(score:accuracy, score:format)", 0.75),
        ("min", 0.5),
        ("max", 1.0),
        ("product", 0.25),
        ("first", 0.5),
        ("score:format", 1.0),
        ("score:judge.kind", 1.0),
        ("score:'judge.clear'", 0.0),
        ("weighted(accuracy=0.8,format=0.2)", 0.6),
        ("weighted(judge.kind=1, accuracy=-1)", 0.5),
        ("weighted(score:judge.kind=0.5, min(score:accuracy, score:format)=2)", 1.5),
        ("length(mean(score:format), target=10)", 1.0),
        ("length(score:format, target=5, weight=0.5)", 0.5),
        ("length(score:format, target=8, weight=0.4)", 0.9),
        ("turns(score:format, target=2, weight=1)", 0.5),
        ("format(score:format, pattern='fou?r', weight=0.3)", 1.0),
        (r'format(score:format, pattern="^\d+$", weight=0.3)', 0.7),
        ("turns(length(score:format, target=5, weight=0.25), target=2, weight=1)", 0.25),
    ],
)
async def test_an_expression_gives(expression: str, value: float) -> None:
    reward = await resolve_reward(expression)(finished(SCORES, turns=3, output_tokens=10))
    assert reward.value == pytest.approx(value)


@pytest.mark.parametrize(
    ("expression", "problem", "marked"),
    [
        ("meen", "unknown reward 'meen'.*Did you mean mean", "meen"),
        ("accuracy", "A scorer is written score:accuracy", "accuracy"),
        ("weighted(meen()=1)", "unknown reward 'meen'", "meen"),
        ("weighted(", "was expected", ""),
        ("weighted(accuracy=)", "was expected", ")"),
        ("weighted(accuracy=1 format=2)", "',' or '\\)' was expected", "format"),
        ("weighted(accuracy='x')", "weight is a number", "weighted(accuracy='x')"),
        ("weighted(mean()='high')", "a weight \\(a number\\)", "'high'"),
        ("weighted(mean)", "has no weight", "weighted(mean)"),
        ("weighted(a=1, a=2)", "given twice", "a"),
        ("mean)", "nothing was expected", ")"),
        ("mean $", "unexpected character", "$"),
        ("mean(1)", "an aggregator was expected", "mean(1)"),
        ("length(mean)", "'target'", "length(mean)"),
        ("length(target=0)", "above 0", "length(target=0)"),
        ("format(pattern='[')", "not a regular expression", "format(pattern='[')"),
        ("format(pattern='abc)", "never ends", "'"),
        ("score:", "a scorer's name", ""),
        ("", "was expected", ""),
        ("0.5", "a name was expected", "0.5"),
    ],
)
def test_a_faulty_expression_is_pointed_at(expression: str, problem: str, marked: str) -> None:
    with pytest.raises(ExpressionError, match=problem) as caught:
        resolve_reward(expression)
    error = caught.value
    assert expression[error.start : error.end] == marked
    assert f"»{marked}«" in str(error)
    assert "\n" not in str(error)
    assert str(pickle.loads(pickle.dumps(error))) == str(error)


async def test_a_tool_that_failed_costs_up_to_the_cap() -> None:
    failed = ChatMessageTool(content="", error=ToolCallError("unknown", "no such file"))
    result = finished({"match": 1}, messages=[failed, failed, ChatMessageTool(content="fine")])
    reward = await resolve_reward("tool_errors(mean, weight=0.2)")(result)
    assert reward.value == pytest.approx(0.6)
    assert reward.metrics["reward/tool_errors_penalty"] == pytest.approx(0.4)
    assert (await resolve_reward("tool_errors(mean, weight=0.2, cap=0.1)")(result)).value == 0.9


async def test_objects_say_the_same_as_expressions() -> None:
    parts = Weighted((Term(ScoreReward("accuracy"), 0.8), Term(Mean((ScoreReward("format"),)), 1)))
    result = finished(SCORES, output_tokens=15)
    by_object = await resolve_reward(LengthPenalty(parts, target=10))(result)
    expression = "length(weighted(accuracy=0.8, mean(score:format)=1), target=10)"
    by_name = await resolve_reward(expression)(result)
    assert by_object.value == pytest.approx(by_name.value)


def plain(result: EpisodeResult) -> float:
    return result.turns * 2.0


async def asynchronous(result: EpisodeResult) -> Reward:
    await asyncio.sleep(0)
    return Reward(result.turns * 3.0, {"mine": 1})


@pytest.mark.parametrize(
    ("function", "value"),
    [(plain, 4.0), (asynchronous, 6.0), (lambda result: 7.0 - result.turns, 5.0)],
)
async def test_a_function_is_an_aggregator(function: Any, value: float) -> None:
    assert (await resolve_reward(function)(finished(turns=2))).value == value


async def test_a_plain_function_does_not_hold_up_other_episodes() -> None:
    started = asyncio.Event()
    loop = asyncio.get_running_loop()
    release = asyncio.Event()

    def waits_for_the_loop(result: EpisodeResult) -> float:
        loop.call_soon_threadsafe(started.set)
        asyncio.run_coroutine_threadsafe(release.wait(), loop).result(timeout=30)
        return 1.0

    slow = asyncio.create_task(resolve_reward(waits_for_the_loop)(finished()))
    await started.wait()
    assert (await resolve_reward("mean")(finished({"match": 1}))).value == 1
    release.set()
    assert (await slow).value == 1


async def test_an_aggregator_that_raises_keeps_its_cause() -> None:
    def broken(result: EpisodeResult) -> float:
        raise KeyError("no such thing")

    with pytest.raises(AggregatorError, match="KeyError") as caught:
        await resolve_reward(broken)(finished())
    assert isinstance(caught.value.__cause__, KeyError)


@pytest.mark.parametrize("answer", [np.float32(0.5), np.int64(1), Reward(np.float64(0.25)), True])
async def test_a_number_of_any_kind_becomes_a_float(answer: Any) -> None:
    def give(result: object) -> Any:
        return answer

    reward = await resolve_reward(give)(finished())
    assert type(reward.value) is float
    assert reward.value == (answer.value if isinstance(answer, Reward) else answer)


@pytest.mark.parametrize("answer", [None, "1", float("nan"), float("inf"), Reward(float("nan"))])
async def test_an_answer_that_is_no_finite_number_is_an_error(answer: object) -> None:
    with pytest.raises(AggregatorError, match="gave"):
        await resolve_reward(lambda result: answer)(finished())  # type: ignore[arg-type,return-value]


@pytest.mark.parametrize("metrics", [None, {"a": "b"}, {1: 2}, [1]], ids=repr)
async def test_metrics_that_are_no_numbers_by_name_are_an_error(metrics: Any) -> None:
    with pytest.raises(AggregatorError, match="metrics"):
        await resolve_reward(lambda result: Reward(1.0, metrics))(finished())


async def test_a_plain_function_may_be_a_part() -> None:
    whole: Any = Mean((plain, ScoreReward("format")))  # type: ignore[arg-type]
    assert (await resolve_reward(whole)(finished(SCORES, turns=2))).value == 2.5


@pytest.mark.parametrize("spec", [None, 3, object(), Mean, lambda: 1.0, lambda a, b: 1.0])
def test_what_is_no_aggregator_is_refused(spec: object) -> None:
    with pytest.raises(ConfigError):
        resolve_reward(spec)  # type: ignore[arg-type]


@pytest.mark.parametrize(
    "spec", ["length(mean, target=4)", Mean(), plain], ids=["expression", "object", "function"]
)
async def test_aggregators_travel_to_worker_processes(spec: object) -> None:
    resolved = resolve_reward(spec, timeout=60)  # type: ignore[arg-type]
    copy = pickle.loads(pickle.dumps(resolved))
    assert copy.timeout == 60
    assert await copy(finished(SCORES)) == await resolved(finished(SCORES))
