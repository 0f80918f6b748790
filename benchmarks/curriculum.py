"""Rollouts until a toy is learned, with passes over its samples and with the curriculum.

An eighth of the samples can be learned; the others never have a reward. A tiny model is trained on
this machine (extra `local`) until the reward on samples that can be learned is 0.9, measured
before each step.

    python benchmarks/curriculum.py --seeds 1 2 3 4 5

Limit: at least 30% fewer rollouts in the mean. Measured, seeds 1 to 5: passes 1120, 608, 1152, 1408
and 1760 rollouts, the curriculum 864, 448, 768, 768 and 640: fewer by 23%, 26%, 33%, 45% and 64%,
and by 42% in the mean. Where a quarter can be learned, most batches of passes teach something as
well, and there is little to win: with 4 groups of 8, seed 1 took 352 rollouts with passes and 448
with the curriculum.
"""

from __future__ import annotations

import argparse
import contextlib
import os
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

from inspect_tinker_plugin.testing import tokenizer_path
from tinker_local import LocalServer, make_tiny_model

ALLOWED = "abcdefghijklm"
GOAL = 0.9
LIMIT = 0.3
GROUPS = 2
EPISODES = 16
TESTED = 16
TEST = "test/env/all/reward/total"


@task
def mixed(samples: int = 32, possible: int = 8) -> Task:
    """Reply with a token that begins with an allowed letter; only every few samples pay for it.

    Args:
        samples: Size of the dataset.
        possible: Every how-manieth sample can earn something.
    """
    return Task(
        dataset=MemoryDataset(
            [
                Sample(
                    id=number,
                    input=f"{number}. Begin with one of these letters: {ALLOWED}",
                    metadata={"possible": number % possible == 0},
                )
                for number in range(1, samples + 1)
            ]
        ),
        solver=generate(),
        scorer=begins_as_asked(),
    )


@scorer(metrics=[mean()])
def begins_as_asked() -> Scorer:
    async def score(state: TaskState, target: Target) -> Score:
        right = state.output.completion[:1] in set(ALLOWED)
        return Score(value=float(right and state.metadata["possible"]))

    return score


def run(
    folder: Path, server: str, model: str, *, seed: int, sampler: str | None, steps: int
) -> tuple[int | None, list[float]]:
    """Train until the goal is reached.

    Returns:
        Training rollouts until then (``None`` if it was not), and the test reward before each step.
    """
    from inspect_tinker_plugin.train.history import read_steps
    from inspect_tinker_plugin.train.request import TrainRequest
    from inspect_tinker_plugin.train.run import InterruptedRun, train

    request = TrainRequest(
        task=f"{Path(__file__)}@mixed",
        model=model,
        base_url=server,
        renderer="qwen3_instruct",
        max_tokens=1,
        lora_rank=16,
        learning_rate=5e-4,
        log_dir=folder,
        steps=steps,
        batch_size=GROUPS,
        group_size=EPISODES,
        eval_every=1,
        save_every=0,
        test_task=f"{Path(__file__)}@mixed",
        test_task_args={"samples": TESTED, "possible": 1},
        allow_overlap=True,
        options={"shuffle": True, "seed": seed, "sampler": sampler},
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


def main() -> None:
    say: Callable[[str], None] = partial(print, flush=True)
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--seeds", type=int, nargs="+", default=[1, 2, 3, 4, 5])
    parser.add_argument("--steps", type=int, default=80, help="steps after which a run is given up")
    parser.add_argument("--sampler", default="curriculum")
    arguments = parser.parse_args()
    needed: dict[str, list[int]] = {"passes": [], arguments.sampler: []}
    limit = arguments.steps * GROUPS * EPISODES
    with tempfile.TemporaryDirectory(prefix="inspect-rl-curriculum-") as name:
        model = str(make_tiny_model(Path(name) / "model", tokenizer=tokenizer_path()))
        with LocalServer(model, state_dir=Path(name) / "server") as server, server.export_environ():
            for seed in arguments.seeds:
                for sampler, found in needed.items():
                    folder = Path(tempfile.mkdtemp(dir=name))
                    work = partial(
                        run,
                        folder,
                        server.url,
                        model,
                        seed=seed,
                        sampler=None if sampler == "passes" else sampler,
                        steps=arguments.steps,
                    )
                    begun = time.monotonic()
                    # Each in its own process, whose clients end with it.
                    with ProcessPoolExecutor(1, mp_context=get_context("spawn")) as pool:
                        rollouts, rewards = pool.submit(work).result()
                    found.append(limit if rollouts is None else rollouts)
                    shown = " ".join(f"{reward:.2f}" for reward in rewards)
                    result = f"not in {limit}" if rollouts is None else f"{rollouts}"
                    say(
                        f"seed {seed}  {sampler:<12} {result} rollouts  "
                        f"{time.monotonic() - begun:.0f} s  test reward before each step: {shown}"
                    )
    passes, other = needed.values()
    pairs = list(zip(passes, other, strict=True))
    fewer = 1 - statistics.fmean(other) / statistics.fmean(passes)
    say(f"rollouts; {limit} stands for runs that did not reach {GOAL}")
    say(f"passes      {passes}  mean {statistics.fmean(passes):.0f}")
    say(f"{arguments.sampler:<11} {other}  mean {statistics.fmean(other):.0f}")
    say(f"fewer by    {[f'{1 - with_ / without:.0%}' for without, with_ in pairs]}")
    verdict = "met" if fewer >= LIMIT else "missed"
    say(f"fewer by    {fewer:.0%} in the mean (limit {LIMIT:.0%}: {verdict})")


if __name__ == "__main__":
    main()
