"""A log keeps what was sampled: the datums of a training can be made from it again."""

from __future__ import annotations

import asyncio
from pathlib import Path
from random import Random
from typing import Any

import pytest
from inspect_ai.log import read_eval_log
from tests.logs.rollouts import apart, by_word, dataset, logs_in, samples
from tests.rl.policies import Words, plain
from tinker_cookbook.completers import TokensWithLogprobs
from tinker_cookbook.rl.data_processing import assemble_training_data, compute_advantages
from tinker_cookbook.rl.rollouts import do_group_rollout
from tinker_cookbook.rl.types import TrajectoryGroup

from inspect_tinker_plugin.logs import assemble_pending
from inspect_tinker_plugin.logs.rollout import SAMPLED_KEY
from inspect_tinker_plugin.logs.sampled import trajectory, trajectory_groups


class Unsure(Words):
    """Says its lines with log probabilities that no rounding would keep."""

    async def __call__(self, *arguments: Any, **options: Any) -> TokensWithLogprobs:
        said = await super().__call__(*arguments, **options)
        dice = Random(len(self.prompts))
        said.maybe_logprobs = [-dice.random() for _ in said.tokens]
        return said


def datums(groups: list[TrajectoryGroup]) -> Any:
    made, places = assemble_training_data(groups, compute_advantages(groups))
    return [plain(datum) for datum in made], places


@pytest.mark.parametrize("options", [{}, {"group_reward": "rank"}], ids=str)
def test_datums_of_a_log_are_those_of_the_training(options: dict[str, Any], tmp_path: Path) -> None:
    batch = dataset(by_word(3), tmp_path, batch_size=3, group_size=3, **options).get_batch(0)
    policies = [Unsure(["2", "no", "some"]), Unsure(["2", "4", "2"]), Unsure(["6", "1", "6"])]
    played = [
        asyncio.run(do_group_rollout(group, policy))
        for group, policy in zip(batch, policies, strict=True)
    ]
    apart(assemble_pending, tmp_path)
    (log,) = logs_in(tmp_path)
    read = trajectory_groups(samples(log))
    assert [group.get_total_rewards() for group in read] == [
        group.get_total_rewards() for group in played
    ]
    assert datums(read) == datums(played)


def test_a_rollout_that_the_trainer_did_not_get_keeps_nothing(tmp_path: Path) -> None:
    (group,) = dataset(by_word(1), tmp_path, batch_size=1, group_size=1).get_batch(0)
    with pytest.raises(Exception, match="the scorer is broken"):
        asyncio.run(do_group_rollout(group, Unsure(["crash"])))
    apart(assemble_pending, tmp_path)
    (record,) = samples(logs_in(tmp_path)[0])
    assert SAMPLED_KEY not in record.store
    assert trajectory(record) is None
    assert trajectory_groups([record]) == []


def test_a_log_needs_no_attachments_for_it(tmp_path: Path) -> None:
    (group,) = dataset(by_word(1), tmp_path, batch_size=1, group_size=1).get_batch(0)
    played = asyncio.run(do_group_rollout(group, Unsure(["2 " * 99])))
    apart(assemble_pending, tmp_path)
    (path,) = tmp_path.glob("*.eval")
    assert datums(trajectory_groups(samples(apart(read_eval_log, path)))) == datums([played])
