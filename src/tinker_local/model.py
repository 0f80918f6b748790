"""Makes the folder of a tiny Qwen3 for a laptop's CPU, and reads how many tokens a model takes."""

from __future__ import annotations

import json
import os
import shutil
import tempfile
from dataclasses import asdict, dataclass
from pathlib import Path

from tinker_local.settings import LocalConfigError

MARKER = "tiny_model.json"
"""Name of the file that records the shape of the model; written last."""


@dataclass(frozen=True)
class TinyModel:
    """Shape of the tiny model: 0.3 M parameters, random, float32."""

    hidden_size: int = 64
    intermediate_size: int = 128
    num_hidden_layers: int = 2
    num_attention_heads: int = 4
    num_key_value_heads: int = 2
    head_dim: int = 16
    max_position_embeddings: int = 8192
    output_std: float = 0.2
    """Spread of the output layer. LoRA leaves that layer as it is; with the usual 0.02 all
    tokens stay nearly equally likely whatever the adapters learn."""
    seed: int = 0
    """Seed of the weights; the same seed gives the same files."""


def make_tiny_model(path: str | Path, *, tokenizer: str | Path, seed: int = 0) -> Path:
    """Write config, weights and a tokenizer to ``path``, unless they are there.

    The folder's absolute path, which is returned, is the model's name for the server, for the
    SDK and for the cookbook's ``get_tokenizer``. Safe to call from several processes at once.

    Raises:
        LocalConfigError: ``path`` holds something else, or a tiny model of another seed.
    """
    folder, shape = Path(path).expanduser().absolute(), TinyModel(seed=seed)
    if folder.exists() and any(folder.iterdir()):
        _check_same(folder, shape)
        return folder
    folder.parent.mkdir(parents=True, exist_ok=True)
    scratch = Path(tempfile.mkdtemp(prefix=f".{folder.name}-", dir=folder.parent))
    try:
        _write(scratch, shape, Path(tokenizer))
        (scratch / MARKER).write_text(json.dumps(asdict(shape), indent=2) + "\n", encoding="utf-8")
        scratch.chmod(0o755)
        try:
            os.rename(scratch, folder)
        except OSError:
            # Another process was first; its folder must be the one that was asked for here.
            _check_same(folder, shape)
    finally:
        shutil.rmtree(scratch, ignore_errors=True)
    return folder


def _check_same(folder: Path, shape: TinyModel) -> None:
    if not (folder / MARKER).is_file():
        raise LocalConfigError(f"{folder} exists and is not a tiny model: choose another folder")
    found = json.loads((folder / MARKER).read_text(encoding="utf-8"))
    if found != asdict(shape):
        raise LocalConfigError(
            f"{folder} holds a tiny model of another kind ({found}): choose another folder"
        )


def _write(folder: Path, shape: TinyModel, tokenizer_folder: Path) -> None:
    # Loading these takes seconds, and only the making of a model needs them.
    import torch
    from safetensors.torch import save_file
    from transformers import AutoTokenizer, Qwen3Config, Qwen3ForCausalLM

    for name in ("tokenizer.json", "tokenizer_config.json"):
        shutil.copyfile(tokenizer_folder / name, folder / name)
    tokenizer = AutoTokenizer.from_pretrained(str(folder))
    config = Qwen3Config(
        vocab_size=len(tokenizer),
        hidden_size=shape.hidden_size,
        intermediate_size=shape.intermediate_size,
        num_hidden_layers=shape.num_hidden_layers,
        num_attention_heads=shape.num_attention_heads,
        num_key_value_heads=shape.num_key_value_heads,
        head_dim=shape.head_dim,
        max_position_embeddings=shape.max_position_embeddings,
        tie_word_embeddings=False,
        eos_token_id=tokenizer.eos_token_id,
        pad_token_id=tokenizer.pad_token_id,
        bos_token_id=None,
        dtype="float32",
    )
    # The caller's random state must not change.
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(shape.seed)
        model = Qwen3ForCausalLM(config).to(torch.float32)
        torch.nn.init.normal_(model.lm_head.weight, std=shape.output_std)
    config.architectures = [type(model).__name__]
    config.save_pretrained(str(folder))
    # Not `model.save_pretrained`, which prints a progress bar for one small file.
    save_file(model.state_dict(), folder / "model.safetensors", metadata={"format": "pt"})


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
