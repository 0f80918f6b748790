"""Train a tiny model to use a tool, from nothing, in a few minutes on a laptop.

    python -m example_tasks.train_boxes out/boxes

A random model never produces a whole tool call by chance. So the model is first taught by imitating
a player that opens boxes at random: it then knows how to call tools and nothing about the boxes.
Reinforcement learns the rest. The same command continues an interrupted run.
"""

from __future__ import annotations

import random
import re
import sys
from pathlib import Path

from example_tasks.boxes import BOXES, EMPTY, WORDS
from example_tasks.teaching import Teaching, teach_and_train
from inspect_ai.model import ModelOutput

from inspect_tinker_plugin.contracts.episodes import TurnRequest
from inspect_tinker_plugin.testing import call, say

TASK = f"{Path(__file__).resolve().parent / 'boxes.py'}@boxes"


def play(request: TurnRequest) -> ModelOutput:
    """Open boxes at random, and submit the word that was found, or guess one."""
    answers = re.findall(r"<tool_response>\s*(\w+)", request.messages[0].text)
    again = 0.8 if not answers else 0.2 if answers[-1] == EMPTY else 0.0
    if random.random() < again:
        return say("", call("open_box", box=random.randint(1, BOXES)))
    found = answers and answers[-1] != EMPTY
    return say("", call("submit", answer=answers[-1] if found else random.choice(WORDS)))


if __name__ == "__main__":
    teach_and_train(
        Teaching(task=TASK, play=play, groups=64, group_size=12),
        Path(sys.argv[1] if len(sys.argv) > 1 else "out/boxes"),
        batch_size=2,
        group_size=16,
        max_tokens=32,
        learning_rate=1.5e-3,
        options={"max_turns": 4},
    )
