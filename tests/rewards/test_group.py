"""Group aggregators: final rewards of a group, where failed members stay failed."""

from __future__ import annotations

import asyncio
import pickle
from collections.abc import Sequence
from typing import Any

import pytest
from tests.rewards.episodes import failed_member, member

from inspect_tinker_plugin.contracts.episodes import EpisodeResult
from inspect_tinker_plugin.contracts.errors import ConfigError
from inspect_tinker_plugin.rewards import (
    AggregatorError,
    GroupMember,
    Pairwise,
    Reward,
    resolve_group_reward,
)

GROUP = [member(0.1), member(0.9), failed_member(), member(0.9), member(0.4)]
ALONE = [member(0.3), failed_member()]
"""Nobody to compare with."""


async def values(spec: object, group: Sequence[GroupMember] = GROUP) -> list[float | None]:
    rewards = await resolve_group_reward(spec)(group)  # type: ignore[arg-type]
    return [None if reward is None else reward.value for reward in rewards]


@pytest.mark.parametrize(
    ("spec", "group", "expected"),
    [
        ("rank", GROUP, [0, pytest.approx(5 / 6), None, pytest.approx(5 / 6), 1 / 3]),
        ("best_of(rest=-1)", GROUP, [-1, 0.9, None, 0.9, -1]),
        ("rank", [failed_member()] * 2, [None, None]),
        ("best_of", [failed_member()] * 2, [None, None]),
        ("diversity", [failed_member()] * 2, [None, None]),
        ("rank", ALONE, [0.5, None]),
        (f"pairwise(judge='{__name__}:shorter')", ALONE, [0.5, None]),
    ],
    ids=[
        "rank",
        "best_of",
        *(f"{name} of failed" for name in ("rank", "best_of", "diversity")),
        "rank alone",
        "pairwise alone",
    ],
)
async def test_members_are_paid_by_their_place_and_failed_ones_stay_failed(
    spec: str, group: list[GroupMember], expected: list[Any]
) -> None:
    assert await values(spec, group) == expected


async def test_diversity_adds_to_the_own_reward_for_words_of_ones_own() -> None:
    group = [
        member(1, completion="a red fox"),
        member(1, completion="A red fox!"),
        member(1, completion="three blue owls"),
        failed_member(),
    ]
    assert await values("diversity(weight=0.5)", group) == [1.25, 1.25, 1.5, None]


def shorter(first: EpisodeResult, second: EpisodeResult) -> float:
    lengths = [len(result.state.output.completion) for result in (first, second)]
    return 0.5 if lengths[0] == lengths[1] else float(lengths[0] < lengths[1])


async def shorter_async(first: EpisodeResult, second: EpisodeResult) -> float:
    await asyncio.sleep(0)
    return shorter(first, second)


@pytest.mark.parametrize("judge", [shorter, shorter_async, f"{__name__}:shorter"])
async def test_pairwise_takes_any_judge(judge: str) -> None:
    group = [member(0, completion=text) for text in ("aaaa", "aa", "a")]
    group.insert(1, failed_member())
    assert await values(Pairwise(judge), group) == [0, None, 0.5, 1]


async def test_judging_both_orders_evens_out_a_preference_for_the_first() -> None:
    def likes_the_first(first: EpisodeResult, second: EpisodeResult) -> float:
        return 1.0

    group = [member(0), member(0), member(0)]
    assert await values(Pairwise(likes_the_first), group) == [1, 0.5, 0]
    assert await values(Pairwise(likes_the_first, both_orders=True), group) == [0.5, 0.5, 0.5]


async def test_a_judge_that_fails_fails_the_group_and_is_no_zero() -> None:
    def broken(first: EpisodeResult, second: EpisodeResult) -> float:
        raise OSError("judge is down")

    with pytest.raises(AggregatorError, match="judge is down"):
        await values(Pairwise(broken))


@pytest.mark.parametrize("verdict", [2, -0.1, float("nan"), None, "first"])
async def test_a_verdict_outside_of_its_range_is_an_error(verdict: object) -> None:
    with pytest.raises(AggregatorError, match="from 0 to 1"):
        await values(Pairwise(lambda a, b: verdict))  # type: ignore[arg-type,return-value]


@pytest.mark.parametrize(
    ("answer", "problem"),
    [
        ([1.0], "5 members"),
        (None, "5 members"),
        ([1.0] * 5, "failed member 2"),
        ([1.0, float("nan"), None, 1.0, 1.0], "finite"),
    ],
)
async def test_a_wrong_answer_for_a_group_is_an_error(answer: object, problem: str) -> None:
    with pytest.raises(AggregatorError, match=f"group reward .*{problem}"):
        await values(lambda members: answer)


async def test_a_function_is_a_group_aggregator() -> None:
    def halved(members: Sequence[GroupMember]) -> list[Reward | None]:
        return [None if m.reward is None else Reward(m.reward.value / 2) for m in members]

    assert await values(halved) == [0.05, 0.45, None, 0.45, 0.2]


@pytest.mark.parametrize(
    "expression", ["ranc", "pairwise", "pairwise(judge='no.such:thing')", "rank(0.5=1)", "mean"]
)
def test_a_wrong_expression_is_refused(expression: str) -> None:
    with pytest.raises(ConfigError):
        resolve_group_reward(expression)


def test_group_aggregators_travel_to_worker_processes() -> None:
    resolved = resolve_group_reward(f"pairwise(judge='{__name__}:shorter', both_orders=true)")
    assert pickle.loads(pickle.dumps(resolved)) == resolved
