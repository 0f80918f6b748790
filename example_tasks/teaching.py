"""Teach an untrained tiny model, and then train it: what the training examples share.

A random model does next to nothing that a task could reward. So it first imitates a player that
acts at random, which knows how to act and nothing about the task; reinforcement learns the rest.
Imitation trains all weights, with PyTorch in this process, on the tokens that the player said.
"""

from __future__ import annotations

import asyncio
import shutil
import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

from inspect_ai.model import ModelOutput
from tinker_cookbook.renderers import get_renderer
from tinker_cookbook.rl.data_processing import trajectory_to_data
from tinker_cookbook.rl.rollouts import do_group_rollout
from tinker_cookbook.rl.types import Trajectory
from tinker_cookbook.tokenizer_utils import get_tokenizer

from inspect_tinker_plugin.contracts.episodes import TurnRequest
from inspect_tinker_plugin.rl.dataset import as_rl_dataset
from inspect_tinker_plugin.testing import ScriptedPolicy, tokenizer_path
from inspect_tinker_plugin.train.progress import reward_curve
from inspect_tinker_plugin.train.request import TrainRequest
from inspect_tinker_plugin.train.run import InterruptedRun, train
from tinker_local import make_tiny_model

if TYPE_CHECKING:
    import tinker
    import torch

RENDERER = "qwen3_instruct"

BATCH_SIZE = 16
"""Sequences per step of imitation, drawn with replacement."""

LEARNING_RATE = 3e-3
"""Highest rate of the imitation: it rises for 20 steps and then falls to a twentieth."""


@dataclass(frozen=True, kw_only=True)
class Teaching:
    """What is imitated: games of a player that acts at random."""

    task: str
    play: Callable[[TurnRequest], ModelOutput]
    groups: int
    group_size: int
    steps: int = 600
    """Steps of imitation; 600 take about a minute on two cores."""
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
            imitate(untaught, model, self.games(untaught), steps=self.steps)
        return model


def imitate(model: Path, path: Path, games: Sequence[Trajectory], *, steps: int) -> None:
    """Write a model that has learned to sample what was said in games, from one that has not."""
    import torch
    from safetensors.torch import save_file
    from transformers import AutoModelForCausalLM
    from transformers.utils import logging

    logging.disable_progress_bar()
    lessons = [datum for game in games for datum in trajectory_to_data(game, 0.0)]
    pupil = AutoModelForCausalLM.from_pretrained(str(model), dtype=torch.float32)
    optimizer = torch.optim.AdamW(pupil.parameters(), lr=LEARNING_RATE, weight_decay=0.0)
    draw = torch.Generator().manual_seed(0)
    for step in range(steps):
        for group in optimizer.param_groups:
            group["lr"] = LEARNING_RATE * min(1.0, (step + 1) / 20) * max(0.05, 1 - step / steps)
        drawn = torch.randint(len(lessons), (BATCH_SIZE,), generator=draw).tolist()
        loss = compute_loss(pupil, [lessons[i] for i in drawn])
        optimizer.zero_grad()
        loss.backward()
        torch.nn.utils.clip_grad_norm_(pupil.parameters(), 1.0)
        optimizer.step()
        if (step + 1) % max(1, steps // 10) == 0:
            print(f"imitation step {step + 1:4d}/{steps}  loss {loss.item():.3f}")
    scratch = path.with_suffix(".part")
    shutil.copytree(model, scratch, dirs_exist_ok=True)
    weights = {name: value.contiguous() for name, value in pupil.state_dict().items()}
    save_file(weights, scratch / "model.safetensors", metadata={"format": "pt"})
    scratch.rename(path)


def compute_loss(pupil: Any, lessons: Sequence[tinker.Datum]) -> torch.Tensor:
    """Mean negative log-likelihood of the sampled tokens, right-padded to one length."""
    import torch

    length = max(datum.model_input.length for datum in lessons)

    def padded(rows: Sequence[Sequence[float]]) -> torch.Tensor:
        return torch.tensor([[*row, *[0] * (length - len(row))] for row in rows])

    sampled = padded([datum.loss_fn_inputs["mask"].data for datum in lessons]) > 0
    inputs = padded([datum.model_input.to_ints() for datum in lessons])
    there = padded([[1] * datum.model_input.length for datum in lessons])
    states = pupil.base_model(input_ids=inputs, attention_mask=there).last_hidden_state
    # The output layer is the widest: only what is learned from goes through it.
    logits = pupil.lm_head(states[sampled])
    targets = padded([datum.loss_fn_inputs["target_tokens"].data for datum in lessons])[sampled]
    return torch.nn.functional.cross_entropy(logits, targets)


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
