"""A training that continues uses the groups again that it had finished before it was stopped."""

from __future__ import annotations

import asyncio
import json
import pickle
from pathlib import Path
from typing import Any

import pytest
from tests.logs import rollouts
from tests.logs.rollouts import datums, figures, logs_in, run_in_thread, samples
from tests.logs.test_sampled import Unsure
from tests.rl.policies import Words
from tests.train.runs import toy_request
from tinker_cookbook.rl.metric_util import compute_trajectory_metrics
from tinker_cookbook.rl.rollouts import do_group_rollout
from tinker_cookbook.rl.types import TrajectoryGroup

from inspect_tinker_plugin.logs import assemble_pending
from inspect_tinker_plugin.train.history import record_run
from inspect_tinker_plugin.train.run import plan_run
from inspect_tinker_plugin.train.strategies import UseFinished, use_finished

LINES = [["2", "no", "some"], ["2", "4", "2"], ["6", "1", "6"]]


def config_of(run: Path, **changes: Any) -> Any:
    options = {"task": f"{rollouts.__file__}@by_word", "batch_size": 3, "group_size": 3, **changes}
    request = toy_request(run, task_args={"count": 9}, steps=3, **options)
    planned = plan_run(request, models=run)
    run.mkdir(exist_ok=True)
    record_run(run, planned.identity())
    return planned.config


def resume(config: Any, step: int) -> Any:
    return asyncio.run(use_finished(config, step))


def dataset_of(config: Any) -> Any:
    """Build the train dataset as a trainer does."""
    folder = Path(config.log_path)
    for name in ("config.json", "logs.log"):
        (folder / name).touch()
    return asyncio.run(config.dataset_builder())[0]


def play(config: Any, group: Any, policy: Words) -> TrajectoryGroup:
    strategy = config.effective_rollout_strategy()
    return asyncio.run(do_group_rollout(group, policy, strategy))


def play_some(run: Path, *groups: int, step: int = 0, **changes: Any) -> list[TrajectoryGroup]:
    """Begin a run, finish some groups of a step, and leave the rest."""
    config = resume(config_of(run, **changes), step)
    batch = dataset_of(config).get_batch(step)
    return [play(config, batch[each], Unsure(LINES[each])) for each in groups]


def save(run: Path, step: int) -> None:
    row = {"name": f"{step:06d}", "state_path": "tinker://x", "batch": step}
    with (run / "checkpoints.jsonl").open("a") as file:
        file.write(json.dumps(row) + "\n")


def list_taken(config: Any) -> list[str]:
    strategy = config.effective_rollout_strategy()
    return sorted(strategy.logs) if isinstance(strategy, UseFinished) else []


@pytest.mark.parametrize(
    "options", [{}, {"group_reward": "rank"}, {"sampler": "curriculum"}], ids=str
)
def test_finished_groups_are_used_again_and_the_others_run(
    options: dict[str, Any], tmp_path: Path
) -> None:
    played = play_some(tmp_path, 0, 2, options={"seed": 3, **options})
    before = records(tmp_path)
    assert len(before) == 6
    config = resume(config_of(tmp_path, options={"seed": 3, **options}), 0)
    assert list_taken(config) == ["by_word/0", "by_word/2"]
    data = dataset_of(config)
    batch = pickle.loads(pickle.dumps(data.get_batch(0)))
    policies = [Unsure(lines) for lines in LINES]
    again = [play(config, *each) for each in zip(batch, policies, strict=True)]
    assert [len(policy.prompts) for policy in policies] == [0, 3, 0], "who was asked"
    assert datums([again[0], again[2]]) == datums(played)
    metrics = [compute_trajectory_metrics([a, b], [[], []]) for a, b in (played, again[::2])]
    assert metrics[0] == metrics[1]
    (log,) = logs_after(tmp_path)
    assert log.status == "success"
    assert sorted(figures(log, "group")) == [0, 0, 0, 1, 1, 1, 2, 2, 2]
    after = records(tmp_path)
    assert {place: after[place] for place in before} == before, "the log has them as they were"


def logs_after(run: Path) -> list[Any]:
    run_in_thread(assemble_pending, run / "rollouts" / "train")
    return logs_in(run / "rollouts" / "train")


def records(run: Path) -> dict[Any, Any]:
    """Return all that the logs have of rollouts, by group and epoch."""
    return {
        (sample.metadata["inspect_rl"]["group"], sample.epoch): sample.model_dump()
        for log in logs_after(run)
        for sample in samples(log)
    }


def test_stopped_again_before_it_is_done_it_still_has_all(tmp_path: Path) -> None:
    first = play_some(tmp_path, 0)
    (second,) = play_some(tmp_path, 1)  # and it never came to the first group
    config = resume(config_of(tmp_path), 0)
    assert list_taken(config) == ["by_word/0", "by_word/1"]
    batch = dataset_of(config).get_batch(0)
    silent = Unsure([])
    again = [play(config, group, silent) for group in batch[:2]]
    assert datums(again) == datums([*first, second])
    play(config, batch[2], Unsure(LINES[2]))
    assert len(logs_after(tmp_path)) == 1


def test_groups_that_have_sampled_nothing_run_again(tmp_path: Path) -> None:
    over_window: dict[str, Any] = {"options": {"context_window": 2}}
    (group,) = play_some(tmp_path, 0, **over_window)
    assert not any(each.ac.tokens for t in group.trajectories_G for each in t.transitions)
    assert list_taken(resume(config_of(tmp_path, **over_window), 0)) == []


@pytest.mark.parametrize(
    "changes",
    [
        {"max_tokens": 17},
        {"options": {"reward": "score:graded_by_word.right"}},
        {"overrides": ("temperature=0.5",)},
        {"group_size": 4},
    ],
    ids=str,
)
def test_with_other_options_all_groups_run(changes: dict[str, Any], tmp_path: Path) -> None:
    play_some(tmp_path, 0, 1)
    assert list_taken(resume(config_of(tmp_path, **changes), 0)) == []
    # Those of the first options are not used either if it has them again: what began last counts.
    assert list_taken(resume(config_of(tmp_path), 0)) == []


def test_with_another_file_of_the_task_all_groups_run(tmp_path: Path) -> None:
    file = tmp_path / "mine.py"
    file.write_text(Path(rollouts.__file__).read_text())
    play_some(tmp_path / "run", 0, task=f"{file}@by_word")
    file.write_text(file.read_text() + "\n# changed\n")
    assert list_taken(resume(config_of(tmp_path / "run", task=f"{file}@by_word"), 0)) == []


def test_only_groups_of_the_checkpoints_weights_are_used(tmp_path: Path) -> None:
    play_some(tmp_path, 0, 1, 2)
    play_some(tmp_path, 0, 1, 2, step=1)
    config = resume(config_of(tmp_path), 0)
    assert len(list_taken(config)) == 3, "those of step 1 were sampled with weights that are lost"
    batch = dataset_of(config).get_batch(1)
    policy = Unsure(LINES[0])
    play(config, batch[0], policy)
    assert policy.prompts
    save(tmp_path, 1)
    assert list_taken(resume(config_of(tmp_path), 1)) == ["by_word/0"]


def test_groups_of_the_test_set_and_of_the_asynchronous_loop_always_run(tmp_path: Path) -> None:
    play_some(tmp_path, 0)
    fast = ("async_config.max_steps_off_policy=1", "async_config.groups_per_batch=3")
    assert list_taken(resume(config_of(tmp_path), 0)) == ["by_word/0"]
    asynchronous = config_of(tmp_path, overrides=fast, rollout_timeout=0)
    assert list_taken(resume(asynchronous, 0)) == []


def test_a_damaged_log_costs_only_its_own_groups(tmp_path: Path) -> None:
    play_some(tmp_path, 0)
    config = resume(config_of(tmp_path), 0)
    (path,) = (tmp_path / "rollouts" / "train").glob("*.eval")
    batch = dataset_of(config).get_batch(0)
    path.write_bytes(b"PK")
    policy = Unsure(LINES[0])
    play(config, batch[0], policy)
    assert len(policy.prompts) == 3
    assert list_taken(resume(config_of(tmp_path), 0)) == ["by_word/0"], "that of the new log"
