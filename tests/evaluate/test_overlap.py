"""What a run was trained on is recorded, and an eval of the same samples says so."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from click.testing import CliRunner
from inspect_ai import Task, eval_async
from inspect_ai.dataset import Sample
from inspect_ai.log import EvalLog, read_eval_log
from inspect_ai.model import GenerateConfig
from inspect_ai.scorer import includes
from tests.evaluate.test_provider import Client, write_run

from inspect_tinker_plugin import as_rl_dataset
from inspect_tinker_plugin.cli.main import rl
from inspect_tinker_plugin.contracts.errors import ConfigError
from inspect_tinker_plugin.contracts.hooks import SampleStage
from inspect_tinker_plugin.evaluate.overlap import (
    IMITATED,
    RecordedDataset,
    TrainingRecord,
    read_trained,
    was_trained_on,
)
from inspect_tinker_plugin.evaluate.provider import connected_model
from inspect_tinker_plugin.evaluate.source import Connection, read_run
from inspect_tinker_plugin.testing.policy import load_renderer

SAMPLES = [
    Sample(input=f"Say {word}.", target=word, id=word, files={"note": f"about {word}"})
    for word in ("plum", "pear", "fig", "kiwi", "lime", "date")
]


def task(*, files: bool = True) -> Task:
    bare = [each.model_copy(update={"files": None}) for each in SAMPLES]
    return Task(dataset=list(SAMPLES) if files else bare, scorer=includes(), name="fruit")


def take(run: Path, batches: range, *, files: bool = True, **options: Any) -> None:
    """Take batches of two samples as a trainer does that begins, or continues, with the first."""
    dataset = as_rl_dataset(task(files=files), load_renderer(), batch_size=2, **options)
    record = TrainingRecord(run, batches.start)
    recorded = RecordedDataset(dataset, record, first_step=batches.start)
    for index in batches:
        assert len(recorded.get_batch(index)) == 2


def ids(run: Path, step: int | None = None) -> list[str | int]:
    return list(read_trained(run, step).values())


def test_steps_count_what_their_weights_have_learned(tmp_path: Path) -> None:
    take(tmp_path, range(3))
    assert ids(tmp_path) == ids(tmp_path, 3) == ["plum", "pear", "fig", "kiwi", "lime", "date"]
    assert ids(tmp_path, 1) == ["plum", "pear"], "the weights after one step"
    assert ids(tmp_path, 0) == [], "the base model"


def test_a_continued_run_forgets_what_was_taken_for_lost_steps(tmp_path: Path) -> None:
    TrainingRecord(tmp_path, IMITATED).add(IMITATED, {"imitated": "x"})
    take(tmp_path, range(3))
    take(tmp_path, range(1, 2))
    assert ids(tmp_path) == ["x", "plum", "pear", "fig", "kiwi"]
    assert ids(tmp_path, 1) == ["x", "plum", "pear"], "what was imitated comes before all steps"


def test_the_record_is_whole_while_a_run_continues(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    take(tmp_path, range(3))
    write, seen = Path.write_text, []

    def write_slowly(path: Path, text: str, **options: Any) -> int:
        write(path, text[:10], **options)
        seen.append(ids(tmp_path, 1))
        return write(path, text, **options)

    monkeypatch.setattr(Path, "write_text", write_slowly)
    take(tmp_path, range(1, 2))
    assert seen == [["plum", "pear"]]


def test_a_trainer_that_takes_batches_ahead_counts_from_the_step_it_is_at(tmp_path: Path) -> None:
    metrics = tmp_path / "metrics.jsonl"
    metrics.write_text('{"step": 7}\n')  # of a step that is lost
    dataset = as_rl_dataset(task(), load_renderer(), batch_size=2)
    record = TrainingRecord(tmp_path, 0)
    recorded = RecordedDataset(dataset, record, metrics=metrics)
    recorded.get_batch(0)
    recorded.get_batch(1)
    assert len(ids(tmp_path, 1)) == 4, "step 0 may train on the second batch"
    with metrics.open("a") as file:
        file.write('{"step": 1}\n')
    recorded.get_batch(2)
    assert len(ids(tmp_path, 1)) == 4


def test_samples_that_plugins_change_are_known_as_they_are_in_the_task(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    stage = SampleStage(
        transform=lambda each: each.model_copy(update={"input": f"Please. {each.input}"})
    )
    plugin: Any = type("Plugin", (), {"name": "p", "label": "p"})()
    monkeypatch.setattr(
        "inspect_tinker_plugin.tasks.samples.sample_stages", lambda task: ((plugin, stage),)
    )
    take(tmp_path, range(1))
    trained = read_trained(tmp_path)
    assert was_trained_on(SAMPLES[0], trained)
    changed = SAMPLES[0].model_copy(update={"input": "Please. Say plum."})
    assert was_trained_on(changed, trained)


async def evaluate(run: Path, folder: Path, *, files: bool = True, step: str = "") -> EvalLog:
    client: Any = Client()
    source = read_run(run, step)
    connection = Connection(source=source, sampler=client, renderer=load_renderer(), window=None)
    model = connected_model(connection, GenerateConfig())
    [log] = await eval_async(task(files=files), model=model, log_dir=str(folder))
    assert log.status == "success", log.error
    return log


async def test_an_eval_of_samples_that_were_trained_on_says_so(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    run = write_run(tmp_path / "run")
    take(run, range(2), limit=4)
    log = await evaluate(run, tmp_path / "logs")
    assert caplog.text.count("was trained on by") == 1, "once per eval"
    assert "'plum' was trained on" in caplog.text
    for each in (log, read_eval_log(log.location), read_eval_log(log.location, header_only=True)):
        assert each.metadata["trained_on"] == {
            "model": f"tinker/{run}@4",
            "samples": 4,
            "ids": ["plum", "pear", "fig", "kiwi"],
        }
    assert len(read_eval_log(log.location).samples or []) == 6


async def test_an_eval_of_other_samples_or_of_earlier_weights_has_no_overlap(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    run = write_run(tmp_path / "run")
    TrainingRecord(run, 0).add(2, read_all(tmp_path / "all"))
    for step in ("0", "2"):
        log = await evaluate(run, tmp_path / "logs", step=step)
        assert "trained_on" not in log.metadata
    assert "was trained on" not in caplog.text
    log = await evaluate(run, tmp_path / "logs", step="4")
    assert log.metadata["trained_on"]["samples"] == 6


def read_all(folder: Path) -> dict[str, str | int]:
    folder.mkdir()
    take(folder, range(3))
    return read_trained(folder)


async def test_a_run_without_a_record_says_so(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    log = await evaluate(write_run(tmp_path / "run"), tmp_path / "logs")
    assert "has no trained.jsonl" in caplog.text
    assert "trained_on" not in log.metadata


@pytest.mark.parametrize("row", [{"step": 1}, {"step": "x", "samples": {}}, {"samples": {"h": 1}}])
def test_a_record_of_another_form_says_nothing(tmp_path: Path, row: dict[str, Any]) -> None:
    take(tmp_path, range(1))
    with (tmp_path / "trained.jsonl").open("a") as file:
        file.write(json.dumps(row) + "\n")
    for read in (read_trained, lambda run: TrainingRecord(run, 1)):
        with pytest.raises(ConfigError, match="no record of what was trained on"):
            read(tmp_path)


def test_the_command_lists_the_overlap_beforehand(tmp_path: Path) -> None:
    file = tmp_path / "fruit.py"
    file.write_text(
        "from inspect_ai import Task, task\n"
        "from inspect_ai.dataset import Sample\n"
        "@task\n"
        "def fruit(first: str = 'plum', named: bool = True):\n"
        "    return Task(dataset=[Sample(input=f'Say {w}.', target=w, id=w if named else None,\n"
        "        files={'note': f'about {w}'}) for w in (first, 'melon')])\n"
    )
    run = write_run(tmp_path / "run")

    def invoke(*words: str) -> Any:
        return CliRunner().invoke(rl, ["overlap", *words])

    lacking = invoke(str(run), f"{file}@fruit")
    assert lacking.exit_code == 1
    assert "has no trained.jsonl" in lacking.output
    take(run, range(3))
    found = invoke(str(run), f"{file}@fruit")
    assert found.exit_code == 3, found.output
    assert found.stdout == "plum\n"
    assert "1 of 2 samples of fruit" in found.stderr
    said = json.loads(invoke(f"{run}@2", f"{file}@fruit", "--json").stdout)
    assert said == {
        "run": str(run),
        "step": 2,
        "task": "fruit",
        "samples": 2,
        "trained_on": 1,
        "ids": ["plum"],
    }
    assert invoke(str(run), f"{file}@fruit", "-T", "named=false").stdout == "1\n"
    none = invoke(str(run), f"{file}@fruit", "-T", "first=apple")
    assert (none.exit_code, none.stdout) == (0, "")
    other = invoke("Qwen/Qwen3-8B", f"{file}@fruit")
    assert other.exit_code == 1
    assert "is not the folder of a run" in other.output
