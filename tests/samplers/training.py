"""A training without a model, run in a process that is killed at a given file operation.

Its rollouts are real; what the policy says depends on the sample, the step and the episode alone.
"""

from __future__ import annotations

import asyncio
import json
import os
import signal
import sys
from pathlib import Path
from typing import Any

from inspect_ai.dataset import Sample
from inspect_ai.log import read_eval_log
from tests.rl.policies import Words, renderer
from tests.rl.tasks import arithmetic
from tinker_cookbook.rl.rollouts import do_group_rollout

from inspect_tinker_plugin.logs import assemble_pending
from inspect_tinker_plugin.logs.rollout import figures
from inspect_tinker_plugin.options import DatasetOptions
from inspect_tinker_plugin.plugins.manager import default_plugins
from inspect_tinker_plugin.rl.dataset import InspectRLDataset, build_dataset
from inspect_tinker_plugin.rl.order import Sampled
from inspect_tinker_plugin.samplers import Curriculum

# Loaded once, for all processes that are forked from here.
renderer()
default_plugins()

SAMPLES = 9
GROUPS = 2
EPISODES = 2
STEPS = 10
EVERY = 2
"""Steps between checkpoints."""


def words(sample: Sample, step: int, episode: int) -> str:
    """Easy samples first, samples that become possible, and impossible ones."""
    number = int(str(sample.id).removeprefix("s"))
    right = number % 3 == 0 or (number % 3 == 1 and (episode + step) % 2)
    return str(sample.target) if right else "no"


def train(folder: Path, kill_at: int | None) -> None:
    """Train from the last checkpoint on, and get killed before the n-th file operation."""
    if kill_at is not None:
        _die_before(folder, kill_at)
    start = _checkpoint(folder)
    for name in ("config.json", "logs.log"):  # as the cookbook does, before it asks for a dataset
        (folder / name).touch()
    options = DatasetOptions(
        batch_size=GROUPS,
        group_size=EPISODES,
        epochs=9,
        seed=5,
        sampler="curriculum",
        log_dir=folder / "rollouts",
    )
    data = build_dataset(arithmetic(SAMPLES), renderer(), options, first_step=start)
    asyncio.run(_steps(data, folder, start))
    assemble_pending(folder / "rollouts")


async def _steps(data: InspectRLDataset, folder: Path, start: int) -> None:
    for step in range(start, STEPS):
        groups = data.get_batch(step)
        chosen = [str(group.sample.id) for group in groups]
        _append(folder / "groups.jsonl", {"step": step, "groups": chosen, "weights": weights(data)})
        for group in groups:
            lines = [words(group.sample, step, episode) for episode in range(EPISODES)]
            await do_group_rollout(group, Words(lines))
        if (step + 1) % EVERY == 0:
            row = {"name": f"{step + 1:06d}", "batch": step + 1, "state_path": f"state-{step + 1}"}
            _append(folder / "checkpoints.jsonl", row)


def weights(data: InspectRLDataset) -> list[float]:
    order = data._order
    assert isinstance(order, Sampled)
    assert isinstance(order.state.sampler, Curriculum)
    return order.state.sampler.weights()


def logged(folder: Path) -> list[Any]:
    """Return what the logs tell: their steps, and the episodes with their rewards."""
    found = []
    for path in (folder / "rollouts").glob("*.eval"):
        log = read_eval_log(str(path))
        assert log.eval.metadata is not None
        episodes = [
            (sample.id, sample.epoch, figures(sample)["reward"], sample.output.completion)
            for sample in log.samples or []
        ]
        found.append((log.eval.metadata["policy_step"], log.status, sorted(episodes)))
    return sorted(found)


def rows(path: Path) -> list[dict[str, Any]]:
    found = []
    for line in path.read_text().splitlines() if path.is_file() else ():
        try:
            found.append(json.loads(line))
        except ValueError:  # a kill left it unfinished
            continue
    return found


def _checkpoint(folder: Path) -> int:
    return max((row["batch"] for row in rows(folder / "checkpoints.jsonl")), default=0)


def _append(path: Path, row: dict[str, Any]) -> None:
    with path.open("a") as file:
        file.write(json.dumps(row) + "\n")


def _die_before(folder: Path, number: int) -> None:
    left = [number]

    def watch(event: str, arguments: tuple[Any, ...]) -> None:
        if event not in ("open", "os.rename", "os.remove", "os.mkdir"):
            return
        if str(folder) in str(arguments[0]):
            left[0] -= 1
            if left[0] == 0:
                os.kill(os.getpid(), signal.SIGKILL)

    sys.addaudithook(watch)
