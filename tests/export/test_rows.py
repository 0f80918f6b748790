"""An export by worker processes is that of one process, and loses nothing with a worker."""

from __future__ import annotations

import os
import signal
from pathlib import Path
from typing import Any

import pytest
from inspect_ai import Task
from inspect_ai.dataset import Sample
from tests.commands import Command
from tests.waiting import is_alive

from inspect_tinker_plugin.contracts.errors import ConfigError, ExportError
from inspect_tinker_plugin.export import folder as export_folder
from inspect_tinker_plugin.export.folder import WORK
from inspect_tinker_plugin.export.options import ExportOptions
from inspect_tinker_plugin.export.pipeline import ExportReport, export_task
from inspect_tinker_plugin.options import DatasetOptions
from inspect_tinker_plugin.tasks.reference import resolve_task

TASKS = """
import asyncio, multiprocessing, os, random, signal
from pathlib import Path
from inspect_ai import Task, task
from inspect_ai.dataset import Sample
from inspect_ai.solver import generate, prompt_template, solver

def numbers(count):
    return [Sample(id=n, input=f"{n}?", target=str(n)) for n in range(1, count + 1)]

@task
def sums(count=90):
    steps = [lame_at(7), prompt_template("Add: {prompt}"), generate()]
    return Task(dataset=numbers(count), solver=steps)

@task
def unsteady():
    samples = numbers(30)
    random.SystemRandom().shuffle(samples)
    return Task(dataset=samples, solver=generate())

@task
def fatal(at):
    return Task(dataset=numbers(90), solver=[killed_at(at), generate()])

@task
def only_here():
    if multiprocessing.parent_process() is not None:
        raise ValueError("not in a worker")
    return Task(dataset=numbers(3), solver=generate())

@task
def slow():
    return Task(dataset=numbers(400), solver=[pausing(), generate()])

@solver
def lame_at(number):
    async def solve(state, generate):
        if state.sample_id == number:
            raise ValueError("no leg to stand on")
        return state
    return solve

@solver
def killed_at(number):
    async def solve(state, generate):
        if state.sample_id == number and not Path("killed").exists():
            Path("killed").touch()
            os.kill(os.getpid(), signal.SIGKILL)
        return state
    return solve

@solver
def pausing():
    async def solve(state, generate):
        Path(f"worker-{os.getpid()}").touch()
        await asyncio.sleep(0.5)
        return state
    return solve
"""


@pytest.fixture(autouse=True)
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    (tmp_path / "tasks.py").write_text(TASKS)
    monkeypatch.chdir(tmp_path)
    return tmp_path


async def export(
    name: str, to: str, *, seen: list[tuple[int, int, int]] | None = None, **options: Any
) -> ExportReport:
    args = options.pop("args", None)
    made = ExportOptions(**{"format": "jsonl", **options})
    progress = [] if seen is None else seen
    resolved = resolve_task(f"tasks.py@{name}", args)
    return await export_task(
        resolved, Path(to), made, on_progress=lambda *counts: progress.append(counts)
    )


def files(folder: str) -> dict[str, bytes]:
    return {path.name: path.read_bytes() for path in sorted(Path(folder).glob("*.jsonl"))}


@pytest.mark.slow
@pytest.mark.parametrize("layout", ["chat", pytest.param("verl", marks=pytest.mark.nightly)])
async def test_two_workers_write_the_very_files_that_one_process_writes(
    layout: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(export_folder, "FILE_BYTES", 4_000)
    seen: list[tuple[int, int, int]] = []
    options: dict[str, Any] = {"layout": layout, "dataset": DatasetOptions(sample_shuffle=3)}
    one = await export("sums", "one", **options)
    two = await export("sums", "two", workers=2, seen=seen, **options)
    assert files("one") == files("two")
    assert len(files("two")) > 2
    assert two.failures == one.failures
    assert [failure.id for failure in two.failures] == ["7"]
    assert [done for done, _, _ in seen] == list(range(91))
    assert seen[-1] == (90, 90, 1)


@pytest.mark.nightly
async def test_workers_prepare_the_samples_of_the_export_not_their_own() -> None:
    resolved = resolve_task("tasks.py@unsteady")
    order = [str(sample.id) for sample in resolved.task.dataset]
    for workers in (1, 2):
        options = ExportOptions(format="jsonl", workers=workers)
        await export_task(resolved, Path(f"out-{workers}"), options)
    assert files("out-1") == files("out-2")
    [content] = files("out-2").values()
    assert [line.split('"')[3] for line in content.decode().splitlines()] == order


@pytest.mark.nightly  # workers that are stopped: test_a_signal_ends_the_workers_...
@pytest.mark.parametrize("workers", [1, 2])
async def test_a_killed_worker_ends_the_export_which_any_number_continues_without_a_loss(
    workers: int,
) -> None:
    options: dict[str, Any] = {"args": {"at": 70}, "max_samples": 4}
    killed = r"a worker process was killed.* of 90 samples are done.*any number of workers"
    with pytest.raises(ExportError, match=killed):
        await export("fatal", "out", workers=2, **options)
    assert (Path("out") / WORK).is_dir()

    seen: list[tuple[int, int, int]] = []
    report = await export("fatal", "out", workers=workers, seen=seen, **options)
    assert report.continued >= 25
    assert seen[0][0] == report.continued
    assert (report.written, report.failures) == (90, [])
    await export("fatal", "one", **options)
    assert files("out") == files("one")


@pytest.mark.nightly
async def test_a_task_that_a_worker_cannot_load_is_one_error() -> None:
    with pytest.raises(ExportError, match=r"a worker process failed: TaskError: .*not in a worker"):
        await export("only_here", "out", workers=2)


async def test_a_task_made_in_python_is_refused_with_workers() -> None:
    resolved = resolve_task(Task(name="mine", dataset=[Sample(input="?")]))
    with pytest.raises(ConfigError, match=r"'mine' cannot be exported with workers.*leave workers"):
        await export_task(resolved, Path("out"), ExportOptions(workers=2))
    assert "out" not in os.listdir()


async def test_so_is_a_task_that_was_changed_after_it_was_made() -> None:
    resolved = resolve_task(resolve_task("tasks.py@sums").task)
    resolved.task.message_limit = 3
    with pytest.raises(ConfigError, match=r"cannot be exported with workers"):
        await export_task(resolved, Path("out"), ExportOptions(workers=2))


@pytest.mark.parametrize("workers", [0, 5])
def test_workers_share_the_samples_that_are_prepared_at_once(workers: int) -> None:
    with pytest.raises(ConfigError, match=f"workers is {workers}; it must be .* max_samples"):
        ExportOptions(workers=workers, max_samples=4)


@pytest.mark.forks
@pytest.mark.slow
def test_a_signal_ends_the_workers_and_the_same_command_continues(folder: Path) -> None:
    words = ("export", "tasks.py@slow", "--output", "out", "--format", "jsonl", "--workers", "2")
    command = Command(*words, cwd=folder)
    command.wait_until(lambda: len(list(folder.glob("worker-*"))) == 2)
    workers = [int(path.name.removeprefix("worker-")) for path in folder.glob("worker-*")]
    command.send(signal.SIGTERM)
    done = command.wait(100)
    assert done.returncode == 143, done.stderr
    assert done.stderr == "Interrupted; run the same command again to continue.\n"
    assert not any(map(is_alive, workers))

    assert Command(*words, "--max-samples", "200", cwd=folder).wait().returncode == 0
    ids = [line.split(b'"')[3] for each in files("out").values() for line in each.splitlines()]
    assert ids == [str(n).encode() for n in range(1, 401)]
