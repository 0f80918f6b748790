"""Files of a container: written by a command as its user, read as an archive of the engine."""

from __future__ import annotations

import errno
import io
import posixpath
import stat
import tarfile
from typing import Any

from inspect_ai.util import OutputLimitExceededError, SandboxEnvironmentLimits

from inspect_tinker_plugin.errors import SandboxDiedError, SandboxError
from inspect_tinker_plugin.sandboxes.container import Container
from inspect_tinker_plugin.sandboxes.engine import Engine, typed
from inspect_tinker_plugin.sandboxes.executor import MAX_REQUEST
from inspect_tinker_plugin.sandboxes.job import Job, Outcome

_SYSTEM_PATH = "/usr/sbin:/usr/bin:/sbin:/bin"
_TIMEOUT = 600.0
_LINKS = 8
_DIRECTORY, _SYMLINK = 1 << 31, 1 << 27
_OTHER_KINDS = (1 << 26) | (1 << 25) | (1 << 24) | (1 << 21)  # devices, pipes, sockets

# Exit statuses of the scripts below.
_IS_DIRECTORY, _NO_PARENT, _FORBIDDEN, _NO_FILE, _SPECIAL = 91, 92, 93, 94, 95

_CHECK = f"""
[ -d "$1" ] && exit {_IS_DIRECTORY}
[ -p "$1" ] && exit {_SPECIAL}
p=${{1%/*}}; [ -d "${{p:-/}}" ] || mkdir -p -- "$p" || exit {_NO_PARENT}
[ ! -e "$1" ] || [ -w "$1" ] || exit {_FORBIDDEN}
"""
_WRITE = _CHECK + 'cat >"$1"\n'
# In the executor's own shell: no program runs, no byte passes a pipe.
_WRITE_BUILTIN = f"I=; PATH={_SYSTEM_PATH}\n{_CHECK}" + 'printf %b "$2" >"$1"\n'
_READ = f"""
[ -d "$1" ] && exit {_IS_DIRECTORY}
[ -e "$1" ] || exit {_NO_FILE}
[ -r "$1" ] || exit {_FORBIDDEN}
cat -- "$1"
"""


async def write(container: Container, path: str, contents: bytes) -> None:
    """Write a file as the container's user; parents are made.

    Raises:
        IsADirectoryError: the path is a directory.
        PermissionError: the user may not write there.
        OSError: no space is left, a parent is a file, or the path is special.
    """
    for job in _write_jobs(path, contents):
        outcome = await container.run(job)
        if outcome.status == 0:
            return
        # The shell's own message lacks the reason, so a failure is tried again with cat.
    _raise_write_error(path, outcome)


def _write_jobs(path: str, contents: bytes) -> list[Job]:
    jobs = []
    if len(contents) * 4 < MAX_REQUEST:
        text = "".join(chr(b) if 32 <= b < 127 and b != 92 else f"\\0{b:03o}" for b in contents)
        jobs.append(Job((path, text), cwd="/", timeout=_TIMEOUT, shell=_WRITE_BUILTIN))
    jobs.append(
        Job(
            ("/bin/sh", "-c", f"PATH={_SYSTEM_PATH}\n{_WRITE}", "sh", path),
            cwd="/",
            stdin=contents,
            timeout=_TIMEOUT,
        )
    )
    return jobs


def _raise_write_error(path: str, outcome: Outcome) -> None:
    said = outcome.stderr.decode(errors="replace").strip()
    lowered = said.lower()
    if outcome.timed_out:
        raise TimeoutError(f"writing {path} took more than {_TIMEOUT:.0f} seconds")
    if outcome.status == _IS_DIRECTORY or "is a directory" in lowered:
        raise IsADirectoryError(errno.EISDIR, "Is a directory", path)
    if outcome.status == _FORBIDDEN or "permission denied" in lowered:
        raise PermissionError(errno.EACCES, f"Permission denied. {said}".strip(), path)
    if "no space left" in lowered:
        raise OSError(errno.ENOSPC, "No space left on device", path)
    if "read-only file system" in lowered:
        raise PermissionError(errno.EROFS, "Read-only file system", path)
    if outcome.status == _NO_PARENT:
        raise NotADirectoryError(errno.ENOTDIR, f"Cannot make its folder. {said}".strip(), path)
    if outcome.status == _SPECIAL:
        raise OSError(errno.EINVAL, "Not a regular file", path)
    raise OSError(errno.EIO, f"Write failed with status {outcome.status}. {said}".strip(), path)


async def read(container: Container, engine: Engine, path: str, name: str) -> bytes:
    """Read a regular file, following links.

    The engine reads it from outside, so that no program of the container, which a policy
    may have replaced, stands between; only files that exist inside alone (``/proc``, a
    tmpfs) are read by a command.

    Args:
        container: where the file is.
        engine: the container's engine.
        path: absolute path.
        name: the path as the caller wrote it, for messages.

    Raises:
        FileNotFoundError, IsADirectoryError, PermissionError: as their names say.
        OutputLimitExceededError: larger than Inspect's limit for reads.
        OSError: not a regular file.
    """
    limit = SandboxEnvironmentLimits.MAX_READ_FILE_SIZE
    too_large = SandboxEnvironmentLimits.MAX_READ_FILE_SIZE_STR
    if posixpath.basename(path.rstrip("/")) in (".", "..", ""):
        raise IsADirectoryError(errno.EISDIR, "Is a directory", name)
    try:
        found = await engine.run(_read_archive, engine, container.id, path, name, limit)
    except _TooLarge:
        raise OutputLimitExceededError(limit_str=too_large, truncated_output=None) from None
    except SandboxError:
        await engine.run(container.direct.check)
        raise
    if found is not None:
        return found
    outcome = await container.run(
        Job(
            ("/bin/sh", "-c", f"PATH={_SYSTEM_PATH}\n{_READ}", "sh", path),
            cwd="/",
            timeout=_TIMEOUT,
            limit=limit,
        )
    )
    if outcome.overflowed:
        raise OutputLimitExceededError(limit_str=too_large, truncated_output=None)
    if outcome.status == _IS_DIRECTORY:
        raise IsADirectoryError(errno.EISDIR, "Is a directory", name)
    if outcome.status == _FORBIDDEN:
        raise PermissionError(errno.EACCES, "Permission denied", name)
    if outcome.status != 0:
        raise FileNotFoundError(errno.ENOENT, "No such file or directory", name)
    return outcome.stdout


class _TooLarge(Exception):
    pass


class _Judged(Exception):
    """Carries a file's own error past those of the connection, which are OSErrors, too."""

    def __init__(self, error: OSError) -> None:
        super().__init__(str(error))
        self.error = error


def _read_archive(engine: Engine, container: str, path: str, name: str, limit: int) -> bytes | None:
    for _ in range(_LINKS):
        found = _archive(engine, container, path, name, limit)
        if not isinstance(found, str):
            return found
        path = found
    raise OSError(errno.ELOOP, "Too many levels of symbolic links", name)


def _archive(
    engine: Engine, container: str, path: str, name: str, limit: int
) -> bytes | str | None:
    """Give a file's bytes, the target of a link, or ``None`` when the engine finds nothing."""
    import docker

    api = engine.api
    url = f"{api.base_url}/v{api.api_version}/containers/{container}/archive"
    try:
        # Not the SDK's get_archive: it cannot let go of a file that is not wanted after all.
        with api.get(url, params={"path": path}, stream=True) as response:
            if response.status_code == 404:
                if "no such container" in response.text.lower():
                    raise SandboxDiedError("the container is gone", container=container)
                return None
            response.raise_for_status()
            header = response.headers["X-Docker-Container-Path-Stat"]
            target = _check(docker.utils.decode_json_header(header), name, limit)
            return _unpack(response.content, name) if target is None else target
    except _Judged as ex:
        raise ex.error from None
    except OSError as ex:
        raise typed(ex, f"reading {name}", container) from ex


def _check(facts: dict[str, Any], name: str, limit: int) -> str | None:
    """Judge a file before its bytes are read; give the target of a link."""
    mode = int(facts["mode"])
    if mode & _SYMLINK:
        return str(facts["linkTarget"])
    if mode & _DIRECTORY:
        raise _Judged(IsADirectoryError(errno.EISDIR, "Is a directory", name))
    if mode & _OTHER_KINDS:
        raise _Judged(OSError(errno.EINVAL, "Not a regular file", name))
    if not mode & stat.S_IRUSR:
        raise _Judged(PermissionError(errno.EACCES, "Permission denied", name))
    if int(facts["size"]) > limit:
        raise _TooLarge
    return None


def _unpack(archive: bytes, name: str) -> bytes:
    with tarfile.open(fileobj=io.BytesIO(archive), mode="r:") as tar:
        member = tar.next()
        file = tar.extractfile(member) if member is not None and member.isreg() else None
        if file is None:
            raise _Judged(OSError(errno.EINVAL, "Not a regular file", name))
        return file.read()
