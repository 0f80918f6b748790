"""Rollouts until a toy is learned, with passes over its samples and with the curriculum.

A quarter of the samples can be learned; the others never have a reward. A tiny model is trained on
this machine (extra `local`) until the reward on samples that can be learned is 0.9, before a step.

    python benchmarks/curriculum.py --seeds 1 2 3 4 5

A gain is not shown yet: of three seeds the curriculum reached the goal in one (448 rollouts) and
passes in another (544); the four other runs settled at a test reward of 0.65 to 0.8.
"""

from __future__ import annotations

import argparse
import contextlib
import os
import shutil
import signal
import statistics
import tempfile
import time
from collections.abc import Callable
from concurrent.futures import ProcessPoolExecutor
from functools import partial
from multiprocessing import get_context
from pathlib import Path

from inspect_ai import Task, task
from inspect_ai.dataset import MemoryDataset, Sample
from inspect_ai.scorer import Score, Scorer, Target, mean, scorer
from inspect_ai.solver import TaskState, generate

ALLOWED = "abcdefghijklm"
GOAL = 0.9
GROUPS = 2
EPISODES = 16
TEST = "test/env/all/reward/total"


@task
def mixed(samples: int = 16, possible: int = 4) -> Task:
    """Reply with nothing but the allowed letters; only every few samples pay for it.

    Args:
        samples: Size of the dataset.
        possible: Every how-manieth sample can earn something.
    """
    return Task(
        dataset=MemoryDataset(
            [
                Sample(
                    id=number,
                    input=f"{number}. Write some of these letters: {ALLOWED}",
                    metadata={"possible": number % possible == 0},
                )
                for number in range(1, samples + 1)
            ]
        ),
        solver=generate(),
        scorer=share_where_possible(),
    )


@scorer(metrics=[mean()])
def share_where_possible() -> Scorer:
    async def score(state: TaskState, target: Target) -> Score:
        text = state.output.completion
        value = sum(letter in ALLOWED for letter in text) / len(text) if text else 0.0
        return Score(value=value if state.metadata["possible"] else 0.0)

    return score


def run(
    folder: Path, *, seed: int, sampler: str | None, steps: int
) -> tuple[int | None, list[float]]:
    """Train until the goal is reached.

    Returns:
        Training rollouts until then (``None`` if it was not), and the test reward before each step.
    """
    from inspect_tinker_plugin.train.metrics import read_steps
    from inspect_tinker_plugin.train.request import TrainRequest
    from inspect_tinker_plugin.train.run import InterruptedRun, train

    request = TrainRequest(
        task=f"{Path(__file__)}@mixed",
        local=True,
        log_dir=folder,
        steps=steps,
        batch_size=GROUPS,
        group_size=EPISODES,
        seed=seed,
        eval_every=1,
        save_every=0,
        test_task=f"{Path(__file__)}@mixed",
        test_task_args={"possible": 1},
        allow_overlap=True,
        options={"shuffle": True, **({} if sampler is None else {"sampler": sampler})},
        say=stop_at_the_goal,
    )
    with contextlib.suppress(InterruptedRun):
        train(request)
    rewards = [row[TEST] for row in read_steps(folder).values() if TEST in row]
    reached = next((step for step, reward in enumerate(rewards) if reward >= GOAL), None)
    return None if reached is None else reached * GROUPS * EPISODES, rewards


def stop_at_the_goal(line: str) -> None:
    words = line.split()
    if words[:2] == ["test", "reward"] and float(words[2]) >= GOAL:
        os.kill(os.getpid(), signal.SIGTERM)


def main(say: Callable[[str], None] = print) -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--seeds", type=int, nargs="+", default=[1, 2, 3, 4, 5])
    parser.add_argument("--steps", type=int, default=40, help="steps after which a run is given up")
    parser.add_argument("--sampler", default="curriculum")
    arguments = parser.parse_args()
    needed: dict[str, list[int]] = {"passes": [], arguments.sampler: []}
    for seed in arguments.seeds:
        for name, found in needed.items():
            folder = Path(tempfile.mkdtemp(prefix="inspect-rl-curriculum-"))
            begun = time.monotonic()
            sampler = None if name == "passes" else name
            work = partial(run, folder, seed=seed, sampler=sampler, steps=arguments.steps)
            try:
                # Each in its own process, whose clients end with it.
                with ProcessPoolExecutor(1, mp_context=get_context("spawn")) as pool:
                    rollouts, rewards = pool.submit(work).result()
            finally:
                shutil.rmtree(folder, ignore_errors=True)
            limit = arguments.steps * GROUPS * EPISODES
            found.append(limit if rollouts is None else rollouts)
            shown = " ".join(f"{reward:.2f}" for reward in rewards)
            result = f"{rollouts} rollouts" if rollouts is not None else f"not in {limit} rollouts"
            say(
                f"seed {seed}  {name:<12} {result}  {time.monotonic() - begun:.0f} s  "
                f"test reward before each step: {shown}"
            )
    passes, other = needed.values()
    pairs = list(zip(passes, other, strict=True))
    say(f"rollouts; {limit} stands for runs that did not reach {GOAL}")
    say(f"passes      {passes}  mean {statistics.fmean(passes):.0f}")
    say(f"{arguments.sampler:<11} {other}  mean {statistics.fmean(other):.0f}")
    say(f"fewer by    {[f'{1 - with_ / without:.0%}' for without, with_ in pairs]}")
    say(f"fewer by    {1 - statistics.fmean(other) / statistics.fmean(passes):.0%} in the mean")


if __name__ == "__main__":
    main()
