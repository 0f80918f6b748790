"""Folders of corpora whose tasks need files: they last as long as the process of the tests."""

from __future__ import annotations

import atexit
import shutil
from pathlib import Path
from tempfile import mkdtemp


def made_folder(name: str) -> Path:
    """Make a folder that is removed when this process ends."""
    folder = Path(mkdtemp(prefix=f"{name}-"))
    atexit.register(shutil.rmtree, folder, ignore_errors=True)
    return folder
