from __future__ import annotations

import asyncio
import gc
import json
import logging
import os
import pickle
import subprocess
import sys
from collections.abc import Callable
from concurrent.futures import ProcessPoolExecutor
from functools import cached_property
from pathlib import Path
from typing import Any

import pytest
from inspect_ai.log import list_eval_logs
from tests.commands import forking
from tests.logs.rollouts import (
    dataset,
    die_while_assembling,
    die_while_writing,
    figures,
    logs_in,
    only_log,
    rewards,
    roll_out,
    samples,
)
from tests.rl import tasks
from tests.rl.policies import TOKENIZER, Words
from tests.rl.tasks import arithmetic
from tinker_cookbook.completers import StopCondition, TokensWithLogprobs
from tinker_cookbook.rl.rollouts import do_group_rollout

from inspect_tinker_plugin.contracts.errors import ConfigError
from inspect_tinker_plugin.logs import assemble_pending, writer
from inspect_tinker_plugin.logs.staging import STAGING, runs_in
from inspect_tinker_plugin.rl.dataset import InspectRLDataset
from inspect_tinker_plugin.train.data import TrainingDataBuilder


class Silent(Words):
    """A sampler that never answers."""

    async def __call__(
        self, model_input: Any, stop: StopCondition, *, max_tokens: int | None = None
    ) -> TokensWithLogprobs:
        self.asked.set()
        return await asyncio.Future()

    @cached_property
    def asked(self) -> asyncio.Event:
        return asyncio.Event()


def in_a_process(work: Callable[..., Any], *arguments: Any) -> int | None:
    process = forking().Process(target=work, args=arguments)
    process.start()
    process.join()  # a test that hangs is ended by pytest
    return process.exitcode


def forget(data: InspectRLDataset) -> None:
    """Leave a dataset's run as a killed process does: unlocked, with everything it holds."""
    writer._owned.pop(data.handle.uid).release()


async def roll_out_batch(data: InspectRLDataset, index: int, words: str = "1") -> None:
    await asyncio.gather(*[do_group_rollout(b, Words([words])) for b in data.get_batch(index)])


@pytest.mark.forks
@pytest.mark.slow
def test_groups_of_one_batch_meet_from_several_processes(tmp_path: Path) -> None:
    data = dataset(arithmetic(4), tmp_path, batch_size=4, group_size=2)
    with ProcessPoolExecutor(2, mp_context=forking()) as pool:
        got = [pool.submit(roll_out, b, ["1"]) for b in data.get_batch(0)]
        totals = [future.result() for future in got]
    log = only_log(tmp_path)
    assert log.status == "success"
    assert {(sample.id, sample.epoch) for sample in samples(log)} == {
        (f"s{i}", epoch) for i in range(4) for epoch in (1, 2)
    }
    assert sum(rewards(log)) == sum(map(sum, totals)) == 2.0
    assert log.eval.dataset.samples == 4


@pytest.mark.forks
def test_a_worker_killed_while_it_writes_leaves_no_half_log_and_loses_no_other_group(
    tmp_path: Path,
) -> None:
    data = dataset(arithmetic(2), tmp_path, batch_size=2)
    first, second = data.get_batch(0)
    assert roll_out(first, ["1"]) == [1.0]
    assert in_a_process(die_while_writing, second, ["2"]) == -9
    assert list(tmp_path.glob("*.eval")) == []
    (location,) = assemble_pending(tmp_path)
    log = only_log(tmp_path)
    assert location.name in log.location
    assert log.status == "cancelled"
    assert (log.metadata["groups"], log.metadata["groups_logged"]) == (2, 1)
    assert [sample.id for sample in samples(log)] == ["s0"]


@pytest.mark.forks
def test_a_worker_killed_while_it_makes_a_log_doubles_nothing(tmp_path: Path) -> None:
    data = dataset(arithmetic(1), tmp_path)
    assert in_a_process(die_while_assembling, data.get_batch(0)[0], ["1"]) == -9
    before = list(tmp_path.glob("*.eval"))
    assert len(before) == 1
    assert assemble_pending(tmp_path) == before
    assert rewards(only_log(tmp_path)) == [1.0]
    assert assemble_pending(tmp_path) == []


async def test_what_a_killed_training_left_is_finished_by_the_next_one(tmp_path: Path) -> None:
    data = dataset(arithmetic(2), tmp_path, batch_size=2)
    await do_group_rollout(data.get_batch(0)[0], Words(["1"]))
    forget(data)
    dataset(arithmetic(2), tmp_path)
    assemble_pending(tmp_path)
    assert [sample.id for sample in samples(only_log(tmp_path))] == ["s0"]


async def test_what_a_dropped_dataset_left_is_finished_by_one_with_another_folder(
    tmp_path: Path,
) -> None:
    data = dataset(arithmetic(2), tmp_path / "first", batch_size=2)
    await do_group_rollout(data.get_batch(0)[0], Words(["1"]))
    del data
    gc.collect()
    dataset(arithmetic(2), tmp_path / "second")
    assemble_pending(tmp_path / "second")
    assert [sample.id for sample in samples(only_log(tmp_path / "first"))] == ["s0"]
    assert not (tmp_path / "first" / STAGING).exists()


@pytest.mark.forks
async def test_a_living_run_of_another_process_is_left_alone(tmp_path: Path) -> None:
    data = dataset(arithmetic(2), tmp_path, batch_size=2)
    await do_group_rollout(data.get_batch(0)[0], Words(["1"]))
    with ProcessPoolExecutor(1, mp_context=forking()) as pool:
        assert await asyncio.wrap_future(pool.submit(assemble_pending, tmp_path)) == []
    await do_group_rollout(data.get_batch(0)[1], Words(["2"]))
    assemble_pending(tmp_path)
    assert only_log(tmp_path).status == "success"


async def test_a_batch_that_is_visited_again_has_a_log_for_each_attempt(tmp_path: Path) -> None:
    data = dataset(arithmetic(2), tmp_path, batch_size=2)
    builders = data.get_batch(0)
    for _ in range(2):  # an evaluator keeps its builders
        for builder in builders:
            await do_group_rollout(builder, Words(["1"]))
    await roll_out_batch(data, 0)
    assemble_pending(tmp_path)
    assert sorted(log.metadata["visit"] for log in logs_in(tmp_path)) == [1, 2, 3]
    assert [len(samples(log)) for log in logs_in(tmp_path)] == [2, 2, 2]


async def test_logs_are_listed_in_the_order_of_training(tmp_path: Path) -> None:
    data = dataset(arithmetic(12), tmp_path)
    for index in range(12):
        await roll_out_batch(data, index)
    assemble_pending(tmp_path)
    listed = sorted(Path(info.name).name for info in list_eval_logs(str(tmp_path)))
    assert [f"batch-{i:06d}" in name for i, name in enumerate(listed)] == [True] * 12
    assert [log.metadata["policy_step"] for log in logs_in(tmp_path)] == list(range(12))


def resumed_from(folder: Path, step: int) -> None:
    """Leave the checkpoints of a training that was saved after so many steps."""
    rows = [{"name": "x", "state_path": "tinker://x", "batch": n} for n in (1, step)]
    lines = [json.dumps(row) for row in [*rows, {"name": "final", "sampler_path": "y"}]]
    (folder / "checkpoints.jsonl").write_text("\n".join(lines))


async def built(folder: Path, **options: Any) -> tuple[Any, Any]:
    builder: Any = TrainingDataBuilder
    return await builder(  # type: ignore[no-any-return]  # chz hides it
        task=f"{tasks.__file__}@arithmetic",
        task_args={"count": 3 if "test_split" in options else 2},
        model_name=str(TOKENIZER),
        renderer_name="qwen3_instruct",
        log_dir=str(folder / "rollouts"),
        **options,
    )()


def steps_in(folder: Path) -> list[Any]:
    assemble_pending(folder)
    logs = sorted(logs_in(folder), key=lambda log: log.eval.created)
    return [log.metadata["policy_step"] for log in logs]


@pytest.mark.parametrize("resumed", [0, 2, 5])
async def test_a_resumed_run_goes_on_with_the_steps_of_its_trainer(
    resumed: int, tmp_path: Path
) -> None:
    if resumed:
        resumed_from(tmp_path, resumed)
    data, _ = await built(tmp_path)
    assert len(data) == 2
    for step in range(resumed, resumed + 5):  # as the cookbook does with num_epochs
        await roll_out_batch(data, step % len(data))
    assert steps_in(tmp_path / "rollouts" / "train") == [*range(resumed, resumed + 5)]


def begun_by_a_trainer(folder: Path) -> None:
    """Leave what the cookbook writes before it asks for a dataset."""
    folder.mkdir(exist_ok=True)
    for name in ("config.json", "logs.log"):
        (folder / name).touch()


async def left_by_a_killed_run(folder: Path, steps: int, checkpoint: int) -> Path:
    begun_by_a_trainer(folder)
    data, _ = await built(folder)
    for step in range(steps):
        await roll_out_batch(data, step % len(data))
    train = folder / "rollouts" / "train"
    assert steps_in(train) == [*range(steps)]
    if checkpoint:
        resumed_from(folder, checkpoint)
    return train


@pytest.mark.parametrize("checkpoint", [0, 2], ids=["before the first checkpoint", "after it"])
async def test_a_step_that_is_repeated_after_a_kill_has_one_log(
    checkpoint: int, tmp_path: Path
) -> None:
    train = await left_by_a_killed_run(tmp_path, steps=4, checkpoint=checkpoint)
    before = {log.eval.run_id for log in logs_in(train)}
    again, _ = await built(tmp_path)
    assert steps_in(train) == [*range(checkpoint + 1)], "the weights know nothing of later steps"
    for step in range(checkpoint, 5):
        await roll_out_batch(again, step % 2)
    assert sorted(steps_in(train)) == [0, 1, 2, 3, 4]
    kept = {log.metadata["policy_step"]: log.eval.run_id in before for log in logs_in(train)}
    assert kept == {step: step < checkpoint for step in range(5)}


async def test_logs_of_other_trainings_and_foreign_files_are_left_alone(tmp_path: Path) -> None:
    other = await left_by_a_killed_run(tmp_path / "other", steps=1, checkpoint=0)
    train = await left_by_a_killed_run(tmp_path / "run", steps=2, checkpoint=0)
    mine = {path.name for path in train.glob("*.eval")}
    plain = tmp_path / "plain"
    await roll_out_batch(dataset(arithmetic(1), plain), 0)
    assemble_pending(plain)
    for path in [*other.glob("*.eval"), *plain.glob("*.eval")]:
        path.rename(train / path.name)
    (train / "2026-01-31T12-00-00-00-00_arithmetic-batch-000000_damaged.eval").write_bytes(b"PK")
    (train / "notes.txt").write_text("mine")
    foreign = {path.name for path in train.iterdir() if path.is_file()} - mine
    assert len(foreign) == 4
    again, _ = await built(tmp_path / "run")
    await roll_out_batch(again, 0)
    assemble_pending(train)
    left = {path.name for path in train.iterdir() if path.is_file()}
    assert left > foreign
    assert len(left - foreign) == 1
    assert not left & mine


async def test_a_worker_that_outlives_its_trainer_leaves_no_second_log(tmp_path: Path) -> None:
    begun_by_a_trainer(tmp_path)
    data, _ = await built(tmp_path)
    late = pickle.dumps(data.get_batch(0)[0])
    del data
    train = tmp_path / "rollouts" / "train"
    again, _ = await built(tmp_path)
    await roll_out_batch(again, 0)
    assert steps_in(train) == [0]
    await asyncio.to_thread(roll_out, pickle.loads(late), ["1"] * 4)
    assert steps_in(train) == [0]
    assert len(logs_in(train)) == 1


async def test_an_evaluation_of_the_checkpoint_is_kept_until_it_is_done_again(
    tmp_path: Path,
) -> None:
    begun_by_a_trainer(tmp_path)
    options = {"test_split": "1", "eval_every": 2}
    _, data = await built(tmp_path, **options)
    for _ in range(3):  # before the steps 0, 2 and 4
        await roll_out_batch(data, 0)
    test = tmp_path / "rollouts" / "test"
    assert steps_in(test) == [0, 2, 4]
    first = {log.eval.run_id for log in logs_in(test)}
    resumed_from(tmp_path, 2)
    _, again = await built(tmp_path, **options)
    assert steps_in(test) == [0, 2]
    await roll_out_batch(again, 0)
    assert steps_in(test) == [0, 2]
    assert len({log.eval.run_id for log in logs_in(test)} - first) == 1


@pytest.mark.parametrize(
    ("resumed", "every", "steps"),
    [(0, 5, [0, 5, 10]), (7, 5, [10, 15, 20]), (10, 5, [10, 15, 20]), (0, 0, [None] * 3)],
)
async def test_a_log_of_a_test_set_names_the_step_that_it_was_measured_at(
    resumed: int, every: int, steps: list[Any], tmp_path: Path
) -> None:
    if resumed:
        resumed_from(tmp_path, resumed)
    _, data = await built(tmp_path, test_split="1", eval_every=every)
    for _ in steps:
        await roll_out_batch(data, 0)
    assert steps_in(tmp_path / "rollouts" / "test") == steps


async def test_a_damaged_part_costs_only_itself(tmp_path: Path) -> None:
    data = dataset(arithmetic(2), tmp_path, batch_size=2)
    await do_group_rollout(data.get_batch(0)[0], Words(["1"]))
    (run,) = runs_in(tmp_path)
    (part,) = run.attempts()[0].parts()
    part.write_bytes(b"not a log")
    await do_group_rollout(data.get_batch(0)[1], Words(["2"]))
    assemble_pending(tmp_path)
    log = only_log(tmp_path)
    assert [sample.id for sample in samples(log)] == ["s1"]
    assert log.status == "cancelled"
    assert sum(name.endswith(".damaged") for name in os.listdir(tmp_path)) == 1


@pytest.mark.parametrize(
    ("place", "says"),
    [
        ("file/below", "log_dir .* cannot be written"),
        ("file", "log_dir .* cannot be written"),
        ("s3://bucket/logs", "remote"),
    ],
)
def test_a_folder_that_cannot_be_written_is_found_when_the_dataset_is_built(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, place: Any, says: str
) -> None:
    monkeypatch.chdir(tmp_path)
    Path("file").touch()
    with pytest.raises(ConfigError, match=says) as raised:
        dataset(arithmetic(1), place)
    assert "\n" not in str(raised.value)


async def test_logs_that_cannot_be_written_change_no_reward_and_warn_once(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    data = dataset(arithmetic(2), tmp_path)
    assemble_pending(tmp_path)
    (tmp_path / STAGING).rename(tmp_path / "elsewhere")
    (tmp_path / STAGING).touch()  # nothing can be staged below a file
    with caplog.at_level(logging.WARNING):
        for index, words in enumerate(["1", "2"]):
            group = await do_group_rollout(data.get_batch(index)[0], Words([words]))
            assert group.get_total_rewards() == [1.0]
    warnings = [r for r in caplog.records if "cannot be written" in r.getMessage()]
    assert len(warnings) == 1
    assert str(tmp_path) in warnings[0].getMessage()


@pytest.mark.nightly
def test_a_script_that_ends_right_after_its_last_rollout_has_its_log(tmp_path: Path) -> None:
    code = f"""
from pathlib import Path
from tests.logs.rollouts import dataset, roll_out
from tests.rl.tasks import arithmetic

roll_out(dataset(arithmetic(1), Path({str(tmp_path)!r})).get_batch(0)[0], ["1"])
"""
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(sys.path)}
    subprocess.run([sys.executable, "-c", code], check=True, env=environment, timeout=120)
    assert rewards(only_log(tmp_path)) == [1.0]
    assert [path.suffix for path in tmp_path.iterdir()] == [".eval"]


async def test_a_cancelled_group_is_written_all_the_same(tmp_path: Path) -> None:
    (builder,) = dataset(arithmetic(1), tmp_path, group_size=2).get_batch(0)
    policy = Silent([])
    rollout = asyncio.create_task(do_group_rollout(builder, policy))
    await policy.asked.wait()
    rollout.cancel()
    with pytest.raises(asyncio.CancelledError):
        await rollout
    assemble_pending(tmp_path)
    log = only_log(tmp_path)
    assert figures(log, "status") == ["cut", "cut"]
    assert all(sample.error is not None for sample in samples(log))
