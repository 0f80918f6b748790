"""Where a local server keeps the checkpoints of a training."""

from __future__ import annotations

import re
from pathlib import Path

SERVER_FOLDER = "local-server"
"""The server's folder, in that of the run that started it."""

FOLDER = "checkpoints"
"""The checkpoints' folder, in the server's."""


def checkpoint_file(checkpoints: Path, model_id: str, name: str, *, sampler: bool) -> Path:
    """Return where a checkpoint is: a file with weights to sample from, or a folder."""
    return checkpoints / model_id / ("sampler_weights" if sampler else "") / f"{name}.tar.gz"


def is_training_checkpoint(path: Path) -> bool:
    """Whether a folder holds what a training goes on from."""
    return path.is_dir() and any(path.glob("checkpoint_*"))


def has_training_checkpoint(state_dir: Path, path: str) -> bool:
    """Whether the server of a folder still has a checkpoint, of path ``tinker://...``."""
    named = re.fullmatch(r"tinker://([^/]+)/weights/([^/]+)", path)
    return named is None or is_training_checkpoint(
        checkpoint_file(state_dir / FOLDER, named[1], named[2], sampler=False)
    )
