"""Files of a container: the executor itself writes them as its user and reads any as root."""

from __future__ import annotations

import errno
import os
import posixpath
from pathlib import PurePosixPath

from inspect_ai.util import OutputLimitExceededError, SandboxEnvironmentLimits

from inspect_docker_pool.command import (
    End,
    FailedAt,
    Flag,
    How,
    RequestKind,
    lost,
    raise_misuse,
)
from inspect_docker_pool.container import Container

_TIMEOUT = 600.0


async def write(container: Container, path: str, contents: bytes) -> None:
    """Write a file as the container's user; parents are made.

    Raises:
        IsADirectoryError: the path is a directory.
        PermissionError: the user may not write there.
        OSError: the kernel's own reason, or the path is no regular file (``EINVAL``). Nothing
            is raised only if the file then had these contents.
    """
    path = str(PurePosixPath(path))
    call = await container.request(
        RequestKind.WRITE,
        (container.user, path, str(len(contents))),
        stdin=contents,
        timeout=_TIMEOUT,
        limit=0,
    )
    end = call.end
    assert end is not None
    raise_misuse(end)
    if end.how is How.DONE:
        return
    if Flag.TIMED_OUT in end.flags:
        raise TimeoutError(f"writing {path} took more than {_TIMEOUT:.0f} seconds")
    raise _error(end, path)


async def read(container: Container, path: str, name: str) -> bytes:
    """Read a regular file, following links, whoever owns it.

    The executor reads it, so that no program of the container, which a policy may have
    replaced, is involved.

    Raises:
        FileNotFoundError, IsADirectoryError, PermissionError: as their names say.
        OutputLimitExceededError: larger than Inspect's limit for reads.
        OSError: the kernel's own reason, or not a regular file (``EINVAL``).
    """
    limit = SandboxEnvironmentLimits.MAX_READ_FILE_SIZE
    if posixpath.basename(path.rstrip("/")) in (".", "..", ""):
        raise _os_error(errno.EISDIR, name)
    path = str(PurePosixPath(path))
    call = await container.request(RequestKind.READ, ("0", path), timeout=_TIMEOUT, limit=limit)
    end = call.end
    assert end is not None
    raise_misuse(end)
    if end.stage is FailedAt.SIZE or Flag.OVERFLOWED in end.flags:
        too_large = SandboxEnvironmentLimits.MAX_READ_FILE_SIZE_STR
        raise OutputLimitExceededError(limit_str=too_large, truncated_output=None)
    if end.how is How.DONE:
        return bytes(call.out.data)
    if Flag.TIMED_OUT in end.flags:
        raise TimeoutError(f"reading {name} took more than {_TIMEOUT:.0f} seconds")
    raise _error(end, name)


def _error(end: End, name: str) -> Exception:
    if end.how is not How.NOT_STARTED:
        return lost()
    return _os_error(end.error, name)


def _os_error(number: int, name: str) -> OSError:
    reason = "Not a regular file" if number == errno.EINVAL else os.strerror(number)
    if number == errno.EROFS:
        return PermissionError(number, f"{reason}.", name)
    # With a full stop, as in Inspect's Docker provider; the model sees this text.
    return OSError(number, f"{reason}.", name)  # Python makes it the subclass of its number
