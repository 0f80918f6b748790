"""Teaches a tiny model by imitation what a random one would never try, such as a tool call.

Reinforcement needs behaviour to reinforce. This is what pretraining gives a large model: all
weights are trained, with PyTorch in this process, on the tokens that a policy sampled.
"""

from __future__ import annotations

import hashlib
import shutil
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from tinker_local.model import make_once
from tinker_local.settings import LocalConfigError

if TYPE_CHECKING:
    import torch
    from tinker_cookbook.rl.types import Trajectory

MARKER = "imitation.json"
"""Name of the file that records what a model was taught from."""

WEIGHTS = "model.safetensors"

_REPORTS = 10


@dataclass(frozen=True)
class Imitation:
    """How a model is taught. The defaults take the tiny model about a minute on two cores."""

    steps: int = 600
    """Steps of AdamW."""
    batch_size: int = 16
    """Sequences per step, drawn with replacement."""
    learning_rate: float = 3e-3
    """Highest learning rate: it rises for 20 steps and then falls to a twentieth."""
    seed: int = 0
    """Seed of the random drawing."""


@dataclass(frozen=True)
class _Lesson:
    """One sequence: inputs, next tokens, and whether the policy sampled them. Shape (T,)."""

    inputs: Sequence[int]
    targets: Sequence[int]
    sampled: Sequence[float]


def imitate(
    model: str | Path,
    path: str | Path,
    trajectories: Sequence[Trajectory],
    *,
    how: Imitation | None = None,
    say: Callable[[str], None] | None = None,
) -> Path:
    """Write a model that has learned to sample what the policy of these trajectories did.

    Args:
        model: Folder of the model to start from; it is not changed.
        path: Folder of the new model. If the same model was made there before, nothing is done.
        trajectories: Rollouts of any policy, e.g. of a scripted one.
        how: Steps, batch and learning rate.
        say: Called now and then with the step and the loss, in nats per sampled token.

    Returns:
        The new folder's absolute path, which is the model's name for server and tokenizer.

    Raises:
        LocalConfigError: No trajectories, ones that are not text, or a folder with something else.
    """
    how = how or Imitation()
    lessons = _lessons(trajectories)
    source = Path(model).expanduser().absolute()

    def write(folder: Path) -> None:
        shutil.copytree(source, folder, dirs_exist_ok=True)
        _train(folder, lessons, how, say or (lambda line: None))

    recipe = {**asdict(how), "model": _digest(source / WEIGHTS), "lessons": len(lessons)}
    return make_once(path, marker=MARKER, what="a taught model", recipe=recipe, write=write)


def _digest(file: Path) -> str:
    return hashlib.sha256(file.read_bytes()).hexdigest()[:16]


def _lessons(trajectories: Sequence[Trajectory]) -> list[_Lesson]:
    from tinker_cookbook.rl.data_processing import trajectory_to_data

    data = [datum for each in trajectories for datum in trajectory_to_data(each, 0.0)]
    if not data:
        raise LocalConfigError("there are no trajectories to imitate")
    try:
        return [
            _Lesson(
                datum.model_input.to_ints(),
                [int(token) for token in datum.loss_fn_inputs["target_tokens"].data],
                [float(weight) for weight in datum.loss_fn_inputs["mask"].data],
            )
            for datum in data
        ]
    except ValueError as error:
        raise LocalConfigError(f"only text can be imitated: {error}") from error


def _train(
    folder: Path, lessons: Sequence[_Lesson], how: Imitation, say: Callable[[str], None]
) -> None:
    # Loading these takes seconds, and only this needs them.
    import torch
    from safetensors.torch import save_file
    from transformers import AutoModelForCausalLM
    from transformers.utils import logging

    logging.disable_progress_bar()
    model = AutoModelForCausalLM.from_pretrained(str(folder), dtype=torch.float32)
    optimizer = torch.optim.AdamW(model.parameters(), lr=how.learning_rate, weight_decay=0.0)
    # The caller's random state must not change.
    draw = torch.Generator().manual_seed(how.seed)
    for step in range(how.steps):
        for group in optimizer.param_groups:
            group["lr"] = how.learning_rate * _warmth(step, how.steps)
        drawn = torch.randint(len(lessons), (how.batch_size,), generator=draw).tolist()
        loss = _loss(model, [lessons[i] for i in drawn])
        optimizer.zero_grad()
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        if (step + 1) % max(1, how.steps // _REPORTS) == 0:
            say(f"imitation step {step + 1:4d}/{how.steps}  loss {loss.item():.3f}")
    weights = {name: value.contiguous() for name, value in model.state_dict().items()}
    save_file(weights, folder / WEIGHTS, metadata={"format": "pt"})


def _warmth(step: int, steps: int) -> float:
    return min(1.0, (step + 1) / 20) * max(0.05, 1 - step / steps)


def _loss(model: Any, lessons: Sequence[_Lesson]) -> torch.Tensor:
    """Mean negative log-likelihood of the sampled tokens, right-padded to one length."""
    import torch

    length = max(len(each.inputs) for each in lessons)

    def padded(rows: Sequence[Sequence[float]]) -> torch.Tensor:
        return torch.tensor([[*row, *[0] * (length - len(row))] for row in rows])

    sampled = padded([each.sampled for each in lessons]) > 0
    there = padded([[1] * len(each.inputs) for each in lessons])
    inputs = padded([each.inputs for each in lessons])
    states = model.base_model(input_ids=inputs, attention_mask=there).last_hidden_state
    # The output layer is the widest: only what is learned from goes through it.
    logits = model.lm_head(states[sampled])
    targets = padded([each.targets for each in lessons])[sampled]
    return torch.nn.functional.cross_entropy(logits, targets)
