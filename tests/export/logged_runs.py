"""Logs to export: evals of scripted models, written and read back for real."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any, TypeVar

import datasets
from inspect_ai import Task
from inspect_ai import eval as inspect_eval
from inspect_ai.agent import react
from inspect_ai.dataset import Sample
from inspect_ai.log import EvalLog, EvalSample, read_eval_log
from inspect_ai.scorer import Score, Target, accuracy, includes
from inspect_ai.solver import TaskState
from tests.functions import make_scorer, make_tool
from tests.logs.rollouts import run_in_thread

from inspect_tinker_plugin.contracts.episodes import TurnRequest
from inspect_tinker_plugin.export.from_logs import LogExportReport, export_logs
from inspect_tinker_plugin.export.options import Choice, LogExportOptions
from inspect_tinker_plugin.testing.replies import Script, call, say, scripted_model

T = TypeVar("T")
MODEL = "scripted/model"


def evaluated(task: Task, script: Script, log_dir: Path, **options: Any) -> EvalLog:
    """Run an eval; returns its log as it is on the disk."""

    def run() -> EvalLog:
        model = scripted_model(script)
        (log,) = inspect_eval(task, model=model, log_dir=str(log_dir), display="none", **options)
        return read_eval_log(log.location, resolve_attachments="full")

    return run_in_thread(run)


def only_sample(task: Task, script: Script, log_dir: Path, **options: Any) -> EvalSample:
    log = evaluated(task, script, log_dir, **options)
    assert log.samples is not None
    (sample,) = log.samples
    assert sample.error is None, sample.error.message
    return sample


@make_tool
async def add(a: int, b: int) -> int:
    """Add two numbers.

    Args:
        a: The first.
        b: The second.
    """
    return a + b


@make_scorer(accuracy())
async def as_said(state: TaskState, target: Target) -> Score | None:
    """Gives what the model says as the score; ``none`` gives no score."""
    said = state.output.completion
    return None if said == "none" else Score(value=float(said.partition(" ")[0]))


def sums(count: int = 3, **options: Any) -> Task:
    samples = [Sample(id=n, input=f"{n} + 2", target=str(n + 2)) for n in range(1, count + 1)]
    return Task(name="sums", dataset=samples, **options)


def agent(count: int = 3) -> Task:
    return sums(count, solver=react(tools=[add()]), scorer=includes())


def adds_and_submits(request: TurnRequest) -> Any:
    """Calls the tool, and submits what it says; wrongly in every other sample."""
    last = request.messages[-1]
    if last.role != "tool":
        a = int(last.text.partition(" ")[0])
        return say("I add.", call("add", a=a, b=2))
    return say("", call("submit", answer=last.text if int(last.text) % 2 else "0"))


def run_export(
    sources: Sequence[Path | str] | Path,
    folder: Path,
    choice: Choice | None = None,
    **options: Any,
) -> LogExportReport:
    """Export in a loop of its own."""
    import asyncio

    paths = [sources] if isinstance(sources, Path) else sources
    chosen = LogExportOptions(choice=choice or Choice(), **options)
    return asyncio.run(export_logs([str(path) for path in paths], folder, chosen))


def loaded(folder: Path, split: str = "train") -> list[dict[str, Any]]:
    data = datasets.load_dataset(str(folder), split=split, cache_dir=str(folder) + "-cache")
    rows: list[dict[str, Any]] = data.to_list()
    return rows
