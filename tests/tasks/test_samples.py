"""One choice of samples everywhere: those of an eval, without those that plugins drop."""

from __future__ import annotations

import json
import tracemalloc
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
from click.testing import CliRunner
from inspect_ai import Task, eval_async
from inspect_ai.dataset import MemoryDataset, Sample
from inspect_ai.scorer import match
from inspect_ai.solver import generate
from tests.rl.policies import renderer

from inspect_tinker_plugin import InspectRLDatasetBuilder, as_rl_dataset
from inspect_tinker_plugin.cli.main import rl
from inspect_tinker_plugin.contracts.errors import ConfigError, TaskError
from inspect_tinker_plugin.options import Selection
from inspect_tinker_plugin.tasks.samples import select_samples
from inspect_tinker_plugin.testing import scripted_model, tokenizer_path
from inspect_tinker_plugin.train.data import TrainingDataBuilder

IDS: list[str | int] = ["easy-1", "easy-2", "hard-1", 7, "008", "q[1]", "letters:a"]


def task(ids: Sequence[str | int | None] = IDS, **options: Any) -> Task:
    samples = [Sample(id=id, input=f"{n}?", target="x") for n, id in enumerate(ids)]
    return Task(name="letters", dataset=samples, solver=generate(), scorer=match(), **options)


@pytest.mark.parametrize(
    "choice",
    [
        {},
        {"limit": 2},
        {"limit": (2, 4)},
        {"limit": (4, 99)},
        {"limit": 99},
        {"sample_id": "easy-*"},
        {"sample_id": ["hard-1", "easy-1"]},
        {"sample_id": ["7"]},
        {"sample_id": 8},
        {"sample_id": ["*8", "easy-?"]},
        {"sample_id": "letters:hard-1"},
        {"sample_id": "LETTERS:7"},
        {"sample_shuffle": 3},
        {"sample_shuffle": 3, "limit": 2},
        {"sample_shuffle": 0, "limit": 2},
        {"sample_shuffle": False},
    ],
    ids=str,
)
async def test_the_samples_are_those_of_an_eval(choice: dict[str, Any], tmp_path: Path) -> None:
    [log] = await eval_async(
        task(),
        model=scripted_model(lambda request: "x"),
        log_dir=str(tmp_path),
        max_samples=1,
        **choice,
    )
    assert log.samples is not None
    chosen = [sample.id for sample in select_samples(task(), Selection(**choice))]
    order = {sample.id: n for n, sample in enumerate(log.samples)}
    assert sorted(chosen, key=str) == sorted(order, key=str)
    if "sample_shuffle" not in choice:
        assert chosen == [id for id in IDS if id in order]


async def test_samples_without_ids_are_numbered_as_in_an_eval(tmp_path: Path) -> None:
    [log] = await eval_async(
        task([None, "b", None]),
        model=scripted_model(lambda request: "x"),
        log_dir=str(tmp_path),
        limit=(1, 3),
    )
    assert log.samples is not None
    chosen = select_samples(task([None, "b", None]), Selection(limit=(1, 3)))
    assert [sample.id for sample in chosen] == ["b", 3]
    assert {(s.id, s.input) for s in log.samples} == {(s.id, s.input) for s in chosen}


@pytest.mark.parametrize("id", ["²", "q[1]"], ids=["superscript is no number", "no own match"])
def test_an_id_is_taken_literally(id: str) -> None:
    [sample] = select_samples(task([*IDS, "²"]), Selection(sample_id=id))
    assert sample.id == id


@pytest.mark.parametrize(
    ("choice", "says"),
    [
        ({"limit": 0}, "limit must be"),
        ({"limit": (3, 3)}, "leaves no sample"),
        ({"limit": (50, 60)}, "limit 51-60 leaves no sample: task 'letters' has 7"),
        ({"sample_id": "none-*"}, r"no sample has the id none-\* \(the first ids are easy-1"),
        ({"sample_id": []}, "sample_id is empty"),
        ({"sample_ids": ["easy-1"], "limit": 1}, "exclude each other"),
        ({"sample_id": "easy-1", "sample_shuffle": True}, "exclude each other"),
        ({"sample_id": "easy-1", "sample_ids": ["easy-1"]}, "exclude each other"),
    ],
    ids=str,
)
def test_what_chooses_nothing_is_one_clear_line(choice: dict[str, Any], says: str) -> None:
    with pytest.raises(ConfigError, match=says):
        select_samples(task(), Selection(**choice))
    with pytest.raises(ConfigError, match=says):
        as_rl_dataset(task(), renderer(), **choice)


def test_a_shuffled_dataset_stays_as_it_is_as_in_an_eval() -> None:
    shuffled = task()
    shuffled.dataset.shuffle(1)
    order = [sample.id for sample in shuffled.dataset]
    assert [s.id for s in select_samples(shuffled, Selection(sample_shuffle=2))] == order


@pytest.mark.slow
def test_choosing_among_many_samples_copies_none() -> None:
    sample = Sample(input="?", target="x" * 1000)
    many = Task(dataset=MemoryDataset([sample] * 300_000), scorer=match())
    tracemalloc.start()
    chosen = select_samples(many, Selection(limit=(10, 250_000), sample_shuffle=4))
    rows = chosen.subset(range(0, len(chosen), 2))[:100_000]
    peak = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    assert len(rows) == 100_000
    assert peak < 12_000_000, "positions only: a few bytes per sample"


# A plugin (acme-tools, installed for the tests) drops questions of more than three words, and
# shouts the others.

PLUGIN_TASK = """
from inspect_ai import Task, task
from inspect_ai.dataset import Sample
from inspect_ai.scorer import match
from inspect_ai.solver import generate

@task
def filtered():
    questions = ["one two three four five", "short one", "a b c d e f", "short two", "short three"]
    return Task(
        dataset=[Sample(id=f"s{n}", input=text, target="x") for n, text in enumerate(questions)],
        solver=generate(), scorer=match(), metadata={"acme_max_words": 3},
    )
"""
LEFT = {"s1": "SHORT ONE", "s3": "SHORT TWO", "s4": "SHORT THREE"}


@pytest.fixture
def filtered(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> str:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "filtered.py").write_text(PLUGIN_TASK)
    return "filtered.py@filtered"


def seen(dataset: Any) -> dict[Any, Any]:
    builders = [each for batch in range(len(dataset)) for each in dataset.get_batch(batch)]
    return {each.sample.id: each.sample.input for each in builders}


def test_a_dataset_has_what_plugins_leave(filtered: str) -> None:
    assert seen(as_rl_dataset(filtered, renderer())) == LEFT
    assert list(seen(as_rl_dataset(filtered, renderer(), limit=2))) == ["s1", "s3"]
    assert list(seen(as_rl_dataset(filtered, renderer(), limit=(1, 2)))) == ["s3"]
    assert list(seen(as_rl_dataset(filtered, renderer(), sample_id="s[34]"))) == ["s3", "s4"]
    with pytest.raises(ConfigError, match="no sample has the id s0"):
        as_rl_dataset(filtered, renderer(), sample_id="s0")


@pytest.mark.parametrize("make", [InspectRLDatasetBuilder, TrainingDataBuilder])
async def test_builders_have_what_plugins_leave(make: Any, filtered: str) -> None:
    fields = {"model_name": str(tokenizer_path()), "renderer_name": "qwen3_instruct"}
    train, _ = await make(task=filtered, **fields)()
    assert seen(train) == LEFT
    train, _ = await make(task=filtered, limit=(1, 3), **fields)()
    assert sorted(seen(train)) == ["s3", "s4"]


async def test_a_split_is_made_of_what_plugins_leave(filtered: str) -> None:
    builder: Any = TrainingDataBuilder
    train, test = await builder(
        task=filtered,
        model_name=str(tokenizer_path()),
        renderer_name="qwen3_instruct",
        test_split="1",
    )()
    assert {**seen(train), **seen(test)} == LEFT
    assert len(seen(test)) == 1


def run(*args: str) -> Any:
    result = CliRunner().invoke(rl, list(args))
    assert result.exit_code == 0, result.output
    return result


SELECTIONS = [
    ([], ["s1", "s3", "s4"]),
    (["--limit", "2"], ["s1", "s3"]),
    (["--limit", "2-3"], ["s3", "s4"]),
    (["--sample-id", "s4,s1"], ["s1", "s4"]),
    (["--sample-id", "s[13]"], ["s1", "s3"]),
    (["--sample-shuffle", "5", "--limit", "2"], None),
]


@pytest.mark.parametrize(("flags", "ids"), SELECTIONS, ids=lambda each: " ".join(each or []))
def test_commands_have_what_plugins_leave(
    flags: list[str], ids: list[str] | None, filtered: str
) -> None:
    run("export", filtered, "--output", "out", "--format", "jsonl", *flags)
    [file] = Path("out").glob("**/*.jsonl")
    rows = [json.loads(line) for line in file.read_text().splitlines()]
    exported = {row["id"]: row["prompt"][-1]["content"] for row in rows}
    assert exported == {id: LEFT[id] for id in exported}

    all_of_them = flags or ["--limit", "99"]
    rolled = run("rollout", filtered, "--json", "--group-size", "1", *all_of_them).stdout
    reports = [json.loads(line) for line in rolled.splitlines()]
    assert {each["sample_id"]: each["messages"][0]["content"] for each in reports} == exported

    assert [id for id in ids or exported] == list(exported)
    measured = run("bench", filtered, "--episodes", "1", "--json", *all_of_them).stdout
    costs = json.loads(measured.splitlines()[-1])
    assert [cost["episodes"] for cost in costs] == [len(exported)] * 2


def test_a_check_has_what_plugins_leave(filtered: str) -> None:
    flags = ("--side", "messages", "--sample-id", "s[13]", "--json")
    lines = run("check", filtered, *flags).stdout.splitlines()
    reports = [json.loads(line) for line in lines if line.startswith("{")]
    assert [(each["sample_id"], each["agrees"]) for each in reports] == [("s1", True), ("s3", True)]


def test_a_task_whose_samples_are_all_dropped_is_an_error() -> None:
    long = Task(
        name="long",
        dataset=[Sample(input="one two three four", target="x")],
        scorer=match(),
        metadata={"acme_max_words": 3},
    )
    with pytest.raises(TaskError, match="plugins drop every sample of task 'long'"):
        as_rl_dataset(long, renderer())
