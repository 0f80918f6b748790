"""Atomic creation of a shared folder."""

from __future__ import annotations

import json
import os
import shutil
import tempfile
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from inspect_tinker_plugin.errors import ConfigError


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
        ConfigError: ``path`` holds something else, or was made from another recipe.
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
        raise ConfigError(f"{folder} exists and is not {what}: choose another folder")
    found = json.loads((folder / marker).read_text(encoding="utf-8"))
    if found != wanted:
        raise ConfigError(f"{folder} holds {what} of another kind ({found}): choose another folder")
