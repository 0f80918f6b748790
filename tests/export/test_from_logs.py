"""Logs as data: which samples become rows, in which splits, and what interrupts or repeats that."""

from __future__ import annotations

import asyncio
import json
import threading
import tracemalloc
import zipfile
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from click.testing import CliRunner
from inspect_ai import Task, score
from inspect_ai.dataset import Sample
from inspect_ai.log import (
    ProvenanceData,
    edit_score,
    read_eval_log,
    read_eval_log_sample_summaries,
    write_eval_log,
)
from inspect_ai.model import ModelUsage
from inspect_ai.scorer import Score, ScoreEdit, Target, accuracy
from inspect_ai.solver import TaskState
from tests.export.logged_runs import (
    adds_and_submits,
    agent,
    as_said,
    evaluated,
    loaded,
    run_export,
    sums,
)
from tests.functions import make_scorer
from tests.logs.rollouts import by_word, dataset, roll_out, run_in_thread

from inspect_tinker_plugin.cli.export import export_command
from inspect_tinker_plugin.contracts.errors import ConfigError, ExportError
from inspect_tinker_plugin.export import folder as export_folder
from inspect_tinker_plugin.export import from_logs
from inspect_tinker_plugin.export.folder import ExportFolder
from inspect_tinker_plugin.export.from_logs import export_logs
from inspect_tinker_plugin.export.layouts import PROMPTS
from inspect_tinker_plugin.export.options import Choice, LogExportOptions
from inspect_tinker_plugin.logs import assemble_pending, index
from inspect_tinker_plugin.logs.index import Entry, find_logs, index_logs, reward_of
from inspect_tinker_plugin.testing.replies import say
from inspect_tinker_plugin.train.data import split_samples

FOUR = ["0.5 a", "1 b", "0 c", "1 d"]
"""What four epochs say, and score."""


def scored(folder: Path, says: list[str] | None = None, count: int = 1) -> Path:
    """A log of samples whose epochs score what they say."""
    said = iter((says or FOUR) * count)
    task = sums(count, scorer=as_said(), epochs=len(says or FOUR))
    evaluated(task, lambda request: next(said), folder, max_samples=1)
    return folder


@pytest.fixture(scope="module")
def four(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Logs of one sample with four epochs."""
    return scored(tmp_path_factory.mktemp("four"))


def replies(rows: list[dict[str, Any]]) -> list[str]:
    return [row["messages"][-1]["content"] for row in rows]


def test_every_run_of_a_sample_is_a_row_to_imitate(tmp_path: Path) -> None:
    logs = tmp_path / "logs"
    evaluated(agent(), adds_and_submits, logs, epochs=2)
    report = run_export(logs, tmp_path / "out")
    rows = loaded(tmp_path / "out")
    assert report.written == len(rows) == 6
    assert {(row["id"], row["epoch"]) for row in rows} == {
        (str(n), e) for n in (1, 2, 3) for e in (1, 2)
    }
    assert {row["model"] for row in rows} == {"scripted/model"}
    assert {row["task"] for row in rows} == {"sums"}
    assert [m["trainable"] for m in rows[0]["messages"]] == [False, False, True, False, True]
    assert [row["reward"] for row in rows if row["id"] == "2"] == [0.0, 0.0]
    assert json.loads(rows[0]["tools"])[0]["function"]["name"] == "add"


@pytest.mark.parametrize(
    ("choice", "said"),
    [
        (Choice(), FOUR),
        (Choice(min_score=0.5), ["0.5 a", "1 b", "1 d"]),
        (Choice(max_score=0.5), ["0.5 a", "0 c"]),
        (Choice(best=1), ["1 b"]),
        (Choice(best=3), ["1 b", "1 d", "0.5 a"]),
        (Choice(form="rejection"), ["1 b", "1 d"]),
        (Choice(form="rejection", best=1), ["1 b"]),
        (Choice(form="rejection", threshold=0.5), ["0.5 a", "1 b", "1 d"]),
        (Choice(form="rewards"), FOUR),
    ],
    ids=str,
)
def test_runs_are_chosen_by_reward(
    choice: Choice, said: list[str], four: Path, tmp_path: Path
) -> None:
    run_export(four, tmp_path / "out", choice)
    assert replies(loaded(tmp_path / "out")) == said


def test_rejection_takes_the_same_words_once(tmp_path: Path) -> None:
    logs = scored(tmp_path / "logs", ["1", "1", "1 other"])
    report = run_export(logs, tmp_path / "out", Choice(form="rejection"))
    assert replies(loaded(tmp_path / "out")) == ["1", "1 other"]
    assert report.left_out == {"the same as another": 1}


@pytest.mark.parametrize(
    ("choice", "pairs"),
    [
        ({}, [("1 b", "0 c")]),
        ({"pairs": 2}, [("1 b", "0 c"), ("1 d", "0.5 a")]),
        (
            {"pairs": 9},
            [("1 b", "0 c"), ("1 d", "0.5 a"), ("0.5 a", "0 c"), ("1 b", "0.5 a"), ("1 d", "0 c")],
        ),
        ({"pairs": 9, "margin": 1.0}, [("1 b", "0 c"), ("1 d", "0 c")]),
    ],
    ids=str,
)
def test_pairs_are_of_one_sample_and_of_different_rewards(
    choice: dict[str, Any], pairs: list[tuple[str, str]], four: Path, tmp_path: Path
) -> None:
    run_export(four, tmp_path / "out", Choice(form="preference", **choice))
    rows = loaded(tmp_path / "out")
    assert sorted((r["chosen"][0]["content"], r["rejected"][0]["content"]) for r in rows) == sorted(
        pairs
    )
    assert (rows[0]["chosen"][0]["content"], rows[0]["rejected"][0]["content"]) == pairs[0]
    for row in rows:
        assert row["reward"] > row["rejected_reward"]
        assert [m["content"] for m in row["prompt"]] == ["1 + 2"]


@pytest.mark.parametrize(
    ("choice", "read"),
    [
        (Choice(form="preference"), {1, 6}),
        (Choice(form="preference", pairs=2), {1, 2, 5, 6}),
        (Choice(best=1), {6}),
        (Choice(form="rejection", threshold=0.5, best=2), {6, 5}),
    ],
    ids=str,
)
def test_only_the_runs_that_are_wanted_are_read(
    choice: Choice, read: set[int], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    logs = scored(tmp_path / "logs", [str(n / 10) for n in range(1, 7)])
    found: list[int] = []
    fetch = index.Reader._fetch

    def fetched(self: index.Reader, window: Sequence[Entry]) -> None:
        found.extend(entry.epoch for entry in window)
        fetch(self, window)

    monkeypatch.setattr(index.Reader, "_fetch", fetched)
    run_export(logs, tmp_path / "out", choice)
    assert sorted(found) == sorted(read)


def test_runs_that_are_too_large_to_hold_are_read_again(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    logs = scored(tmp_path / "logs", [f"{n / 10}" for n in range(6)])
    choice = Choice(form="preference", pairs=99)
    whole = run_export(logs, tmp_path / "whole", choice)
    monkeypatch.setattr(from_logs, "HELD_RUNS", 1)
    again = run_export(logs, tmp_path / "again", choice)
    assert again.written == whole.written == 15
    assert loaded(tmp_path / "again") == loaded(tmp_path / "whole")


def test_pairs_have_one_prompt(tmp_path: Path) -> None:
    logs = tmp_path / "logs"
    for number, said in enumerate(["1", "0"]):
        sample = Sample(id=1, input=f"version {number}", target="3")
        evaluated(Task(name="t", dataset=[sample], scorer=as_said()), [said], logs)
    with pytest.raises(ExportError, match="1 pairs without a common prompt"):
        run_export(logs, tmp_path / "out", Choice(form="preference"))


def test_a_sample_without_a_score_has_no_reward_rather_than_zero(tmp_path: Path) -> None:
    logs = scored(tmp_path / "logs", ["0", "none", "1"])
    run_export(logs, tmp_path / "sft")
    assert [row["reward"] for row in loaded(tmp_path / "sft")] == [0.0, None, 1.0]
    report = run_export(logs, tmp_path / "rewards", Choice(form="rewards"))
    assert replies(loaded(tmp_path / "rewards")) == ["0", "1"]
    assert report.left_out == {"unscored": 1}


@pytest.mark.parametrize(
    ("choice", "left_out"),
    [
        (Choice(), ["failed", None, None]),
        (Choice(errors="keep"), [None, None, None]),
        (Choice(errors="only"), [None, "did not fail", "did not fail"]),
        (Choice(limits="drop"), ["failed", "a limit ended it", None]),
        (Choice(limits="only"), ["failed", None, "no limit ended it"]),
    ],
    ids=["default", "errors", "errors-only", "no-limits", "limits-only"],
)
def test_samples_that_failed_or_met_a_limit_are_left_out_or_wanted(
    choice: Choice, left_out: list[str | None]
) -> None:
    fine = Entry(log=0, id=1, epoch=1, reward=1.0, error=False, limit=None)
    entries = [replace(fine, error=True), replace(fine, limit="message"), fine]
    assert [choice.why_not(entry) for entry in entries] == left_out


def test_long_branches_and_those_of_unknown_length_can_be_left_out(tmp_path: Path) -> None:
    said = iter(
        [
            say("1 short", usage=ModelUsage(input_tokens=5, output_tokens=5)),
            say("1 long", usage=ModelUsage(input_tokens=5, output_tokens=6)),
            say("1 unknown", usage=ModelUsage()),
        ]
    )
    task = sums(1, scorer=as_said(), epochs=3)
    evaluated(task, lambda request: next(said), tmp_path / "logs", max_samples=1)
    report = run_export(tmp_path / "logs", tmp_path / "out", Choice(max_length=10))
    assert replies(loaded(tmp_path / "out")) == ["1 short"]
    assert report.left_out == {"branches too long": 1, "branches of unknown length": 1}


def test_rollout_logs_have_the_reward_of_the_training(tmp_path: Path) -> None:
    groups = dataset(
        by_word(), tmp_path, batch_size=2, group_size=2, reward="score:graded_by_word.right"
    )
    lines = ["2", "no"], ["5", "4"]
    rewards = [
        roll_out(group, said) for group, said in zip(groups.get_batch(0), lines, strict=True)
    ]
    assemble_pending(tmp_path)
    run_export(tmp_path, tmp_path / "out", Choice(form="rewards"))
    rows = loaded(tmp_path / "out")
    assert [row["reward"] for row in rows] == [each for group in rewards for each in group]
    assert [row["messages"][-1]["content"] for row in rows] == ["2", "no", "5", "4"]


def test_the_reward_of_an_edited_rollout_log_stays_the_reward(tmp_path: Path) -> None:
    (group,) = dataset(by_word(1), tmp_path / "old", batch_size=1, group_size=2).get_batch(0)
    paid = roll_out(group, ["2", "no"])
    assemble_pending(tmp_path / "old")

    def edit() -> None:
        log = read_eval_log(find_logs([str(tmp_path / "old")])[0])
        assert log.samples is not None
        why = ProvenanceData(author="somebody", reason="the scorer was wrong")
        change = ScoreEdit(value=0.25, provenance=why)
        edit_score(log, log.samples[0].id, "reward", change, epoch=1)
        write_eval_log(log, str(tmp_path / "logs" / "edited.eval"))

    run_in_thread(edit)
    run_export(tmp_path / "logs", tmp_path / "out", Choice(form="rewards"))
    assert [row["reward"] for row in loaded(tmp_path / "out")] == [0.25, paid[1]]


@make_scorer({"right": [accuracy()], "short": [accuracy()]})
async def in_two_parts(state: TaskState, target: Target) -> Score:
    return Score(value={"right": 0.0, "short": 1.0})


@pytest.mark.parametrize(("headline", "reward"), [(None, 0.5), ("in_two_parts.right", 0.0)])
def test_a_headline_that_is_a_key_of_a_score_is_the_reward(
    headline: str | None, reward: float, tmp_path: Path
) -> None:
    task = sums(1, scorer=in_two_parts(), headline_metric=headline)
    evaluated(task, lambda request: "no", tmp_path / "logs")
    run_export(tmp_path / "logs", tmp_path / "out", Choice(form="rewards"))
    assert [row["reward"] for row in loaded(tmp_path / "out")] == [reward]


def test_the_headline_of_a_log_with_other_scorers_is_the_reward(tmp_path: Path) -> None:
    task = sums(1, scorer=in_two_parts(), headline_metric="in_two_parts.right")
    log = evaluated(task, lambda request: "0.5", tmp_path / "before")
    run_in_thread(
        lambda: write_eval_log(
            score(log, as_said(), action="overwrite", display="none"),
            str(tmp_path / "logs" / "scored.eval"),
        )
    )
    run_export(tmp_path / "logs", tmp_path / "out", Choice(form="rewards"))
    assert [row["reward"] for row in loaded(tmp_path / "out")] == [0.5]


def test_a_log_that_is_named_twice_is_read_once(tmp_path: Path) -> None:
    logs = scored(tmp_path / "logs")
    (log,) = logs.glob("*.eval")
    copy = tmp_path / "copy.eval"  # an eval that was retried repeats what its first log has
    copy.write_bytes(log.read_bytes())
    report = run_export([logs, log, copy], tmp_path / "out")
    assert report.written == 4


def test_a_sample_that_cannot_be_read_fails_alone(tmp_path: Path) -> None:
    (log,) = scored(tmp_path / "logs", count=3).glob("*.eval")
    spoiled = tmp_path / "spoiled.eval"
    with zipfile.ZipFile(log) as whole, zipfile.ZipFile(spoiled, "w") as copy:
        names = whole.namelist()
        bad = next(name for name in names if name.startswith("samples/2"))
        for name in names:
            copy.writestr(name, b"{ no sample" if name == bad else whole.read(name))
    report = run_export(spoiled, tmp_path / "out", split=("eval", "0.3"))
    assert report.written == 11
    (failure,) = report.failures
    assert failure.id.startswith("2"), failure


def test_logs_of_releases_that_did_not_mark_samples_as_complete_are_read(tmp_path: Path) -> None:
    (log,) = scored(tmp_path / "logs").glob("*.eval")
    old = tmp_path / "old.eval"
    with zipfile.ZipFile(log) as whole, zipfile.ZipFile(old, "w") as copy:
        for name in whole.namelist():
            content = whole.read(name)
            if name == "summaries.json":
                kept = ("id", "epoch", "input", "target", "scores")  # what 0.3.60 wrote
                summaries = json.loads(content)
                content = json.dumps(
                    [{key: each[key] for key in kept} for each in summaries]
                ).encode()
            copy.writestr(name, content)
    assert run_export(old, tmp_path / "out").written == 4


@pytest.mark.parametrize(
    ("path", "message"),
    [
        ("no.eval", "there is no log"),
        ("empty", "holds no .eval log"),
        ("x.json", "inspect log convert"),
    ],
)
def test_what_is_no_log_is_refused(path: str, message: str, tmp_path: Path) -> None:
    (tmp_path / "empty").mkdir()
    (tmp_path / "x.json").touch()
    with pytest.raises(ConfigError, match=message):
        find_logs([str(tmp_path / path)])


def test_a_score_is_named_by_itself_or_with_a_key() -> None:
    scores = {"a.b": Score(value=0.5), "judge": Score(value={"x": 1.0, "y": 0.0})}
    assert reward_of(scores, "a.b") == 0.5
    assert reward_of(scores, "judge.x") == 1.0
    assert reward_of(scores, "judge") == 0.5
    assert reward_of(scores, "judge.z") is None
    assert reward_of(scores, "other") is None
    assert reward_of({}, None) is None
    assert reward_of({**scores, "c": Score(value=float("nan"))}, None) is None


# splits


def sides(folder: Path) -> dict[str, set[str]]:
    return {
        split: {row["messages"][0]["content"] for row in loaded(folder, split)}
        for split in ("train", "test")
    }


def test_a_split_is_by_sample_and_that_of_a_training(tmp_path: Path) -> None:
    logs = scored(tmp_path / "logs", ["1", "0"], count=10)
    report = run_export(logs, tmp_path / "out", split=("test", "30%"))
    found = sides(tmp_path / "out")
    assert report.rows == {"train": 14, "test": 6}
    assert not found["train"] & found["test"]
    task = sums(10)
    held = split_samples(list(task.dataset), "30%").test
    assert found["test"] == {task.dataset[index].input for index in held}


def test_the_same_question_under_two_ids_is_on_one_side(tmp_path: Path) -> None:
    samples = [Sample(id=n, input=f"question {n % 5}", target="x") for n in range(10)]
    evaluated(Task(dataset=samples, scorer=as_said()), lambda request: "1", tmp_path / "logs")
    run_export(tmp_path / "logs", tmp_path / "out", split=("test", "20%"))
    found = sides(tmp_path / "out")
    assert not found["train"] & found["test"]
    assert len(found["test"]) == 1


@pytest.mark.parametrize("split", [("train", "10%"), ("", "10%"), ("te/st", "10%")])
def test_names_of_splits_that_are_none_are_refused(split: tuple[str, str]) -> None:
    with pytest.raises(ConfigError, match="a split is held out under a name"):
        LogExportOptions(split=split)


# interruptions


def leave_unfinished(logs: Path | str, folder: Path, options: LogExportOptions) -> None:
    """Interrupt an export behind its sixth run."""

    async def interrupted() -> None:
        at_three = asyncio.Event()
        export = asyncio.ensure_future(
            export_logs(
                [str(logs)],
                folder,
                options,
                on_progress=lambda done, total, failed: at_three.set() if done >= 6 else None,
            )
        )
        await at_three.wait()
        export.cancel()
        with pytest.raises(asyncio.CancelledError):
            await export

    asyncio.run(interrupted())


def test_an_interrupted_export_goes_on_where_it_was(tmp_path: Path) -> None:
    logs = scored(tmp_path / "logs", ["1 a", "1 a", "0 b"], count=6)
    choice = Choice(form="rejection")
    whole = run_export(logs, tmp_path / "whole", choice, split=("test", "4"))
    leave_unfinished(logs, tmp_path / "out", LogExportOptions(choice=choice, split=("test", "4")))
    report = run_export(logs, tmp_path / "out", choice, split=("test", "4"))
    assert report.continued > 0
    assert report.rows == whole.rows
    assert report.left_out == whole.left_out == {"not good": 6, "the same as another": 8}
    for split in ("train", "test"):
        assert loaded(tmp_path / "out", split) == loaded(tmp_path / "whole", split)


@pytest.mark.parametrize("store", ["{folder}", "memory://{folder.name}"], ids=["here", "remote"])
def test_an_export_is_not_continued_with_logs_that_were_scored_again(
    store: str, tmp_path: Path
) -> None:
    made = scored(tmp_path / tmp_path.name, ["1 a", "0 b"], count=6)
    source = store.format(folder=made)
    choice = Choice(score="as_said")
    logs = {f"{source}/{path.name}": read_eval_log(str(path)) for path in made.glob("*.eval")}
    for path, log in logs.items():
        write_eval_log(log, path)
    leave_unfinished(source, tmp_path / "out", LogExportOptions(choice=choice))
    for path, log in logs.items():
        for sample in log.samples or []:
            sample.scores = {**(sample.scores or {}), "another": Score(value=1)}
        write_eval_log(log, path)
    with pytest.raises(ExportError, match="the logs have changed since"):
        run_export([source], tmp_path / "out", choice)


def test_an_export_that_is_cut_off_within_a_sample_has_all_or_none_of_its_rows(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    logs = scored(tmp_path / "logs", count=3)
    monkeypatch.setattr(export_folder, "HELD_BYTES", 1)
    second, cut = threading.Event(), threading.Event()
    rows = iter(range(1, 100))
    add_row = ExportFolder.add_row

    def add(folder: ExportFolder, split: str, row: Any) -> None:
        add_row(folder, split, row)
        if next(rows) == 6:
            second.set()
            assert cut.wait(30)

    async def cut_off() -> None:
        options = LogExportOptions(choice=Choice())
        export = asyncio.ensure_future(export_logs([str(logs)], tmp_path / "out", options))
        await asyncio.to_thread(second.wait, 30)
        export.cancel()
        cut.set()
        with pytest.raises(asyncio.CancelledError):
            await export

    with monkeypatch.context() as context:
        context.setattr(ExportFolder, "add_row", add)
        asyncio.run(cut_off())
    report = run_export(logs, tmp_path / "out")
    assert report.continued == 8
    run_export(logs, tmp_path / "whole")
    assert loaded(tmp_path / "out") == loaded(tmp_path / "whole")


@pytest.mark.slow
@pytest.mark.parametrize(
    "format",
    ["parquet", *(pytest.param(each, marks=pytest.mark.nightly) for each in ("jsonl", "arrow"))],
)
def test_rows_are_not_held_in_memory(tmp_path: Path, format: Any) -> None:
    folder = ExportFolder.claim(
        tmp_path / "out",
        LogExportOptions(format=format),
        identity={},
        seed=None,
        schema=PROMPTS,
    )
    prompt = [{"role": "user", "content": "?"}]
    row = {"id": "1", "prompt": prompt, "answer": "", "info": "{}", "task": "t", "tools": "[]"}
    peaks = []
    for count in (500, 4_500):
        tracemalloc.start()
        for number in range(count):
            folder.add_row("train", {**row, "answer": f"{number} {'and so on ' * 400}"})
            folder.end_unit()
        peaks.append(tracemalloc.get_traced_memory()[1])
        tracemalloc.stop()
    tracemalloc.start()
    folder.finish("t", "", source={"task": "t"}, counts={}, failures=[])
    in_files = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    folder.close()
    assert len(loaded(tmp_path / "out")) == 5_000
    assert peaks[1] < 1.5 * peaks[0]
    assert in_files < 10_000_000, "twenty megabytes of rows"


@pytest.mark.parametrize("finished", [True, False])
def test_the_index_is_that_of_the_summaries_that_inspect_reads(
    finished: bool, tmp_path: Path
) -> None:
    (log,) = scored(tmp_path / "logs", ["1", "none", "0.5"], count=3).glob("*.eval")
    if not finished:
        with zipfile.ZipFile(log) as whole, zipfile.ZipFile(tmp_path / "x.eval", "w") as copy:
            for name in whole.namelist():
                if name != "summaries.json":
                    copy.writestr(name, whole.read(name))
        log = tmp_path / "x.eval"
    index = run_in_thread(lambda: index_logs([str(log)], score=None))
    read = run_in_thread(lambda: read_eval_log_sample_summaries(str(log)))
    assert {(entry.id, entry.epoch, entry.reward) for entry in index.entries} == {
        (each.id, each.epoch, reward_of(each.scores or {}, None)) for each in read
    }
    assert len(read) == 9


# the command


def command(*arguments: str) -> tuple[int, str]:
    result = run_in_thread(CliRunner().invoke, export_command, list(arguments))
    return result.exit_code, " ".join(result.output.split())


def test_the_command_says_what_it_wrote_and_left_out(tmp_path: Path) -> None:
    logs = scored(tmp_path / "logs")
    status, said = command(
        "--from-logs", str(logs), "--as", "rejection", "-o", str(tmp_path / "out")
    )
    assert status == 0, said
    assert "Wrote 2 rows (2 in train)" in said
    assert "Left out: 2 not good." in said


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--from-logs", "x", "--limit", "3"], "--limit does not go with --from-logs"),
        (["--from-logs", "x", "-T", "a=1"], "-T does not go with --from-logs"),
        (["toy.py", "--best", "3"], "--best goes only with --from-logs"),
        (["toy.py", "--as", "sft"], "--as goes only with --from-logs"),
        (["one.py", "two.py"], "one TASK, or --from-logs LOGS..."),
        (["--from-logs", "x", "--split", "test"], "expected NAME=SHARE such as test=10%"),
    ],
    ids=lambda value: value[-2] if isinstance(value, list) else "",
)
def test_options_that_would_do_nothing_are_refused(
    arguments: list[str], message: str, tmp_path: Path
) -> None:
    status, said = command(*arguments, "-o", str(tmp_path / "out"))
    assert status == 2
    assert message in said


@pytest.mark.parametrize(
    ("choices", "message"),
    [
        ({"threshold": 0.5}, "threshold does nothing for sft, only for rejection or rewards"),
        ({"form": "rewards", "pairs": 2}, "pairs does nothing for rewards, only for preference"),
        ({"form": "preference", "best": 2}, "best does nothing for preference"),
    ],
)
def test_choices_that_do_nothing_for_the_rows_are_refused(
    choices: dict[str, Any], message: str, tmp_path: Path
) -> None:
    with pytest.raises(ConfigError, match=message):
        Choice(**choices)
    words = [word for name, value in choices.items() for word in (f"--{name}", str(value))]
    words = ["--as" if word == "--form" else word for word in words]
    status, said = command("--from-logs", "x", *words, "-o", str(tmp_path / "out"))
    assert (status, message in said) == (1, True)


def test_an_upload_that_fails_leaves_the_export(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    logs = scored(tmp_path / "logs")
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_OFFLINE", True)
    out = tmp_path / "out"
    status, said = command("--from-logs", str(logs), "-o", str(out), "--push-to-hub", "me/data")
    assert status == 1
    assert "is complete, but was not uploaded to 'me/data'" in said
    assert len(loaded(out)) == 4
