"""Train a tiny model to use a tool, from nothing, in a few minutes on a laptop.

    python -m example_tasks.train_boxes out/boxes

A random model never produces a whole tool call by chance. So the model is first taught by imitating
a player that opens boxes at random: it then knows how to call tools and nothing about the boxes.
Reinforcement learns the rest. The same command continues an interrupted run.
"""

from __future__ import annotations

import asyncio
import random
import re
import sys
from pathlib import Path
from typing import Any

from example_tasks.boxes import BOXES, EMPTY, WORDS
from inspect_ai.model import ModelOutput
from tinker_cookbook.renderers import get_renderer
from tinker_cookbook.rl.rollouts import do_group_rollout
from tinker_cookbook.rl.types import Trajectory
from tinker_cookbook.tokenizer_utils import get_tokenizer

from inspect_tinker_plugin.episode.types import TurnRequest
from inspect_tinker_plugin.local import imitate, make_tiny_model
from inspect_tinker_plugin.rl.dataset import as_rl_dataset
from inspect_tinker_plugin.testing import ScriptedPolicy, call, say
from inspect_tinker_plugin.train.progress import reward_curve
from inspect_tinker_plugin.train.request import TrainRequest
from inspect_tinker_plugin.train.run import InterruptedRun, train

HERE = Path(__file__).resolve().parent
TASK = f"{HERE / 'boxes.py'}@boxes"
RENDERER = "qwen3_instruct"


def play(request: TurnRequest) -> ModelOutput:
    """Open boxes at random, and submit the word that was found, or guess one."""
    answers = re.findall(r"<tool_response>\s*(\w+)", request.messages[0].text)
    again = 0.8 if not answers else 0.2 if answers[-1] == EMPTY else 0.0
    if random.random() < again:
        return say("", call("open_box", box=random.randint(1, BOXES)))
    found = answers and answers[-1] != EMPTY
    return say("", call("submit", answer=answers[-1] if found else random.choice(WORDS)))


async def games(model: Path) -> list[Trajectory]:
    """Let the random player play, in the tokens of the model."""
    renderer = get_renderer(RENDERER, get_tokenizer(str(model)))
    dataset = as_rl_dataset(TASK, renderer, batch_size=64, group_size=12)
    player: Any = ScriptedPolicy(renderer, play)  # serves as a TokenCompleter
    groups = await asyncio.gather(
        *(do_group_rollout(each, player) for each in dataset.get_batch(0))
    )
    return [trajectory for group in groups for trajectory in group.trajectories_G]


def beginner(folder: Path) -> Path:
    """Make the model that plays like the random player, unless it is there."""
    model = folder / "beginner"
    if not model.is_dir():
        untaught = make_tiny_model(folder / "random")
        imitate(untaught, model, asyncio.run(games(untaught)), say=print)
    return model


def main(folder: Path) -> None:
    """Teach, then train; everything is in ``folder`` afterwards."""
    request = TrainRequest(
        task=TASK,
        local=True,
        model=str(beginner(folder)),
        log_dir=folder / "run",
        renderer=RENDERER,
        batch_size=2,
        group_size=16,
        max_tokens=32,
        learning_rate=1.5e-3,
        options={"max_turns": 4},
    )
    result = train(request)
    print(f"\n{reward_curve(result.log_dir)}\n\nreport: {result.report}")


if __name__ == "__main__":
    try:
        main(Path(sys.argv[1] if len(sys.argv) > 1 else "out/boxes"))
    except InterruptedRun:
        sys.exit("interrupted; the same command continues")
