"""Exports that are repeated, interrupted, killed, or run in the same folder at once."""

from __future__ import annotations

import asyncio
import errno
import json
import math
import resource
import signal
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import anyio
import pytest
from inspect_ai import SampleSource, Task
from inspect_ai.dataset import Sample
from inspect_ai.solver import Generate, TaskState, system_message
from tests.commands import Command
from tests.export.logged_runs import loaded
from tests.functions import make_solver
from tests.waiting import until

from inspect_tinker_plugin.contracts.errors import ConfigError, ExportError, TaskError
from inspect_tinker_plugin.export import folder as export_folder
from inspect_tinker_plugin.export.folder import WORK
from inspect_tinker_plugin.export.options import Choice, ExportOptions
from inspect_tinker_plugin.export.pipeline import ExportReport, export_task
from inspect_tinker_plugin.options import DatasetOptions
from inspect_tinker_plugin.tasks.reference import ResolvedTask


class Seen(list[Any]):
    """Ids of the samples whose solver has started."""

    def __init__(self) -> None:
        super().__init__()
        self._more = asyncio.Event()

    def append(self, id: Any) -> None:
        super().append(id)
        self._more.set()

    async def has(self, count: int) -> None:
        while len(self) < count:
            self._more.clear()
            await self._more.wait()


@make_solver
async def noting(
    state: TaskState, generate: Generate, seen: Seen, fail_at: int | None = None, delay: float = 0
) -> TaskState:
    seen.append(state.sample_id)
    if state.sample_id == fail_at:
        raise ValueError("bad sample")
    await asyncio.sleep(delay)
    return await generate(state)


def numbers(count: int, seen: Seen | None = None, **options: Any) -> Task:
    samples = [Sample(input=f"{n}?", target=str(n)) for n in range(1, count + 1)]
    return Task(dataset=samples, solver=noting(Seen() if seen is None else seen, **options))


async def export(task: Task, folder: Path, **options: Any) -> ExportReport:
    return await export_task(ResolvedTask(task, None), folder, ExportOptions(**options))


def rows(folder: Path) -> list[dict[str, Any]]:
    import pyarrow.parquet

    found: list[dict[str, Any]] = []
    for path in sorted(folder.glob("*.parquet")):
        found += pyarrow.parquet.read_table(path).to_pylist()
    return found


def ids(folder: Path) -> list[str]:
    return [row["id"] for row in rows(folder)]


def names(folder: Path) -> list[str]:
    return sorted(path.name for path in folder.iterdir())


def summary(folder: Path) -> dict[str, Any]:
    loaded: dict[str, Any] = json.loads((folder / "export.json").read_text())
    return loaded


async def test_rows_keep_the_order_of_the_samples_over_many_files(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(export_folder, "FILE_BYTES", 1)
    report = await export(numbers(10), tmp_path / "out", max_samples=4)
    assert ids(tmp_path / "out") == [str(n) for n in range(1, 11)]
    assert len(report.files) == 10
    assert names(tmp_path / "out") == [
        "README.md",
        "export.json",
        *(f"train-{n:05d}-of-00010.parquet" for n in range(10)),
    ]


async def test_slow_set_ups_overlap(tmp_path: Path) -> None:
    running = most = 0

    @make_solver
    async def slow(state: TaskState, generate: Generate) -> TaskState:
        nonlocal running, most
        running += 1
        most = max(most, running)
        await until(lambda: most >= 7)
        await asyncio.sleep(0.01)
        running -= 1
        return await generate(state)

    samples = [Sample(input="x") for _ in range(40)]
    await export(Task(dataset=samples, solver=slow()), tmp_path / "out", max_samples=7)
    assert most == 7


async def test_an_export_in_which_every_sample_fails_leaves_nothing(tmp_path: Path) -> None:
    with pytest.raises(ExportError, match=r"none of 1 sample could be exported.*bad sample"):
        await export(numbers(1, fail_at=1), tmp_path / "out")
    assert names(tmp_path) == []


async def test_a_cancelled_export_continues_where_it_stopped(tmp_path: Path) -> None:
    await interrupted(tmp_path / "out")
    assert ids(tmp_path / "out") == []
    again = Seen()
    report = await export(numbers(10, again), tmp_path / "out")
    assert report.continued >= 3
    assert sorted(again) == list(range(report.continued, 11))  # the last one is compared
    assert ids(tmp_path / "out") == [str(n) for n in range(1, 11)]
    assert not (tmp_path / "out" / WORK).exists()


async def test_a_cancelled_export_cancels_all_samples_before_it_waits_for_one(
    tmp_path: Path,
) -> None:
    # a sandbox of Inspect is released by a subprocess, for which the others' commands have a place
    begun, released, others_end = Seen(), list[Any](), asyncio.Event()

    @make_solver
    async def holding(state: TaskState, generate: Generate) -> TaskState:
        begun.append(state.sample_id)
        try:
            await asyncio.Event().wait()
        finally:
            if state.sample_id == 2:
                others_end.set()
            with anyio.move_on_after(5, shield=True):
                await others_end.wait()
                released.append(state.sample_id)
        return state

    task = numbers(2)
    task.solver = holding()
    run = asyncio.create_task(export(task, tmp_path / "out"))
    await begun.has(2)
    run.cancel()
    with pytest.raises(asyncio.CancelledError):
        await run
    assert sorted(released) == [1, 2]


async def interrupted(folder: Path, **options: Any) -> None:
    """Leave an unfinished export of ten samples behind."""
    seen = Seen()
    run = asyncio.create_task(
        export(numbers(10, seen, delay=0.01), folder, max_samples=1, **options)
    )
    await seen.has(5)
    run.cancel()
    with pytest.raises(asyncio.CancelledError):
        await run


@pytest.mark.parametrize(
    ("options", "differs"),
    [
        ({"format": "jsonl"}, "format ('parquet', now 'jsonl')"),
        ({"dataset": DatasetOptions(limit=5)}, "limit (None, now 5)"),
        ({"solver_name": "other {}"}, "solver (None, now 'other {}')"),
        (
            {"dataset": DatasetOptions(model_roles={"guide": "mockllm/a"})},
            "model_roles (None, now {'guide': 'mockllm/a'})",
        ),
    ],
    ids=["format", "limit", "solver", "roles"],
)
async def test_another_export_does_not_continue_this_one(
    tmp_path: Path, options: dict[str, Any], differs: str
) -> None:
    await interrupted(tmp_path / "out")
    with pytest.raises(ExportError) as caught:
        await export(numbers(10), tmp_path / "out", **options)
    assert differs in str(caught.value)
    report = await export(numbers(10), tmp_path / "out", overwrite=True, **options)
    assert report.continued == 0


@pytest.mark.parametrize(
    ("column", "value"),
    [("target", "changed"), ("metadata", {"level": 2}), ("files", {"a.txt": "a"})],
)
async def test_an_export_is_not_continued_with_other_data(
    tmp_path: Path, column: str, value: Any
) -> None:
    await interrupted(tmp_path / "out")
    other = numbers(10)
    setattr(other.dataset[0], column, value)
    with pytest.raises(ExportError, match="samples have changed since"):
        await export(other, tmp_path / "out")


@pytest.mark.parametrize("changed", [False, True])
async def test_a_prompt_that_has_changed_since_the_export_began_is_named(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, changed: bool
) -> None:
    await interrupted(tmp_path / "out")
    task = numbers(10)
    if changed:
        task.setup = system_message("Be brief.")
    await export(task, tmp_path / "out")
    assert ("is no longer that of the unfinished export" in caplog.text) == changed
    assert ids(tmp_path / "out") == [str(n) for n in range(1, 11)]


async def test_a_shuffled_export_without_a_seed_continues_in_its_order(tmp_path: Path) -> None:
    shuffled = DatasetOptions(sample_shuffle=True)
    await interrupted(tmp_path / "out", dataset=shuffled)
    report = await export(numbers(10), tmp_path / "out", dataset=shuffled)
    assert report.continued > 0
    assert sorted(ids(tmp_path / "out"), key=int) == [str(n) for n in range(1, 11)]
    assert isinstance(summary(tmp_path / "out")["seed"], int)


async def test_a_finished_export_is_only_replaced_on_request(tmp_path: Path) -> None:
    await export(numbers(2), tmp_path / "out")
    (tmp_path / "out" / "mine.txt").write_text("keep")
    with pytest.raises(ExportError, match=r"holds a finished export.*--overwrite"):
        await export(numbers(3), tmp_path / "out")
    assert len(rows(tmp_path / "out")) == 2
    await export(numbers(3), tmp_path / "out", overwrite=True, format="jsonl")
    assert names(tmp_path / "out") == [
        "README.md",
        "export.json",
        "mine.txt",
        "train-00000-of-00001.jsonl",
    ]


async def test_a_replacement_that_fails_leaves_the_finished_export(tmp_path: Path) -> None:
    await export(numbers(2), tmp_path / "out")
    with pytest.raises(ExportError, match="none of 1 sample"):
        await export(numbers(1, fail_at=1), tmp_path / "out", overwrite=True)
    assert ids(tmp_path / "out") == ["1", "2"]
    assert not (tmp_path / "out" / WORK).exists()


@pytest.mark.parametrize("overwrite", [False, True])
async def test_a_folder_with_other_files_is_left_alone(tmp_path: Path, overwrite: bool) -> None:
    (tmp_path / "thesis.tex").write_text("years of work")
    with pytest.raises(ExportError, match="is not empty and holds no export"):
        await export(numbers(1), tmp_path, overwrite=overwrite)


async def test_two_exports_into_one_folder_do_not_mix(tmp_path: Path) -> None:
    seen = Seen()
    run = asyncio.create_task(export(numbers(5, seen, delay=0.2), tmp_path / "out"))
    await seen.has(1)
    with pytest.raises(ExportError, match="is being written by another export"):
        await export(numbers(5), tmp_path / "out")
    await run
    assert len(rows(tmp_path / "out")) == 5


async def test_a_task_that_makes_samples_as_it_goes_is_refused(tmp_path: Path) -> None:
    class Source(SampleSource):
        def initial_samples(self) -> list[Sample]:
            return [Sample(input="first")]

        async def next_samples(self) -> list[Sample] | None:
            return None

    with pytest.raises(TaskError, match="makes its samples while it runs"):
        await export(Task(dataset=Source()), tmp_path / "out")
    assert names(tmp_path) == []


TASKS = """
import asyncio, os
from pathlib import Path
from inspect_ai import Task, task
from inspect_ai.dataset import Sample
from inspect_ai.solver import solver

@solver
def slow(pause):
    async def solve(state, generate):
        with open("seen.txt", "a") as file:
            file.write(f"{state.sample_id}\\n")
        await asyncio.sleep(pause)
        return await generate(state)
    return solve

@task
def numbers():
    samples = [Sample(input=f"{n}?", target=str(n)) for n in range(400)]
    return Task(dataset=samples, solver=slow(float(os.environ["PAUSE"])))
"""


def hold_nothing() -> None:
    """Write every row at once; in a process of its own."""
    export_folder.HELD_BYTES = 1


def fill_disk() -> None:
    hold_nothing()
    signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
    resource.setrlimit(resource.RLIMIT_FSIZE, (3000, -1))


def exporting(folder: Path, pause: str, prepare: Callable[[], None] = hold_nothing) -> Command:
    (folder / "tasks.py").write_text(TASKS)
    words = ("export", "tasks.py", "--output", "out", "--max-samples", "4")
    return Command(*words, cwd=folder, environ={"PAUSE": pause}, prepare=prepare)


@pytest.mark.forks
@pytest.mark.slow
def test_a_killed_export_continues_and_ends_as_if_nothing_had_happened(tmp_path: Path) -> None:
    journal = tmp_path / "out" / WORK / "journal.jsonl"

    def kill_after(lines: int) -> None:
        command = exporting(tmp_path, "0.01")
        command.wait_until(lambda: journal.exists() and journal.read_text().count("\n") >= lines)
        command.send(signal.SIGKILL)
        assert command.wait().returncode == -signal.SIGKILL

    kill_after(60)
    journal.write_text(journal.read_text() + '{"unit": "9')  # killed while it wrote a line
    kill_after(180)
    held = bytearray(journal.read_bytes())
    held[len(held) // 2] ^= 0xFF  # the rows from here on are made again
    journal.write_bytes(held)
    assert not (tmp_path / "out" / "export.json").exists()
    before = (tmp_path / "seen.txt").read_text().count("\n")
    assert "by an earlier run" in exporting(tmp_path, "0.01").wait().stdout
    assert [row["answer"] for row in rows(tmp_path / "out")] == [str(n) for n in range(400)]
    assert summary(tmp_path / "out")["counts"]["written"] == 400
    assert 300 < (tmp_path / "seen.txt").read_text().count("\n") - before < 370


@pytest.mark.forks
def test_a_full_disk_is_one_line_and_the_export_can_continue(tmp_path: Path) -> None:
    failed = exporting(tmp_path, "0", fill_disk).wait()
    assert failed.returncode == 1
    assert failed.stderr == "Error: cannot write to out: File too large.\n"
    assert exporting(tmp_path, "0").wait().returncode == 0
    assert len(rows(tmp_path / "out")) == 400


async def test_a_disk_that_is_full_when_the_files_are_written_is_named(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def write_nothing(path: Path, split: str) -> Iterator[dict[str, Any]]:
        yield from ()
        raise OSError(errno.ENOSPC, "No space left on device")

    with monkeypatch.context() as patched:
        patched.setattr(export_folder, "_read_rows", write_nothing)
        with pytest.raises(ExportError, match=r"cannot write to .*out: No space left on device"):
            await export(numbers(2), tmp_path / "out")
    assert (await export(numbers(2), tmp_path / "out")).continued == 2
    assert ids(tmp_path / "out") == ["1", "2"]


async def test_an_export_that_replaced_another_is_the_one_that_is_read(tmp_path: Path) -> None:
    for count in (2, 3):
        await export(numbers(count), tmp_path / "out", overwrite=True)
        assert len(loaded(tmp_path / "out")) == count


@pytest.mark.parametrize(
    "made",
    [
        lambda: ExportOptions(max_samples=0, workers=0),
        lambda: ExportOptions(format="csv"),  # type: ignore[arg-type]
        lambda: ExportOptions(layout="harbor"),  # type: ignore[arg-type]
        lambda: Choice(form="all"),  # type: ignore[arg-type]
        lambda: Choice(limits="some"),  # type: ignore[arg-type]
        lambda: Choice(best=0),
        lambda: Choice(min_score=math.nan),
        lambda: Choice(margin=-1.0),
    ],
)
def test_options_made_in_python_are_checked(made: Callable[[], object]) -> None:
    with pytest.raises(ConfigError, match=r"at least|unknown|not a number"):
        made()
