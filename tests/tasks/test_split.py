"""Held-out samples stay held out, whatever their ids are."""

from __future__ import annotations

import pytest
from inspect_ai.dataset import MemoryDataset, Sample
from inspect_ai.model import ChatMessageUser

from inspect_tinker_plugin.contracts.errors import ConfigError
from inspect_tinker_plugin.tasks.samples import held_out, sample_hash
from inspect_tinker_plugin.train.data import check_overlap, split_samples


def numbered(size: int) -> list[Sample]:
    return [Sample(id=i, input=f"question {i}", target=str(i)) for i in range(size)]


def test_the_hash_looks_at_the_question_and_not_at_its_id() -> None:
    first = Sample(id=1, input="a", target="b", metadata={"source": 1})
    assert sample_hash(first) == sample_hash(Sample(id=2, input="a", target="b"))
    assert sample_hash(first) != sample_hash(Sample(id=1, input="a", target="c"))
    assert sample_hash(first) != sample_hash(Sample(id=1, input="a", target="b", choices=["b"]))


def test_messages_with_ids_of_their_own_are_the_same_question() -> None:
    one = Sample(input=[ChatMessageUser(content="a", id="x")])
    other = Sample(input=[ChatMessageUser(content="a", id="y")])
    assert sample_hash(one) == sample_hash(other)


@pytest.mark.parametrize(
    ("share", "count"), [("0.1", 10), ("10%", 10), ("7", 7), ("0.001", 1), (" 25% ", 25)]
)
def test_a_share_is_a_fraction_a_percentage_or_a_number(share: str, count: int) -> None:
    assert held_out(share, 100) == count


@pytest.mark.parametrize("share", ["1.5", "0.0", "100", "100%", "0", "-3", "some", "", "nan"])
def test_other_shares_are_refused(share: str) -> None:
    with pytest.raises(ConfigError, match="test split"):
        held_out(share, 100)


def test_both_sides_together_are_the_dataset_and_stay_the_same() -> None:
    samples = numbered(40)
    split = split_samples(samples, "0.25")
    assert len(split.test) == 10
    assert sorted([*split.train, *split.test], key=int) == list(range(40))
    assert split == split_samples(samples, "0.25")
    assert split != split_samples(samples, "0.25", seed=1)


def test_samples_with_the_same_content_are_on_the_same_side() -> None:
    samples = [Sample(id=i, input=f"question {i % 10}") for i in range(40)]
    split = split_samples(samples, "10")
    of = {sample.id: sample.input for sample in samples}
    assert not {of[i] for i in split.train} & {of[i] for i in split.test}


def choices(seed: int) -> MemoryDataset:
    samples = [
        Sample(id=i, input=f"question {i}", choices=["yes", "no", f"{i}"], target="C")
        for i in range(40)
    ]
    dataset = MemoryDataset(samples)
    dataset.shuffle_choices(seed)
    return dataset


def test_a_task_that_shuffles_choices_when_it_is_loaded_holds_out_the_same_samples() -> None:
    first, again = choices(1), choices(2)
    assert [each.choices for each in first] != [each.choices for each in again]
    assert split_samples(first, "10%") == split_samples(again, "10%")
    with pytest.raises(ConfigError, match="40 of 40 test samples"):
        check_overlap(first, again)


def test_another_right_choice_is_another_question() -> None:
    one, other = (Sample(input="?", choices=["a", "b"], target=letter) for letter in "AB")
    assert sample_hash(one) != sample_hash(other)


def test_a_dataset_of_one_question_cannot_be_split() -> None:
    with pytest.raises(ConfigError, match="same content"):
        split_samples([Sample(id=i, input="same") for i in range(5)], "1")


def test_an_overlap_is_refused_and_named() -> None:
    test = [Sample(id="t1", input="question 3", target="3"), Sample(id="t2", input="new")]
    with pytest.raises(ConfigError, match=r"1 of 2 test samples.*'t1' = 3.*--allow-overlap"):
        check_overlap(numbered(5), test)
    check_overlap(numbered(3), test)
