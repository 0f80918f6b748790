"""Teaches a tiny model to write, and trains it on the task with the flaw, or on the mended one.

python -m examples.mended.train out/examples/mended flawed
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

TASKS = Path(__file__).with_name("spelling.py")
LETTERS = 4


def write(request: TurnRequest) -> ModelOutput:
    """Write letters at random; now and then, write none."""
    count = random.choice([0, *[LETTERS] * 9])
    return say(" ".join(random.choices(string.ascii_lowercase, k=count)))


if __name__ == "__main__":
    folder, name = sys.argv[1:]
    teach_and_train(
        Teaching(
            task=f"{TASKS}@{name}",
            play=write,
            groups=16,
            group_size=16,
            how=Imitation(steps=60),
        ),
        Path(folder),
        run=name,  # both begin with the same model
        batch_size=2,
        group_size=16,
        max_tokens=2 * LETTERS,
        learning_rate=4e-3,
        steps=20,
    )
