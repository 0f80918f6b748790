"""Breaking the sandbox never pays more than a wrong answer, nor is it run again without end."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import pytest
from inspect_ai import Task
from inspect_ai.dataset import Sample
from inspect_ai.scorer import Score, Target, mean
from inspect_ai.solver import TaskState, generate
from inspect_ai.util import sandbox
from tests.functions import make_scorer
from tests.rl.policies import Words, renderer, roll_out_task, tokenizer
from tinker_cookbook.rl.metric_util import compute_trajectory_metrics
from tinker_cookbook.rl.rollout_strategy import RetryOnFailure
from tinker_cookbook.rl.rollouts import do_group_rollout

from inspect_tinker_plugin.contracts.errors import Cause, EpisodeError
from inspect_tinker_plugin.contracts.rewards import GroupMember
from inspect_tinker_plugin.rl.dataset import as_rl_dataset
from inspect_tinker_plugin.rl.ending import ALWAYS, MOST_FAILURES

VALUES = {"right": 1.0, "wrong": 0.0, "harm": -1.0}


@make_scorer(mean())
async def graded(state: TaskState, target: Target) -> Score:
    """Read a file that is missing when the policy says so."""
    said = state.output.completion
    if "breaks it" in said:
        await sandbox().read_file("answer.txt")
    if "breaks the scorer" in said:
        raise RuntimeError("no verdict")
    return Score(value=next((v for word, v in VALUES.items() if word in said), 0.0))


def task(samples: int = 1) -> Task:
    return Task(
        name="priced",
        dataset=[Sample(id=n, input="Answer.", target="x") for n in range(samples)],
        solver=generate(),
        scorer=graded(),
        sandbox="local",
    )


async def rewards(replies: list[str], **options: Any) -> list[float]:
    group = await roll_out_task(task(), replies, group_size=len(replies), **options)
    # the members ask in any order, so a reward is found by what it is for
    said = [str(tokenizer().decode(t.transitions[0].ac.tokens)) for t in group.trajectories_G]
    by_reply = dict(zip(said, group.get_total_rewards(), strict=True))
    return [next(v for s, v in by_reply.items() if reply in s) for reply in replies]


REWARDS = {
    "the mean": "mean()",
    "a format": r'format(mean(), pattern="ANSWER", weight=0.5)',
    "turns": "turns(mean(), target=0.5, weight=0.5)",
    "a length": "length(mean(), target=1, weight=0.5)",
    "the opposite": "weighted(graded=-1.0)",
    "both": 'weighted(format(mean(), pattern="ANSWER")=2.0, graded=0.5)',
}


@pytest.mark.parametrize("reward", REWARDS)
async def test_it_pays_no_more_than_a_wrong_answer_elsewhere(reward: str) -> None:
    expression = REWARDS[reward]
    [wrong] = await rewards(["wrong"], reward=expression)
    [harmless] = await rewards(["right"], reward=expression)
    [broken] = await rewards(["breaks it"], reward=expression)
    assert broken <= min(wrong, harmless)


@pytest.mark.parametrize("group_reward", [None, "rank", "best_of(rest=-2)"])
@pytest.mark.parametrize("reward", ["mean()", 'format(mean(), pattern="ANSWER")'])
async def test_it_pays_no_more_than_the_least_of_its_group(
    reward: str, group_reward: str | None
) -> None:
    given = await rewards(["right", "harm", "breaks it"], reward=reward, group_reward=group_reward)
    assert given[2] <= min(given[:2])


async def test_it_pays_no_more_than_a_wrong_answer_of_another_group() -> None:
    format_too = 'format(mean(), pattern="ANSWER", weight=0.5)'
    dataset = as_rl_dataset(task(3), renderer(), reward=format_too)
    said = ["harm", "breaks it", "ANSWER breaks it"]
    groups = [
        await do_group_rollout(dataset.get_batch(number)[0], Words([reply]))
        for number, reply in enumerate(said)
    ]
    assert [group.get_total_rewards() for group in groups] == [[-1.5], [-1.5], [-1.0]]


async def test_it_pays_no_more_than_a_group_has_given_a_wrong_answer_before() -> None:
    async def harsh(members: Sequence[GroupMember]) -> list[float | None]:
        own = [None if each.reward is None else each.reward.value for each in members]
        return [-2.0 if value == 0.0 else value for value in own]

    dataset = as_rl_dataset(task(2), renderer(), group_size=2, group_reward=harsh)
    paid = []
    for number, replies in enumerate([["right", "wrong"], ["right", "breaks it"]]):
        group = await do_group_rollout(dataset.get_batch(number)[0], Words(replies))
        paid.append(sorted(group.get_total_rewards()))
    assert paid == [[-2.0, 1.0], [-2.0, 1.0]]


async def test_it_pays_no_more_than_a_group_would_give_a_wrong_answer() -> None:
    for replies in (["right", "breaks it"], ["breaks it", "breaks it"]):
        given = await rewards(replies, group_reward="best_of(rest=-2)")
        assert given[-1] == -2.0


async def test_a_stated_price_stays_as_it_is() -> None:
    given = await rewards(["harm", "breaks it"], on_error={"inside_sandbox": 0.25})
    assert given == [-1.0, 0.25]


async def test_a_task_whose_episodes_all_fail_in_the_same_operation_is_an_error() -> None:
    dataset = as_rl_dataset(task(ALWAYS + 1), renderer())
    for number in range(ALWAYS):
        [builder] = dataset.get_batch(number)
        assert (await do_group_rollout(builder, Words(["breaks it"]))).get_total_rewards() == [0.0]
    with pytest.raises(EpisodeError, match=r"all of 17 episodes .* read_file\(\)") as caught:
        await do_group_rollout(dataset.get_batch(ALWAYS)[0], Words(["breaks it"]))
    assert caught.value.cause is Cause.INSIDE_SANDBOX


async def test_one_episode_that_is_scored_shows_that_the_task_is_right() -> None:
    dataset = as_rl_dataset(task(ALWAYS + 2), renderer())
    for number in range(ALWAYS + 2):
        [builder] = dataset.get_batch(number)
        await do_group_rollout(builder, Words(["wrong" if number == 3 else "breaks it"]))


async def test_a_sample_that_fails_again_and_again_is_not_run_without_end() -> None:
    policy = Words(["breaks the scorer"] * 100)
    again = f"{MOST_FAILURES} episodes of this sample in a row"
    with pytest.raises(EpisodeError, match=again) as caught:
        await roll_out_task(task(), policy, RetryOnFailure(max_retries=50))
    assert caught.value.cause is Cause.SCORER
    assert len(policy.prompts) == MOST_FAILURES


async def test_episodes_that_are_run_again_are_counted_by_cause() -> None:
    lines = ["breaks the scorer", "breaks the scorer", "right"]
    group = await roll_out_task(task(), lines, RetryOnFailure(max_retries=5))
    assert group.get_total_rewards() == [1.0]
    assert group.metrics_G[0]["retried/scorer"] == 2


async def test_the_share_of_failed_episodes_is_among_the_figures_of_a_step() -> None:
    def fails(members: Sequence[GroupMember]) -> list[float]:
        raise RuntimeError("no verdict")

    shares = []
    for options in ({}, {"group_reward": "rank"}, {"group_reward": fails, "on_error": -1.0}):
        group = await roll_out_task(
            task(), ["right", "breaks it", "wrong", "wrong"], group_size=4, **options
        )
        shares.append(compute_trajectory_metrics([group], [["priced"]])["env/all/failed"])
    assert shares == [0.25, 0.25, 1.0]
