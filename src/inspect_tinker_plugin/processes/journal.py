"""Files that survive a kill: those written in one step, and journals of JSON objects, one per line.

A folder that one process at a time writes to has a lock, which goes with its process. It is one of
this machine: other stores have neither locks nor renames.

Each line of a journal ends with a checksum of the rest of it. Reading stops at the first line that
was cut off or damaged: what follows counts as never written.
"""

from __future__ import annotations

import errno
import json
import os
import re
import shutil
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager, suppress
from pathlib import Path
from tempfile import gettempdir
from typing import Any
from zlib import crc32

from filelock import FileLock, Timeout

from inspect_tinker_plugin.contracts.errors import ConfigError, InspectRLError

Record = Mapping[str, Any]

_SUM = b', "crc": "%08x"}\n'
_SUM_BYTES = len(_SUM % 0)

_ADDRESS = re.compile("([a-z][a-z0-9+.-]+):/+(.*)", re.DOTALL)
"""An address such as ``s3://bucket/x``, of which a ``Path`` has one slash less."""


def is_remote(path: str | Path) -> bool:
    """Whether this is the address of another store than this machine's files."""
    address = _ADDRESS.fullmatch(str(path))
    return address is not None and address[1] != "file"


def local_path(path: str | Path) -> Path:
    """Return a path of this machine: also of ``~/x``, and of ``file:///x``.

    Raises:
        ConfigError: It is the address of another store.
    """
    if (address := _ADDRESS.fullmatch(str(path))) is None:
        return Path(path).expanduser()
    scheme, rest = address.groups()
    if is_remote(path):
        raise ConfigError(f"{scheme}://{rest} is remote; name a path of this machine")
    return Path("/", rest)


class Journal:
    """A journal of JSON objects that are not empty.

    Args:
        path: The file; it need not exist yet.
    """

    def __init__(self, path: Path) -> None:
        self.path = path
        self._held: list[bytes] = []
        self._held_bytes = 0

    def read(self) -> Iterator[tuple[dict[str, Any], int]]:
        """Yield each object, and the size of the file up to the end of its line."""
        if not self.path.is_file():
            return
        end = 0
        with self.path.open("rb") as lines:
            for line in lines:
                if (record := _decode_line(line)) is None:
                    return
                end += len(line)
                yield record, end

    def load(self) -> list[dict[str, Any]]:
        """Return all objects, and cut off what does not count."""
        found = list(self.read())
        self.cut(found[-1][1] if found else 0)
        return [record for record, _ in found]

    def cut(self, size: int) -> None:
        """Shorten the file to a size that :meth:`read` gave."""
        if self.path.is_file() and self.path.stat().st_size > size:
            os.truncate(self.path, size)

    def hold(self, record: Record) -> int:
        """Keep an object in memory until the next :meth:`write`; returns the bytes so kept."""
        self._held.append(_encode_record(record))
        self._held_bytes += len(self._held[-1])
        return self._held_bytes

    def write(self, *records: Record) -> None:
        """Append what is held and these objects; they are on the disk when this returns.

        Raises:
            OSError: They cannot be written.
        """
        lines = [*self._held, *map(_encode_record, records)]
        self._held, self._held_bytes = [], 0
        if lines:
            with self.path.open("ab") as file:
                file.writelines(lines)
                file.flush()
                os.fsync(file.fileno())

    def replace(self, records: Iterable[Record]) -> None:
        """Replace the file by one with these objects, in one step.

        Raises:
            OSError: It cannot be written.
        """
        with replacing(self.path) as part:
            part.unlink(missing_ok=True)
            Journal(part).write(*records)


@contextmanager
def alone_in(folder: Path, name: str, *, taken: str, keep: bool = True) -> Iterator[None]:
    """Keep other processes from writing to a folder; the lock goes with this process.

    Args:
        folder: The folder; made if missing.
        name: Name of the lock in it.
        taken: What is said of the folder when another process has it.
        keep: Leave the file of the lock at the end. Otherwise an empty folder that was made here
            goes as well.

    Raises:
        ConfigError: Another process has it, or it cannot be written.
        InspectRLError: It was moved or removed during the block, whatever the block raised then.
        OSError: That of the block; one of a full disk names the folder, or that of temporary files.
    """
    lock = FileLock(folder / name, timeout=0)
    made = not folder.exists()
    try:
        folder.mkdir(parents=True, exist_ok=True)
        lock.acquire()
    except Timeout as error:
        raise ConfigError(f"{folder} {taken}") from error
    except OSError as error:
        raise ConfigError(f"{folder} cannot be written ({error.strerror})") from error
    file = (folder / name).absolute()
    locked = file.stat()

    def is_there() -> bool:
        with suppress(OSError):
            return os.path.samestat(locked, file.stat())
        return False

    gone = f"{folder} was moved or removed while it was being written, so it is not complete"
    try:
        yield
    except Exception as error:
        if not is_there():
            raise InspectRLError(gone) from error
        if isinstance(error, OSError) and error.errno == errno.ENOSPC and error.filename is None:
            error.filename = min(  # a write does not say where
                (str(folder), gettempdir()), key=lambda path: shutil.disk_usage(path).free
            )
        raise
    else:
        if not is_there():
            raise InspectRLError(gone)
    finally:
        if not keep and is_there():
            file.unlink()
        lock.release()
        if made and not keep:
            with suppress(OSError):  # it holds something
                folder.rmdir()


def write_whole(path: Path, text: str) -> None:
    """Replace a file in one step: who reads it meanwhile finds the old text or the new one.

    Raises:
        OSError: It cannot be written.
    """
    with replacing(path) as part:
        part.write_text(text, encoding="utf-8")


@contextmanager
def replacing(path: Path, part: Path | None = None) -> Iterator[Path]:
    """Yield ``part``, or a path beside the file, to write to; then it replaces the file.

    What fails leaves nothing there.
    """
    part = part or path.with_name(f"{path.name}.writing")
    try:
        yield part
        os.replace(part, path)
    finally:
        part.unlink(missing_ok=True)


def _encode_record(record: Record) -> bytes:
    text = json.dumps(record, default=str).encode()[:-1]
    return text + _SUM % crc32(text)


def _decode_line(line: bytes) -> dict[str, Any] | None:
    """Return the object of a line, ``None`` if the line is not whole."""
    text = line[:-_SUM_BYTES]
    if line[-_SUM_BYTES:] != _SUM % crc32(text):
        return None
    record: dict[str, Any] = json.loads(text + b"}")
    return record


def parse_rows(lines: Iterable[str]) -> Iterator[dict[str, Any]]:
    """Yield the objects of lines that have no checksums; what is no object is skipped."""
    for line in lines:
        try:
            row = json.loads(line)
        except ValueError:
            continue
        if isinstance(row, dict):
            yield row


def read_rows(path: Path) -> list[dict[str, Any]]:
    """Return the objects of a file whose lines have no checksums; none if it is not there."""
    if not path.is_file():
        return []
    return list(parse_rows(path.read_text(encoding="utf-8", errors="replace").splitlines()))
