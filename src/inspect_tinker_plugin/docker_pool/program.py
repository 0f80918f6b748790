"""The executor's program: process 1 of every container, built from ``native/executor.c``."""

from __future__ import annotations

import functools
import hashlib
import io
import posixpath
import tarfile
from importlib.resources import files

from inspect_tinker_plugin.errors import SandboxConfigError

FOLDER = "/.inspect-pool"
PATH = f"{FOLDER}/executor"

_NOBODY = 59123
"""Owner of the program: not a user of any image."""

_NATIVE = files(__package__) / "native"


def supports(architecture: str) -> bool:
    """Return whether there is a program for an architecture, as the engine names it."""
    return (_NATIVE / f"executor-{architecture}").is_file()


@functools.cache
def archive(architecture: str, folder: str = "/") -> bytes:
    """Pack the program for a container: anyone may run it, and nobody may change it.

    Args:
        architecture: as the engine names it.
        folder: where in the container the archive is to be unpacked.

    Raises:
        SandboxConfigError: no program for this architecture, or its file is not the one
            that belongs to this release.
    """
    if not supports(architecture):
        raise SandboxConfigError(
            f"docker_pool runs amd64 and arm64 images, not {architecture}; use Inspect's plain "
            "'docker' sandbox"
        )
    name = f"executor-{architecture}"
    program = (_NATIVE / name).read_bytes()
    digest = hashlib.sha256(program).hexdigest()
    if f"{digest}  {name}" not in (_NATIVE / "SHA256SUMS").read_text().splitlines():
        raise SandboxConfigError(
            f"{_NATIVE / name} is not the file of this release; install the package again"
        )
    buffer = io.BytesIO()
    with tarfile.open(fileobj=buffer, mode="w") as tar:
        place = tarfile.TarInfo(posixpath.relpath(FOLDER, folder))
        place.type, place.mode, place.uid, place.gid = tarfile.DIRTYPE, 0o555, _NOBODY, _NOBODY
        tar.addfile(place)
        file = tarfile.TarInfo(posixpath.relpath(PATH, folder))
        file.mode, file.uid, file.gid, file.size = 0o555, _NOBODY, _NOBODY, len(program)
        tar.addfile(file, io.BytesIO(program))
    return buffer.getvalue()
