"""The engine's attached streams: frames of standard output and error over one socket."""

from __future__ import annotations

import socket
import struct
from collections.abc import Awaitable, Callable, Iterator
from typing import Any

import anyio

from inspect_tinker_plugin.errors import SandboxEngineError

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
