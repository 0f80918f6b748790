"""Train a program of twenty lines that uses OpenAI's API, in a few minutes on a laptop.

    python -m example_tasks.train_diary out/diary

A random model finds one word that is half right and repeats it for ever. So the model is first
taught by imitating a writer of single letters at random, which knows nothing of the task.
Reinforcement learns which letters. The same command continues an interrupted run.
"""

from __future__ import annotations

import random
import string
import sys
from pathlib import Path

from example_tasks.teaching import Teaching, teach_and_train
from inspect_ai.model import ModelOutput

from inspect_tinker_plugin.contracts.episodes import TurnRequest
from inspect_tinker_plugin.testing import say
from tinker_local import Imitation

TASK = f"{Path(__file__).resolve().parent / 'diary.py'}@diary"
PROGRAMS = {"max_subprocesses": 32}  # at once: each waits for its model most of the time
LETTERS = 4


def write(request: TurnRequest) -> ModelOutput:
    """Write an entry of letters at random."""
    return say(" ".join(random.choices(string.ascii_lowercase, k=LETTERS)))


if __name__ == "__main__":
    teach_and_train(
        Teaching(
            task=TASK,
            play=write,
            groups=4,
            group_size=16,
            how=Imitation(steps=50),  # more would learn the entries by heart
            options=PROGRAMS,
        ),
        Path(sys.argv[1] if len(sys.argv) > 1 else "out/diary"),
        batch_size=2,
        group_size=16,
        max_tokens=2 * LETTERS,
        learning_rate=4e-3,
        steps=15,
        options=PROGRAMS,
    )
