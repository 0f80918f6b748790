"""Makes model folders, atomically: a tiny Qwen3 for a laptop's CPU, and one that was taught.

Reinforcement needs behaviour to reinforce, such as a tool call, which a random model never tries.
Imitation gives it what pretraining gives a large model: all weights are trained, with PyTorch in
this process, on the tokens that a policy sampled.
"""

from __future__ import annotations

import hashlib
import json
import os
import shutil
import tempfile
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

from tinker_local.settings import LocalConfigError

if TYPE_CHECKING:
    import torch
    from tinker_cookbook.rl.types import Trajectory

MARKER = "tiny_model.json"
"""Name of the file that records the shape of the model."""

WEIGHTS = "model.safetensors"


_SHAPE = {
    "hidden_size": 64,
    "intermediate_size": 128,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 16,
    "max_position_embeddings": 8192,
}
"""Shape of the tiny model: 0.3 M parameters, random, float32."""

_OUTPUT_STD = 0.2
"""Spread of the output layer. LoRA leaves that layer as it is; with the usual 0.02 all
tokens stay nearly equally likely whatever the adapters learn."""


def make_tiny_model(path: str | Path, *, tokenizer: str | Path, seed: int = 0) -> Path:
    """Write config, weights and a tokenizer to ``path``, unless they are there.

    The folder's absolute path, which is returned, is the model's name for the server, for the
    SDK and for the cookbook's ``get_tokenizer``. Safe to call from several processes at once.

    Args:
        path: The folder.
        tokenizer: Folder of the tokenizer.
        seed: Seed of the weights; the same seed gives the same files.

    Raises:
        LocalConfigError: ``path`` holds something else, or a tiny model of another seed.
    """
    return make_once(
        path,
        marker=MARKER,
        what="a tiny model",
        recipe={**_SHAPE, "output_std": _OUTPUT_STD, "seed": seed},
        write=partial(_write, tokenizer_folder=Path(tokenizer), seed=seed),
    )


def _write(folder: Path, tokenizer_folder: Path, seed: int) -> None:
    # Loading these takes seconds, and only the making of a model needs them.
    import torch
    from safetensors.torch import save_file
    from transformers import AutoTokenizer, Qwen3Config, Qwen3ForCausalLM

    for name in ("tokenizer.json", "tokenizer_config.json"):
        shutil.copyfile(tokenizer_folder / name, folder / name)
    tokenizer = AutoTokenizer.from_pretrained(str(folder))
    config = Qwen3Config(
        **_SHAPE,
        vocab_size=len(tokenizer),
        tie_word_embeddings=False,
        eos_token_id=tokenizer.eos_token_id,
        pad_token_id=tokenizer.pad_token_id,
        bos_token_id=None,
        dtype="float32",
    )
    # The caller's random state must not change.
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        model = Qwen3ForCausalLM(config).to(torch.float32)
        torch.nn.init.normal_(model.lm_head.weight, std=_OUTPUT_STD)
    config.architectures = [type(model).__name__]
    config.save_pretrained(str(folder))
    # Not `model.save_pretrained`, which prints a progress bar for one small file.
    save_file(model.state_dict(), folder / WEIGHTS, metadata={"format": "pt"})


def context_length(model: str | Path) -> int | None:
    """Return how many tokens a model of this machine takes; ``None`` if its folder does not say."""
    try:
        config = json.loads((Path(model) / "config.json").read_text(encoding="utf-8"))
        return int(config["max_position_embeddings"])
    except (OSError, ValueError, KeyError, TypeError):
        return None


def check_reply_length(model: str | Path, max_tokens: int) -> None:
    """Refuse a length of replies that leaves no token for any prompt.

    Raises:
        LocalConfigError: The model takes fewer tokens.
    """
    context = context_length(model)
    if context is not None and max_tokens >= context:
        raise LocalConfigError(
            f"--max-tokens {max_tokens:,} is too much for the local model, which takes "
            f"{context:,} tokens, prompt and reply together"
        )


def make_once(
    path: str | Path,
    *,
    marker: str,
    what: str,
    recipe: Mapping[str, Any],
    write: Callable[[Path], None],
) -> Path:
    """Fill a folder, unless another call or process has already made the same one.

    Args:
        path: The folder; its parents are made too.
        marker: Name of a file that holds the recipe; written last, so a folder that has it is
            complete.
        what: Name of the folder's content in errors.
        recipe: What it is made from, as JSON.
        write: Writes everything else into the folder that is passed to it.

    Returns:
        The folder's absolute path.

    Raises:
        LocalConfigError: ``path`` holds something else, or was made from another recipe.
    """
    folder = Path(path).expanduser().absolute()
    wanted = json.loads(json.dumps(recipe))
    if folder.exists() and any(folder.iterdir()):
        _check_same(folder, marker, what, wanted)
        return folder
    folder.parent.mkdir(parents=True, exist_ok=True)
    scratch = Path(tempfile.mkdtemp(prefix=f".{folder.name}-", dir=folder.parent))
    try:
        write(scratch)
        (scratch / marker).write_text(json.dumps(wanted, indent=2) + "\n", encoding="utf-8")
        scratch.chmod(0o755)
        try:
            os.rename(scratch, folder)
        except OSError:
            # Another process was first; its folder must be the one that was asked for here.
            _check_same(folder, marker, what, wanted)
    finally:
        shutil.rmtree(scratch, ignore_errors=True)
    return folder


def _check_same(folder: Path, marker: str, what: str, wanted: Mapping[str, Any]) -> None:
    if not (folder / marker).is_file():
        raise LocalConfigError(f"{folder} exists and is not {what}: choose another folder")
    found = json.loads((folder / marker).read_text(encoding="utf-8"))
    if found != wanted:
        raise LocalConfigError(
            f"{folder} holds {what} of another kind ({found}): choose another folder"
        )


TAUGHT_MARKER = "imitation.json"
"""Name of the file that records what a model was taught from."""

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
    lessons = _read_lessons(trajectories)
    source = Path(model).expanduser().absolute()

    def write(folder: Path) -> None:
        shutil.copytree(source, folder, dirs_exist_ok=True)
        _train(folder, lessons, how, say or (lambda line: None))

    weights = hashlib.sha256((source / WEIGHTS).read_bytes()).hexdigest()[:16]
    recipe = {**asdict(how), "model": weights, "lessons": len(lessons)}
    return make_once(path, marker=TAUGHT_MARKER, what="a taught model", recipe=recipe, write=write)


def _read_lessons(trajectories: Sequence[Trajectory]) -> list[_Lesson]:
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
        warmth = min(1.0, (step + 1) / 20) * max(0.05, 1 - step / how.steps)
        for group in optimizer.param_groups:
            group["lr"] = how.learning_rate * warmth
        drawn = torch.randint(len(lessons), (how.batch_size,), generator=draw).tolist()
        loss = _compute_loss(model, [lessons[i] for i in drawn])
        optimizer.zero_grad()
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        if (step + 1) % max(1, how.steps // _REPORTS) == 0:
            say(f"imitation step {step + 1:4d}/{how.steps}  loss {loss.item():.3f}")
    weights = {name: value.contiguous() for name, value in model.state_dict().items()}
    save_file(weights, folder / WEIGHTS, metadata={"format": "pt"})


def _compute_loss(model: Any, lessons: Sequence[_Lesson]) -> torch.Tensor:
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
