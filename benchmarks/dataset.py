"""Time to the first batch of a task with a thousand and with a hundred thousand samples.

Both sizes are built and asked for their first batch in turn, in one process; the task's own
dataset is made beforehand, since that is the task's work. Prints medians and their ratio.
Run ``python benchmarks/dataset.py [alternations]``.
"""

from __future__ import annotations

import statistics
import sys
import time

from inspect_ai import Task
from inspect_ai.dataset import MemoryDataset, Sample
from inspect_ai.scorer import match
from inspect_ai.solver import generate
from tinker_cookbook.renderers import get_renderer
from tinker_cookbook.tokenizer_utils import get_tokenizer

from inspect_tinker_plugin.rl.dataset import as_rl_dataset
from inspect_tinker_plugin.testing import tokenizer_path

SIZES = (1_000, 100_000)
LIMIT = 1.5
RENDERER = get_renderer("qwen3_instruct", get_tokenizer(str(tokenizer_path())))


def task(size: int) -> Task:
    samples = [Sample(id=i, input=f"What is {i}+1?", target=str(i + 1)) for i in range(size)]
    return Task(dataset=MemoryDataset(samples), solver=generate(), scorer=match())


def first_batch_ms(made: Task) -> float:
    started = time.perf_counter()
    dataset = as_rl_dataset(made, RENDERER, batch_size=64, group_size=8, shuffle=True, epochs=3)
    assert len(dataset.get_batch(0)) == 64
    return (time.perf_counter() - started) * 1000


def main(alternations: int) -> bool:
    tasks = {size: task(size) for size in SIZES}
    figures: dict[int, list[float]] = {size: [] for size in SIZES}
    for repeat in range(alternations + 1):
        for size, made in tasks.items():
            elapsed = first_batch_ms(made)
            if repeat:
                figures[size].append(elapsed)
    small, large = (statistics.median(figures[size]) for size in SIZES)
    print(f"{SIZES[0]:>7} samples  {small:6.2f} ms to the first batch")
    print(f"{SIZES[1]:>7} samples  {large:6.2f} ms to the first batch")
    print(f"ratio {large / small:.2f}  (at most {LIMIT})")
    return large / small <= LIMIT


if __name__ == "__main__":
    sys.exit(0 if main(int(sys.argv[1]) if len(sys.argv) > 1 else 9) else 1)
