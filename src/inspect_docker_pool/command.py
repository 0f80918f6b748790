"""What passes between the harness and the executor: the channel, requests, and their ends.

The end of a request becomes a result, or the error that Inspect's Docker provider raises.
"""

from __future__ import annotations

import errno
import os
import signal
import socket
import struct
import time
from collections.abc import Awaitable, Callable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from enum import IntEnum, IntFlag
from typing import Any

import anyio
from inspect_ai.util import SandboxUnavailableError

from inspect_docker_pool.errors import SandboxEngineError, SandboxMisusedError

WINDOW = 64 * 1024
"""Maximum bytes of a command's input in transit; the executor reports what it passed on."""

_MAX_REQUEST = 4 * 1024 * 1024
_LONGEST_MILLISECONDS = 2**32 - 1


@dataclass(frozen=True)
class Command:
    """A command to run."""

    argv: tuple[str, ...]
    cwd: str
    """Absolute path."""
    env: dict[str, str] = field(default_factory=dict)
    user: str | None = None
    stdin: bytes | None = None
    timeout: float | None = None
    """Seconds after which the command and all its descendants are ended."""
    limit: int = 10 * 1024**2
    """Bytes per output stream after which the command and all its descendants are killed."""


@dataclass(frozen=True)
class CommandResult:
    """How a command ended."""

    status: int
    """Exit status; 128 and the signal's number for a command that a signal ended."""
    stdout: bytes
    stderr: bytes
    timed_out: bool = False
    overflowed: bool = False
    denied: bool = False
    """The file to execute is not executable for this user."""


@dataclass
class Capture:
    """Collects one stream up to a limit."""

    limit: int
    data: bytearray = field(default_factory=bytearray)
    overflowed: bool = False
    rolls: bool = False
    """Whether the last of what is not taken is kept, and not the first."""

    def add(self, piece: bytes | bytearray | memoryview) -> None:
        if self.rolls:
            self.data += piece
            del self.data[: -self.limit]
            return
        room = self.limit - len(self.data)
        if len(piece) > room:
            self.overflowed = True
            piece = piece[:room]
        self.data += piece

    def take(self) -> bytes:
        """Return what was collected, and start again."""
        data = bytes(self.data)
        del self.data[: len(data)]  # another thread may have added to it
        return data


class RequestKind(IntEnum):
    """The kind of a request."""

    EXEC = 0
    WRITE = 1
    READ = 2
    SCAN = 3
    """Describe state that an image of the container would not hold."""


class How(IntEnum):
    """How a request ended."""

    ENDED = 0
    """A command ended; ``status`` is the kernel's."""
    NOT_STARTED = 1
    """It failed at ``stage`` with ``error``."""
    LOST = 2
    """Its process was killed together with the process that watched over it."""
    DONE = 3
    """A file was written or read completely."""


class FailedAt(IntEnum):
    """Where a request failed; the list of ``executor.c``."""

    NOTHING = 0
    USER = 1
    GROUP = 2
    RANGE = 3
    RESET = 4
    FOLDER = 5
    EXEC = 6
    FORK = 7
    OPEN = 8
    KIND = 9
    OWNER = 10
    SIZE = 11
    DATA = 12
    LENGTH = 13


class Flag(IntFlag):
    """Events during a request."""

    TIMED_OUT = 1
    OVERFLOWED = 2
    UNSTOPPED = 4


@dataclass(frozen=True)
class Setup:
    """Settings of the executor, sent before anything runs."""

    capabilities: int
    """Those of commands that run as root, as a bit mask."""
    has_home: bool
    """Whether image or configuration set ``HOME``; otherwise it is the user's."""
    user: str
    folder: str
    command: tuple[str, ...] = ()
    """The container's own command, if it has one."""
    holds: bool = False
    """Whether that command ends by itself, after which the container is ready."""
    bounded: bool = False
    """Whether files may not hold blocks beyond their size, as only sizes are limited."""


@dataclass(frozen=True)
class End:
    """The end of a request."""

    how: How
    flags: Flag
    status: int
    stage: FailedAt
    error: int

    @property
    def exit_status(self) -> int:
        """The exit status as a shell reports it: 128 plus the signal's number after a signal."""
        if os.WIFSIGNALED(self.status):
            return 128 + os.WTERMSIG(self.status)
        return os.WEXITSTATUS(self.status)

    @property
    def reason(self) -> str:
        return os.strerror(self.error)


@dataclass
class Call:
    """One request in progress."""

    id: int
    out: Capture
    err: Capture
    credit: int = WINDOW
    end: End | None = None
    changed: anyio.Event | None = None
    loop: object = None
    since: float = field(default_factory=time.monotonic)
    """When it began, or when the executor was last asked whether it is there."""
    asked: bool = False
    """Whether the executor has been asked."""
    open: bool = False
    """Whether output is taken as it comes, and input given, while the command runs."""
    rest: bytearray = field(default_factory=bytearray)
    """Input that the executor has no room for yet."""
    input_ends: bool = False
    """Whether the input ends behind ``rest``."""


def encode_request(
    kind: RequestKind,
    words: Sequence[str | bytes],
    env: Sequence[bytes],
    *,
    has_input: bool,
    timeout: float | None,
    limit: int,
) -> bytes:
    flags = has_input | (timeout is not None) << 1
    milliseconds = min(max(1, int(timeout * 1000)), _LONGEST_MILLISECONDS) if timeout else 0
    numbers = (kind, flags, len(words) - 2, len(env), milliseconds, 0, limit)
    head = struct.pack("<IIIIIIQ", *numbers) + join_null_terminated([*words, *env])
    if len(head) > _MAX_REQUEST:
        raise OSError(errno.E2BIG, os.strerror(errno.E2BIG))
    return head


def join_null_terminated(words: Sequence[str | bytes]) -> bytes:
    """Join words as the kernel expects them.

    Raises:
        ValueError: one contains a null byte; the message is that of ``subprocess``.
        UnicodeEncodeError: one contains characters that cannot be encoded.
    """
    encoded = [
        word if isinstance(word, bytes) else word.encode("utf-8", "surrogateescape")
        for word in words
    ]
    if any(b"\0" in word for word in encoded):
        raise ValueError("embedded null byte")
    return b"".join(word + b"\0" for word in encoded)


def explain_end(setup: Setup, stage: FailedAt, error: int, status: int) -> str:
    what = f"its command {setup.command[0]!r}" if setup.command else "its command"
    if stage is FailedAt.FOLDER:
        return f"chdir to {setup.folder!r} failed: {os.strerror(error)}"
    if stage in (FailedAt.USER, FailedAt.GROUP, FailedAt.RANGE):
        return f"it has no user {setup.user!r}"
    if stage is not FailedAt.NOTHING:
        return f"{what} could not be executed: {os.strerror(error)}"
    if os.WIFSIGNALED(status):
        return f"{what} was ended by {signal.Signals(os.WTERMSIG(status)).name}"
    return f"{what} ended with status {os.WEXITSTATUS(status)}"


_EXHAUSTED = {
    errno.EAGAIN: "no process is left under its limit",
    errno.ENOMEM: "no memory is left",
    errno.EMFILE: "no file descriptor is left",
    errno.ENFILE: "no file descriptor is left",
}
_RUNTIME = "OCI runtime exec failed: exec failed: unable to start container process: "


class SandboxExhaustedError(SandboxMisusedError, SandboxUnavailableError):
    """The container runs, but its commands have left no resources to start another one."""


def result_of(call: Call, command: Command, *, not_found: int) -> CommandResult:
    """Interpret how a command ended.

    Raises:
        SandboxMisusedError: commands in the container kept this one from running.
        OSError: the command is longer than the kernel takes.
    """
    end = call.end
    assert end is not None
    raise_misuse(end)
    result = CommandResult(
        status=end.exit_status,
        stdout=bytes(call.out.data),
        stderr=bytes(call.err.data),
        timed_out=Flag.TIMED_OUT in end.flags,
        overflowed=Flag.OVERFLOWED in end.flags,
    )
    if end.how is How.ENDED or result.timed_out or result.overflowed:
        return result
    if end.how is How.NOT_STARTED:
        return _describe_failed_start(end, command, result, not_found)
    raise lost()


def raise_misuse(end: End) -> None:
    """Raise if commands in the container are to blame, whatever the request was.

    Raises:
        SandboxMisusedError: nothing can be started, or something cannot be stopped.
    """
    if Flag.UNSTOPPED in end.flags:
        raise SandboxMisusedError("a command could not be stopped")
    if end.how is How.NOT_STARTED:
        if end.stage is FailedAt.RESET:
            raise SandboxMisusedError(
                "commands in the container lowered its limits, or lock its lists of users"
            )
        if end.error in _EXHAUSTED and end.stage in (FailedAt.FORK, FailedAt.EXEC, FailedAt.OPEN):
            raise SandboxExhaustedError(
                f"the sandbox could not start a command: {_EXHAUSTED[end.error]}"
            )


def lost() -> SandboxMisusedError:
    """Make the error for a request whose process was killed before it could report."""
    return SandboxMisusedError(
        "what watched over a command was killed: the container was out of memory, or a command "
        "ended every process in it"
    )


def _describe_failed_start(
    end: End, command: Command, result: CommandResult, not_found: int
) -> CommandResult:
    """Describe a command that could not start in the words of the engine and ``timeout``."""
    name = command.argv[0]

    def runtime(text: str, status: int = 126) -> CommandResult:
        return replace(result, status=status, stdout=f"{text}\r\n".encode(errors="replace"))

    if end.stage is FailedAt.USER:
        user = (command.user or "").partition(":")[0]
        return runtime(f"unable to find user {user}: no matching entries in passwd file")
    if end.stage is FailedAt.GROUP:
        group = (command.user or "").partition(":")[2]
        return runtime(f"unable to find group {group}: no matching entries in group file")
    if end.stage is FailedAt.RANGE:
        return runtime("uids and gids must be in range 0-2147483647")
    if end.stage is FailedAt.FOLDER:
        reason = f'chdir to cwd ("{command.cwd}") set in config.json failed: {end.reason.lower()}'
        return runtime(f"{_RUNTIME}{reason}: unknown")
    if end.error == errno.E2BIG:
        raise OSError(errno.E2BIG, end.reason, name)
    if command.timeout is not None:
        said = f"/usr/bin/timeout: failed to run command '{name}': {end.reason}\n"
        status = 127 if end.error == errno.ENOENT else 126
        return replace(
            result, status=status, stderr=said.encode(errors="replace"), denied=_is_denied(end)
        )
    if end.error == errno.ENOEXEC:
        said = f"exec {name}: exec format error\n"
        return replace(result, status=1, stderr=said.encode(errors="replace"))
    if end.error != errno.ENOENT:
        denied = runtime(f'{_RUNTIME}exec: "{name}": {end.reason.lower()}: unknown')
        return replace(denied, denied=_is_denied(end))
    if "/" in name:
        why = f'exec: "{name}": stat {name}: no such file or directory'
    else:
        why = f'exec: "{name}": executable file not found in $PATH'
    return runtime(f"{_RUNTIME}{why}: unknown", not_found)


def _is_denied(end: End) -> bool:
    return end.error == errno.EACCES


STDOUT, STDERR = 1, 2
_CHUNK = 256 * 1024


class Frames:
    """Splits the engine's multiplexed bytes into pieces of the two streams."""

    def __init__(self) -> None:
        self._stream = 0
        self._left = 0
        self._header = b""

    def feed(self, data: bytes) -> Iterator[tuple[int, bytes]]:
        """Yield ``(stream, bytes)`` for the given bytes."""
        view = memoryview(data)
        while view:
            if self._left == 0:
                need = 8 - len(self._header)
                self._header += bytes(view[:need])
                view = view[need:]
                if len(self._header) == 8:
                    self._stream, self._left = struct.unpack(">BxxxL", self._header)
                    self._header = b""
                continue
            piece = bytes(view[: self._left])
            view = view[len(piece) :]
            self._left -= len(piece)
            yield self._stream, piece


class AttachedSocket:
    """A hijacked connection to the engine, used without blocking from any event loop.

    Only one task may receive and one thread may send at a time.
    """

    def __init__(self, wrapped: Any) -> None:
        raw = getattr(wrapped, "_sock", wrapped)
        if type(raw) is not socket.socket:
            raise SandboxEngineError(
                "docker_pool speaks to engines on a unix socket or plain TCP; this one uses "
                f"{type(raw).__name__}. Forward it to a local socket (ssh -L) and set DOCKER_HOST"
            )
        self._wrapped = wrapped  # closing the wrapper's response would close the socket
        self._socket = raw
        self._frames = Frames()
        self.closed = False

    def receive_blocking(self, timeout: float) -> list[tuple[int, bytes]]:
        """Wait in this thread for some output; empty at the end of the stream."""
        self._socket.settimeout(timeout)
        return self._parse(self._socket.recv(_CHUNK))

    def receive_now(self) -> list[tuple[int, bytes]] | None:
        """Return available output: empty at the end of the stream, ``None`` if none came yet."""
        try:
            self._socket.setblocking(False)
            return self._parse(self._socket.recv(_CHUNK))
        except (BlockingIOError, InterruptedError):
            return None
        except OSError:
            return []

    def send_now(self, data: bytes | bytearray | memoryview) -> int:
        """Send as much as possible without waiting; return how many bytes.

        Raises:
            BrokenPipeError: the other side is gone.
        """
        try:
            self._socket.setblocking(False)
            return self._socket.send(data)
        except (BlockingIOError, InterruptedError):
            return 0
        except OSError as ex:
            raise BrokenPipeError(str(ex)) from ex

    async def wait(self, *, writable: bool) -> None:
        """Wait until something can be received, or, if asked, sent."""
        if not writable:
            await anyio.wait_readable(self._socket)
            return
        async with anyio.create_task_group() as tasks:

            async def first(ready: Callable[[socket.socket], Awaitable[None]]) -> None:
                await ready(self._socket)
                tasks.cancel_scope.cancel()

            tasks.start_soon(first, anyio.wait_readable)
            tasks.start_soon(first, anyio.wait_writable)

    def is_open(self) -> bool:
        """Return, without waiting, whether the connection is open on the other side."""
        if self.closed:
            return False
        try:
            self._socket.setblocking(False)
            return self._socket.recv(1, socket.MSG_PEEK) != b""
        except (BlockingIOError, InterruptedError):
            return True
        except OSError:
            return False

    def close(self) -> None:
        if not self.closed:
            self.closed = True
            self._socket.close()
            self._wrapped.close()

    def _parse(self, data: bytes) -> list[tuple[int, bytes]]:
        if not data:
            return []
        # A frame header alone is no output, but must not be taken for the end either.
        return list(self._frames.feed(data)) or [(STDOUT, b"")]
