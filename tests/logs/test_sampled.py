"""A log keeps what was sampled: the datums of a training can be made from it again."""

from __future__ import annotations

import asyncio
from dataclasses import dataclass
from pathlib import Path
from random import Random
from typing import Any

import pytest
from inspect_ai.log import read_eval_log
from tests.logs.rollouts import by_word, dataset, datums, logs_in, run_in_thread, samples
from tests.rl.policies import Words, tool_call
from tests.rl.tasks import adding
from tinker_cookbook import completers
from tinker_cookbook.completers import TokensWithLogprobs
from tinker_cookbook.rl.metric_util import compute_trajectory_metrics
from tinker_cookbook.rl.rollout_limits import ParseErrorPolicy
from tinker_cookbook.rl.rollout_runner import run_rollout
from tinker_cookbook.rl.rollout_strategy import RolloutResult, RolloutStrategy
from tinker_cookbook.rl.rollouts import do_group_rollout

from inspect_tinker_plugin.logs import assemble_pending
from inspect_tinker_plugin.logs.rollout import SAMPLED_KEY, trajectory, trajectory_groups


class Unsure(Words):
    """Says its lines with log probabilities that no rounding would keep."""

    async def __call__(self, *arguments: Any, **options: Any) -> TokensWithLogprobs:
        said = await super().__call__(*arguments, **options)
        dice = Random(len(self.prompts))
        said.maybe_logprobs = [-dice.random() for _ in said.tokens]
        return said


@dataclass
class Identified(TokensWithLogprobs):
    """An action as of cookbook 0.6, with what the server says of it."""

    sequence_id: str | None = None
    prompt_cache_hit_tokens: int = 0


class Served(Unsure):
    """Says its lines with ids."""

    async def __call__(self, *arguments: Any, **options: Any) -> TokensWithLogprobs:
        said = await super().__call__(*arguments, **options)
        number = len(self.prompts)
        return Identified(
            said.tokens, said.maybe_logprobs, said.stop_reason, f"sequence {number}", number % 2
        )


@pytest.mark.parametrize("options", [{}, {"group_reward": "rank"}], ids=str)
def test_datums_of_a_log_are_those_of_the_training(options: dict[str, Any], tmp_path: Path) -> None:
    batch = dataset(by_word(3), tmp_path, batch_size=3, group_size=3, **options).get_batch(0)
    policies = [Unsure(["2", "no", "some"]), Unsure(["2", "4", "2"]), Unsure(["6", "1", "6"])]
    played = [
        asyncio.run(do_group_rollout(group, policy))
        for group, policy in zip(batch, policies, strict=True)
    ]
    run_in_thread(assemble_pending, tmp_path)
    (log,) = logs_in(tmp_path)
    read = trajectory_groups(samples(log))
    assert [group.get_total_rewards() for group in read] == [
        group.get_total_rewards() for group in played
    ]
    assert datums(read) == datums(played)


class Masking(RolloutStrategy):
    """Runs rollouts whose malformed turns are not trained on."""

    async def execute(self, env_group_builder: Any, policy: Any) -> RolloutResult:
        envs = await env_group_builder.make_envs()
        errors = ParseErrorPolicy(max_consecutive=5, mask_error_turns=True)
        made = [await run_rollout(policy, env, parse_errors=errors) for env in envs]
        return RolloutResult(trajectories=made, envs=envs, errors=[])


def test_metrics_of_turns_are_in_a_log_with_the_mask_of_those_not_trained_on(
    tmp_path: Path,
) -> None:
    (group, *_) = dataset(adding(), tmp_path, batch_size=1, group_size=2).get_batch(0)
    said = [tool_call("add", "{not json"), "1", tool_call("add", '{"x":1,"y":0}'), "0"]
    played = asyncio.run(do_group_rollout(group, Unsure(said), Masking()))
    run_in_thread(assemble_pending, tmp_path)
    read = trajectory_groups(samples(logs_in(tmp_path)[0]))
    made, _ = datums([played])
    sampled = [
        sum(len(step.ac.tokens) for step in each.transitions) for each in played.trajectories_G
    ]
    assert sum(made[0]["mask"][1]) < sampled[0]
    assert datums(read) == datums([played])
    first, again = (compute_trajectory_metrics(each, [[]]) for each in ([played], read))
    assert first == again
    assert {"env/all/tools/calls", "env/all/parse_error"} < first.keys()


def test_actions_of_a_log_have_the_ids_that_the_server_gave_them(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (group,) = dataset(by_word(1), tmp_path, batch_size=1, group_size=2).get_batch(0)
    played = asyncio.run(do_group_rollout(group, Served(["2", "no", "some", "4"])))
    run_in_thread(assemble_pending, tmp_path)
    monkeypatch.setattr(completers, "TokensWithLogprobs", Identified)
    (read,) = trajectory_groups(samples(logs_in(tmp_path)[0]))
    said, again = (
        [[step.ac for step in each.transitions] for each in one.trajectories_G]
        for one in (played, read)
    )
    assert said == again
    assert all(vars(action)["sequence_id"] for actions in again for action in actions)


def test_a_rollout_that_the_trainer_did_not_get_keeps_nothing(tmp_path: Path) -> None:
    (group,) = dataset(by_word(1), tmp_path, batch_size=1, group_size=1).get_batch(0)
    with pytest.raises(Exception, match="the scorer is broken"):
        asyncio.run(do_group_rollout(group, Unsure(["crash"])))
    run_in_thread(assemble_pending, tmp_path)
    (record,) = samples(logs_in(tmp_path)[0])
    assert SAMPLED_KEY not in record.store
    assert trajectory(record) is None
    assert trajectory_groups([record]) == []


def test_a_log_needs_no_attachments_for_it(tmp_path: Path) -> None:
    (group,) = dataset(by_word(1), tmp_path, batch_size=1, group_size=1).get_batch(0)
    played = asyncio.run(do_group_rollout(group, Unsure(["2 " * 99])))
    run_in_thread(assemble_pending, tmp_path)
    (path,) = tmp_path.glob("*.eval")
    assert datums(trajectory_groups(samples(run_in_thread(read_eval_log, path)))) == datums(
        [played]
    )
