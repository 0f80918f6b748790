"""Episodes beside evals, whatever the start-up files of the user's shell print."""

from __future__ import annotations

import os
from pathlib import Path

import pytest


@pytest.fixture(autouse=True)
def no_start_up_files(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Let the login shells of `bash()` find none; one may print something, and on one side only."""
    docker = os.environ.get("DOCKER_CONFIG", str(Path.home() / ".docker"))
    monkeypatch.setenv("DOCKER_CONFIG", docker)  # contexts and plugins, such as compose
    monkeypatch.setenv("HOME", str(tmp_path))
