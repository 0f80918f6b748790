"""Teach an untrained tiny model, and then train it: what the training examples share.

A random model does next to nothing that a task could reward. So it first imitates a player that
acts at random, which knows how to act and nothing about the task; reinforcement learns the rest.
"""

from __future__ import annotations

import asyncio
import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from inspect_ai.model import ModelOutput
from tinker_cookbook.renderers import get_renderer
from tinker_cookbook.rl.rollouts import do_group_rollout
from tinker_cookbook.rl.types import Trajectory
from tinker_cookbook.tokenizer_utils import get_tokenizer

from inspect_tinker_plugin.contracts.episodes import TurnRequest
from inspect_tinker_plugin.rl.dataset import as_rl_dataset
from inspect_tinker_plugin.testing import ScriptedPolicy, tokenizer_path
from inspect_tinker_plugin.train.progress import reward_curve
from inspect_tinker_plugin.train.request import TrainRequest
from inspect_tinker_plugin.train.run import InterruptedRun, train
from tinker_local import Imitation, imitate, make_tiny_model

RENDERER = "qwen3_instruct"


@dataclass(frozen=True, kw_only=True)
class Teaching:
    """What is imitated: games of a player that acts at random."""

    task: str
    play: Callable[[TurnRequest], ModelOutput]
    groups: int
    group_size: int
    how: Imitation = field(default_factory=Imitation)
    options: dict[str, Any] = field(default_factory=dict)

    def games(self, model: Path) -> Sequence[Trajectory]:
        """Let the player play, in the tokens of the model."""
        renderer = get_renderer(RENDERER, get_tokenizer(str(model)))
        dataset = as_rl_dataset(
            self.task,
            renderer,
            batch_size=self.groups,
            group_size=self.group_size,
            **self.options,
        )
        player: Any = ScriptedPolicy(renderer, self.play)  # serves as a TokenCompleter

        async def play() -> list[Trajectory]:
            groups = [do_group_rollout(each, player) for each in dataset.get_batch(0)]
            return [one for group in await asyncio.gather(*groups) for one in group.trajectories_G]

        return asyncio.run(play())

    def beginner(self, folder: Path) -> Path:
        """Make the model that plays like the random player, unless it is there."""
        model = folder / "beginner"
        if not model.is_dir():
            untaught = make_tiny_model(folder / "random", tokenizer=tokenizer_path())
            imitate(untaught, model, self.games(untaught), how=self.how, say=print)
        return model


def teach_and_train(teaching: Teaching, folder: Path, *, run: str = "run", **training: Any) -> None:
    """Teach, then train; everything is in ``folder`` afterwards.

    Args:
        teaching: What the model imitates first.
        folder: Where the models and the run are. The same call continues an interrupted run.
        run: Name of the run's folder; runs in one folder begin with the same model.
        training: Further fields of the :class:`TrainRequest`.
    """
    try:
        request = TrainRequest(
            task=teaching.task,
            local=True,
            model=str(teaching.beginner(folder)),
            log_dir=folder / run,
            renderer=RENDERER,
            **training,
        )
        result = train(request)
    except InterruptedRun:
        sys.exit("interrupted; the same command continues")
    print(f"\n{reward_curve(result.log_dir)}\n\nreport: {result.report}")
