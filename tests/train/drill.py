"""A training on a running server, in a process that is killed at a given file operation.

Its model is real; its rewards depend on the sample and the episode alone, so that a training that
was killed can be compared with one that was not.
"""

from __future__ import annotations

import os
import signal
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from inspect_ai import Task, task
from inspect_ai.dataset import MemoryDataset, Sample
from inspect_ai.scorer import Score, Scorer, Target, mean, scorer
from inspect_ai.solver import TaskState, generate

from inspect_tinker_plugin.plugins.manager import default_plugins
from inspect_tinker_plugin.train.history import TEST_LOGS
from inspect_tinker_plugin.train.request import TrainRequest
from inspect_tinker_plugin.train.run import train

# Loaded once, for all processes that are forked from here.
default_plugins()

STEPS = 4
GROUPS = 2
EPISODES = 2
SAVE_EVERY = 2


@task
def numbers(first: int = 0, samples: int = 9) -> Task:
    """Samples that are easy, useful and impossible in turn."""
    return Task(
        dataset=MemoryDataset([Sample(id=n, input=f"{n}") for n in range(first, first + samples)]),
        solver=generate(),
        scorer=by_number(),
    )


@scorer(metrics=[mean()])
def by_number() -> Scorer:
    async def score(state: TaskState, target: Target) -> Score:
        number = int(state.sample_id)
        return Score(value=[1.0, float(state.epoch % 2), 0.0][number % 3])

    return score


def run(
    folder: Path,
    model: Path,
    environ: Mapping[str, str],
    kill_at: int | None,
    in_last_evaluation: bool = False,
    workers: int | None = None,
    ray: str | None = None,
) -> None:
    """Train from the last checkpoint on, and get killed before the n-th file operation.

    Operations are counted from the start, or from the evaluation of the last weights on.
    """
    os.environ.update(environ)
    seen = _watch(folder, kill_at, in_last_evaluation)
    task = f"{__file__}@numbers"
    request = TrainRequest(
        task=task,
        test_task=task,
        test_task_args={"first": 100, "samples": 2},
        model=str(model),
        base_url=environ["TINKER_BASE_URL"],
        renderer="qwen3_instruct",
        log_dir=folder,
        steps=STEPS,
        batch_size=GROUPS,
        group_size=EPISODES,
        max_tokens=1,
        learning_rate=1e-4,
        lora_rank=8,
        save_every=SAVE_EVERY,
        eval_every=2,
        options={"sampler": "curriculum", "seed": 5},
        workers=workers,
        ray=ray,
        say=lambda line: None,
    )
    train(request)
    if kill_at is None:
        (folder.parent / "operations").write_text(str(seen[0]))


def _watch(folder: Path, kill_at: int | None, in_last_evaluation: bool) -> list[int]:
    seen = [0]
    checkpoints = folder / "checkpoints.jsonl"

    def watch(event: str, arguments: tuple[Any, ...]) -> None:
        if event not in ("open", "os.rename", "os.remove", "os.mkdir"):
            return
        path = str(arguments[0])
        if in_last_evaluation and (
            TEST_LOGS not in path
            or not checkpoints.is_file()
            or '"final"' not in checkpoints.read_text(encoding="utf-8")
        ):
            return
        if str(folder) in path:
            seen[0] += 1
            if seen[0] == kill_at:
                os.kill(os.getpid(), signal.SIGKILL)

    sys.addaudithook(watch)
    return seen
