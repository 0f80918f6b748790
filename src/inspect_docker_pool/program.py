"""Programs that are shipped for containers, read and verified; the executor's archive.

The executor is process 1 of every container, built from ``native/executor.c``. The relay of agent
programs (``agents/native``) is read here as well.
"""

from __future__ import annotations

import functools
import hashlib
import io
import posixpath
import tarfile
from importlib.resources import files
from importlib.resources.abc import Traversable

from inspect_docker_pool.errors import SandboxConfigError

FOLDER = "/.inspect-pool"
PATH = f"{FOLDER}/executor"

_NOBODY = 59123
"""Owner of the program: not a user of any image."""

_NATIVE = files(__package__) / "native"


def supports(architecture: str) -> bool:
    """Return whether there is a program for an architecture, as the engine names it."""
    return (_NATIVE / f"executor-{architecture}").is_file()


def verified(folder: Traversable, name: str) -> bytes:
    """Read a shipped program.

    Args:
        folder: where it is, with ``SHA256SUMS``.
        name: its file.

    Raises:
        SandboxConfigError: the file is missing, or is not the one of this release.
    """
    try:
        program = (folder / name).read_bytes()
        sums = (folder / "SHA256SUMS").read_text().splitlines()
    except OSError as ex:
        raise SandboxConfigError(
            f"{folder / name} cannot be read ({ex.strerror}); install the package again"
        ) from ex
    if f"{hashlib.sha256(program).hexdigest()}  {name}" not in sums:
        raise SandboxConfigError(
            f"{folder / name} is not the file of this release; install the package again"
        )
    return program


@functools.cache
def archive(architecture: str, folder: str = "/") -> bytes:
    """Pack the program for a container: anyone may run it, and nobody may change it.

    Args:
        architecture: as the engine names it.
        folder: where in the container the archive is to be unpacked.

    Raises:
        SandboxConfigError: no program for this architecture, or its file is missing or not the
            one that belongs to this release.
    """
    if not supports(architecture):
        raise SandboxConfigError(
            f"docker_pool runs amd64 and arm64 images, not {architecture}; use Inspect's plain "
            "'docker' sandbox"
        )
    program = verified(_NATIVE, f"executor-{architecture}")
    buffer = io.BytesIO()
    with tarfile.open(fileobj=buffer, mode="w") as tar:
        place = tarfile.TarInfo(posixpath.relpath(FOLDER, folder))
        place.type, place.mode, place.uid, place.gid = tarfile.DIRTYPE, 0o555, _NOBODY, _NOBODY
        tar.addfile(place)
        file = tarfile.TarInfo(posixpath.relpath(PATH, folder))
        file.mode, file.uid, file.gid, file.size = 0o555, _NOBODY, _NOBODY, len(program)
        tar.addfile(file, io.BytesIO(program))
    return buffer.getvalue()
