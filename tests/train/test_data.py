"""The builder of a run's datasets: enough batches, and held-out samples are not trained on."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from inspect_tinker_plugin.contracts.errors import ConfigError
from inspect_tinker_plugin.rl.dataset import InspectRLDataset
from inspect_tinker_plugin.rl.mixture import InspectRLMixture
from inspect_tinker_plugin.testing import tokenizer_path
from inspect_tinker_plugin.train.data import TrainingDataBuilder

TOY = str(Path(__file__).parents[2] / "example_tasks" / "toy.py")


def builder(**fields: Any) -> TrainingDataBuilder:
    new: Any = TrainingDataBuilder
    made: TrainingDataBuilder = new(
        task=f"{TOY}@letters",
        model_name=str(tokenizer_path()),
        renderer_name="qwen3_instruct",
        batch_size=4,
        **fields,
    )
    return made


async def built(**fields: Any) -> tuple[InspectRLDataset, InspectRLDataset | None]:
    train, test = await builder(**fields)()
    assert isinstance(train, InspectRLDataset)
    assert test is None or isinstance(test, InspectRLDataset)
    return train, test


def inputs(dataset: InspectRLDataset) -> list[object]:
    return [each.sample.input for i in range(len(dataset)) for each in dataset.get_batch(i)]


async def test_a_small_dataset_is_gone_through_again_for_the_steps_that_are_asked_for() -> None:
    train, _ = await built(limit=10, min_batches=20)
    assert len(train) == 21  # seven passes of three batches
    assert len(set(map(str, inputs(train)))) == 10


async def test_a_split_holds_samples_out_of_every_pass() -> None:
    train, test = await built(limit=20, test_split="5", min_batches=12)
    assert test is not None
    assert len(test) == 1, "one batch, so that an evaluation is one log"
    assert len(inputs(test)) == 5
    assert not set(map(str, inputs(train))) & set(map(str, inputs(test)))
    assert len(set(map(str, inputs(train)))) == 15


async def test_test_samples_limits_what_is_measured_and_not_what_is_held_out() -> None:
    train, test = await built(limit=20, test_split="5", test_samples=2)
    assert test is not None
    assert len(inputs(test)) == 2
    assert len(inputs(train)) == 15


async def test_a_test_task_with_training_samples_is_refused_unless_allowed() -> None:
    test_task = {"test_task": f"{TOY}@letters", "test_samples": 3}
    with pytest.raises(ConfigError, match="3 of 3 test samples are also trained on"):
        await built(**test_task)
    _, test = await built(**test_task, allow_overlap=True)
    assert test is not None
    assert test.handle.name == "letters"


async def test_a_test_task_of_other_samples_is_accepted() -> None:
    _, test = await built(
        test_task=f"{TOY}@letters", test_task_args={"allowed": "xyz", "samples": 6}
    )
    assert test is not None
    assert len(inputs(test)) == 6


async def test_a_split_and_a_test_task_exclude_each_other() -> None:
    with pytest.raises(ConfigError, match="exclude each other"):
        await built(test_split="5", test_task=f"{TOY}@letters")


BOXES = str(Path(__file__).parents[1] / "rl" / "tasks.py")


async def test_several_tasks_are_mixed_and_a_part_of_each_is_held_out() -> None:
    new: Any = TrainingDataBuilder
    made: TrainingDataBuilder = new(
        task=[f"{TOY}@letters", f"{BOXES}@arithmetic"],
        mix=[3, 1],
        model_name=str(tokenizer_path()),
        renderer_name="qwen3_instruct",
        batch_size=4,
        task_args={"letters.samples": 20, "arithmetic.count": 10},
        test_split="20%",
        min_batches=30,
    )
    assert made.check() == 30
    train, test = await made()
    assert isinstance(train, InspectRLMixture)
    assert isinstance(test, InspectRLMixture)
    assert len(train) == 30
    trained = {(g.handle.name, g.sample.id) for i in range(30) for g in train.get_batch(i)}
    tested = [(g.handle.name, g.sample.id) for g in test.get_batch(0)]
    assert len(test) == 1
    assert not trained & set(tested)
    assert sorted(name for name, _ in tested) == ["arithmetic"] * 2 + ["letters"] * 4
    assert len(trained) == 24


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"mix": [1, 2, 3]}, "mix has 3 shares for 2 tasks"),
        ({"task_args": {"letter.samples": 3}}, "for a task 'letter', and the tasks are letters, a"),
    ],
    ids=["shares", "argument"],
)
def test_a_wrong_mixture_is_refused_before_anything_starts(
    fields: dict[str, Any], message: str
) -> None:
    new: Any = TrainingDataBuilder
    made: TrainingDataBuilder = new(
        task=[f"{TOY}@letters", f"{BOXES}@arithmetic"],
        model_name=str(tokenizer_path()),
        renderer_name="qwen3_instruct",
        **fields,
    )
    with pytest.raises(ConfigError, match=message):
        made.check()


def test_sample_ids_with_a_tasks_name_are_for_that_task() -> None:
    new: Any = TrainingDataBuilder
    made: TrainingDataBuilder = new(
        task=[f"{TOY}@letters", f"{BOXES}@arithmetic"],
        model_name=str(tokenizer_path()),
        renderer_name="qwen3_instruct",
        sample_id=["arithmetic:s1", "arithmetic:s3"],
    )
    letters, arithmetic = made._samples()[0]
    assert len(letters) == 64
    assert [sample.id for sample in arithmetic] == ["s1", "s3"]
