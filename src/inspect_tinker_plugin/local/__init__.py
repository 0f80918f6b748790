"""A real Tinker API server on this machine, for training without the hosted service."""

from __future__ import annotations

from inspect_tinker_plugin.local.checkpoints import SERVER_FOLDER, has_training_checkpoint
from inspect_tinker_plugin.local.imitation import Imitation, imitate
from inspect_tinker_plugin.local.model import (
    TOKENIZER_FOLDER,
    TinyModel,
    check_reply_length,
    context_length,
    make_tiny_model,
)
from inspect_tinker_plugin.local.server import LocalServer, LocalServerError
from inspect_tinker_plugin.local.settings import LocalSettings, missing

__all__ = [
    "SERVER_FOLDER",
    "TOKENIZER_FOLDER",
    "Imitation",
    "LocalServer",
    "LocalServerError",
    "LocalSettings",
    "TinyModel",
    "check_reply_length",
    "context_length",
    "has_training_checkpoint",
    "imitate",
    "make_tiny_model",
    "missing",
]
