"""The rollouts of the log tests, importable by the worker processes that they start."""

from __future__ import annotations

import asyncio
import os
import signal
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any, TypeVar

from inspect_ai import Task, task
from inspect_ai.log import EvalLog, EvalSample, list_eval_logs, read_eval_log
from inspect_ai.scorer import Score, Target, accuracy
from inspect_ai.solver import Generate, TaskState, generate
from tests.functions import make_scorer, make_solver
from tests.rl.policies import Words, plain, renderer
from tests.rl.tasks import sums
from tinker_cookbook.rl.data_processing import assemble_training_data, compute_advantages
from tinker_cookbook.rl.rollouts import do_group_rollout
from tinker_cookbook.rl.types import TrajectoryGroup

from inspect_tinker_plugin.logs import assemble_pending, writer
from inspect_tinker_plugin.logs.staging import Attempt, LogRun
from inspect_tinker_plugin.rl.dataset import InspectRLDataset, as_rl_dataset
from inspect_tinker_plugin.rl.group import InspectGroupBuilder

T = TypeVar("T")


@make_scorer(accuracy(), name="reward")
async def scorer_called_reward(state: TaskState, target: Target) -> Score:
    return Score(value=0.25)


@make_scorer(accuracy())
async def graded_by_word(state: TaskState, target: Target) -> Score:
    """Raises for ``crash``; otherwise a dict score."""
    if "crash" in state.output.completion:
        raise ValueError("the scorer is broken")
    right = state.output.completion == target.text
    return Score(value={"right": float(right), "short": 1.0})


@task
def by_word(count: int = 2) -> Task:
    return Task(dataset=sums(count), solver=generate(), scorer=graded_by_word())


@make_solver
async def two_turns(state: TaskState, generate: Generate) -> TaskState:
    state = await generate(state)
    return await generate(state)


def dataset(task: Any, log_dir: Path, **options: Any) -> InspectRLDataset:
    return as_rl_dataset(task, renderer(), log_dir=log_dir, **options)


def roll_out(builder: InspectGroupBuilder, lines: Sequence[str]) -> list[float]:
    """Roll out a builder, as a worker process does."""
    group = asyncio.run(do_group_rollout(builder, Words(lines)))
    return group.get_total_rewards()


def die_while_writing(builder: InspectGroupBuilder, lines: Sequence[str]) -> None:
    """Roll out, write half a part and get killed."""

    def half(path: Path, records: Sequence[EvalSample]) -> None:
        path.write_bytes(b'{"id": "half')
        os.kill(os.getpid(), signal.SIGKILL)

    setattr(writer, "write_part", half)  # noqa: B010 - a fault to inject
    roll_out(builder, lines)


def die_while_assembling(builder: InspectGroupBuilder, lines: Sequence[str]) -> None:
    """Roll out, and get killed when the batch's log is there and its parts still are."""

    def die(run: LogRun, attempt: Attempt) -> None:
        os.kill(os.getpid(), signal.SIGKILL)

    setattr(LogRun, "remove", die)  # noqa: B010 - a fault to inject, which mypy would refuse
    roll_out(builder, lines)
    asyncio.run(asyncio.sleep(30))


def logs_in(folder: Path) -> list[EvalLog]:
    def read() -> list[EvalLog]:
        infos = list_eval_logs(str(folder), descending=False)
        return [read_eval_log(info.name, resolve_attachments="full") for info in infos]

    return run_in_thread(read)


def run_in_thread(work: Callable[..., T], *arguments: Any) -> T:
    """Call in another thread: inside a running event loop, Inspect would patch asyncio."""
    with ThreadPoolExecutor(1) as pool:
        return pool.submit(work, *arguments).result()


async def logged(
    data: InspectRLDataset, folder: Path, lines: Sequence[str], *, batch: int = 0, **options: Any
) -> EvalLog:
    """Roll out a batch, each group with the same words, and return its log."""
    for builder in data.get_batch(batch):
        await do_group_rollout(builder, Words(lines), **options)
    assemble_pending(folder)
    return only_log(folder)


def only_log(folder: Path) -> EvalLog:
    (log,) = logs_in(folder)
    return log


def samples(log: EvalLog) -> list[EvalSample]:
    assert log.samples is not None
    return log.samples


def rewards(log: EvalLog) -> list[Any]:
    return [(sample.scores or {})["reward"].value for sample in samples(log)]


def datums(groups: list[TrajectoryGroup]) -> Any:
    """Make what is trained on of rollouts, with the places that it comes from."""
    made, places = assemble_training_data(groups, compute_advantages(groups))
    return [plain(datum) for datum in made], places


def figures(log: EvalLog, name: str) -> list[Any]:
    return [sample.metadata["inspect_rl"][name] for sample in samples(log)]


def metrics(log: EvalLog, score: str) -> dict[str, float | int]:
    assert log.results is not None
    (found,) = [one for one in log.results.scores if one.name == score]
    return {name: metric.value for name, metric in found.metrics.items()}
