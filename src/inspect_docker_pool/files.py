"""Files of a container: the executor itself writes them as its user and reads them as its root."""

from __future__ import annotations

import errno
import io
import os
import posixpath
import stat
import tarfile
from pathlib import PurePosixPath
from typing import Any

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
from inspect_docker_pool.engine import Engine, typed
from inspect_docker_pool.errors import SandboxDiedError, SandboxError

_TIMEOUT = 600.0
_LINKS = 40
_DIRECTORY, _SYMLINK = 1 << 31, 1 << 27
_REASONS = {
    "too many links": errno.ELOOP,
    "file name too long": errno.ENAMETOOLONG,
    "not a directory": errno.ENOTDIR,
}
"""The engine's messages about a path. Whoever runs in the container makes the paths, so an
engine's answer about one is never the engine's failure."""

_OTHER_KINDS = (1 << 26) | (1 << 25) | (1 << 24) | (1 << 21)  # devices, pipes, sockets
_ARCHIVE_OVERHEAD = 64 * 1024


async def write(container: Container, path: str, contents: bytes) -> None:
    """Write a file as the container's user; parents are made.

    Args:
        container: where the file is written.
        path: absolute path.
        contents: the whole file.

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


async def read(container: Container, engine: Engine, path: str, name: str) -> bytes:
    """Read a regular file, following links.

    The executor reads it, so that no program of the container, which a policy may have
    replaced, is involved. Files that its root may not read are read by the engine from outside,
    while nothing runs in the container: the engine looks at a file before it opens it, and would
    wait for ever on a pipe that took the file's place meanwhile.

    Args:
        container: where the file is.
        engine: the container's engine.
        path: absolute path.
        name: the path as the caller wrote it, for messages.

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
        raise _too_large()
    if end.how is How.DONE:
        return bytes(call.out.data)
    if Flag.TIMED_OUT in end.flags:
        raise TimeoutError(f"reading {name} took more than {_TIMEOUT:.0f} seconds")
    if end.stage is FailedAt.OPEN and end.error == errno.EACCES:
        return await _read_from_outside(container, engine, path, name, limit)
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


def _too_large() -> OutputLimitExceededError:
    too_large = SandboxEnvironmentLimits.MAX_READ_FILE_SIZE_STR
    return OutputLimitExceededError(limit_str=too_large, truncated_output=None)


async def _read_from_outside(
    container: Container, engine: Engine, path: str, name: str, limit: int
) -> bytes:
    try:
        found = await engine.run(_read_archive, engine, container, path, name, limit)
    except _Judged as ex:
        raise ex.error from None
    except SandboxError:
        await engine.run(container.check)
        raise
    if found is None:
        await engine.run(container.check)
        raise _os_error(errno.EACCES, name)
    return found


class _Judged(Exception):
    """Carries a file's own error past the handlers for connection errors, also OSErrors."""

    def __init__(self, error: Exception) -> None:
        super().__init__(str(error))
        self.error = error


def _read_archive(
    engine: Engine, container: Container, path: str, name: str, limit: int
) -> bytes | None:
    with container.held():
        for _ in range(_LINKS):
            found = _archive(engine, container.id, path, name, limit)
            if not isinstance(found, str):
                return found
            path = found
    raise _Judged(_os_error(errno.ELOOP, name))


def _archive(
    engine: Engine, container: str, path: str, name: str, limit: int
) -> bytes | str | None:
    """Return a file's bytes, the target of a link, or ``None`` when the engine finds nothing."""
    import docker

    api = engine.api
    url = f"{api.base_url}/v{api.api_version}/containers/{container}/archive"
    try:
        # Not the SDK's get_archive: it cannot stop reading a file that turns out to be unwanted.
        encoded = path.encode("utf-8", "surrogateescape")
        params = {"path": encoded}
        with api.get(url, params=params, stream=True, timeout=api.timeout) as response:
            if not response.ok:
                said = response.text.lower()
                if response.status_code == 404 and "no such container" in said:
                    raise SandboxDiedError("the container is gone", container=container)
                for reason, number in _REASONS.items():
                    if reason in said:
                        raise _Judged(_os_error(number, name))
                return None
            header = response.headers["X-Docker-Container-Path-Stat"]
            target = _check(docker.utils.decode_json_header(header), name, limit)
            if target is not None:
                return target
            archive = bytearray()
            for piece in response.iter_content(_ARCHIVE_OVERHEAD):
                archive += piece
                # The file may have grown since the engine looked at it.
                if len(archive) > limit + _ARCHIVE_OVERHEAD:
                    raise _Judged(_too_large())
            return _unpack(bytes(archive), name, limit)
    except (tarfile.TarError, KeyError, ValueError) as ex:
        # The file changed while the engine packed it.
        raise _Judged(_os_error(errno.EIO, name)) from ex
    except OSError as ex:
        raise typed(ex, f"reading {name}", container) from ex


def _check(facts: dict[str, Any], name: str, limit: int) -> str | None:
    """Check a file before its bytes are read; return the target if it is a link."""
    mode = int(facts["mode"])
    if mode & _SYMLINK:
        return str(facts["linkTarget"])
    if mode & _DIRECTORY:
        raise _Judged(_os_error(errno.EISDIR, name))
    if mode & _OTHER_KINDS:
        raise _Judged(_os_error(errno.EINVAL, name))
    if not mode & stat.S_IRUSR:
        raise _Judged(_os_error(errno.EACCES, name))
    if int(facts["size"]) > limit:
        raise _Judged(_too_large())
    return None


def _unpack(archive: bytes, name: str, limit: int) -> bytes:
    with tarfile.open(fileobj=io.BytesIO(archive), mode="r:") as tar:
        member = tar.next()
        file = tar.extractfile(member) if member is not None and member.isreg() else None
        if member is None or file is None:
            raise _Judged(_os_error(errno.EINVAL, name))
        if member.size > limit:
            raise _Judged(_too_large())
        return file.read()
