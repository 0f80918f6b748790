"""A real Tinker API server on this machine, for training without the hosted service."""

from __future__ import annotations

from tinker_local.model import (
    Imitation,
    check_reply_length,
    context_length,
    imitate,
    make_tiny_model,
)
from tinker_local.server import LocalServer
from tinker_local.settings import (
    SERVER_FOLDER,
    LocalConfigError,
    LocalServerError,
    LocalSettings,
    missing,
)

__all__ = [
    "SERVER_FOLDER",
    "Imitation",
    "LocalConfigError",
    "LocalServer",
    "LocalServerError",
    "LocalSettings",
    "check_reply_length",
    "context_length",
    "imitate",
    "make_tiny_model",
    "missing",
]
