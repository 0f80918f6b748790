"""Connections of a sandbox's port, carried over the input and output of one command there.

``native/relay.c`` listens in the sandbox and passes bytes on in frames: a head of three 32-bit
numbers (kind, connection, payload length), then the payload. It is as trustworthy as
the programs in the sandbox: it may open connections and send bytes, which they may do as well,
and nothing else depends on it.
"""

from __future__ import annotations

import errno
import os
import struct
from collections.abc import Callable, Coroutine
from enum import IntEnum
from functools import cache
from importlib.resources import files
from typing import Any, NoReturn, Protocol

import anyio
import anyio.lowlevel
from anyio.abc import TaskGroup

from inspect_tinker_plugin.agents.http import Client
from inspect_tinker_plugin.docker_pool.program import verified

_NATIVE = files(__package__) / "native"
_HEAD = struct.Struct("<III")
_WINDOW = 64 * 1024
_CHUNK = 16 * 1024
_MOST_CONNECTIONS = 256
_MOST_UNREAD = 64 * 1024**2
"""Maximum unread bytes of all connections together; connections that send more are not read.
Requests are read as they arrive: only data after a request can pile up."""

ARCHITECTURES = {"x86_64": "amd64", "amd64": "amd64", "aarch64": "arm64", "arm64": "arm64"}


class _Told(IntEnum):
    LISTENING = 1
    OPENED = 2
    DATA = 3
    ENDED = 4
    GONE = 5
    TAKEN = 6
    FAILED = 7


class _Order(IntEnum):
    SEND = 1
    CLOSE = 2


class Pipe(Protocol):
    """Input and output of a command that runs in a sandbox."""

    async def receive(self) -> bytes:
        """Return some output; nothing at its end."""

    async def send(self, data: bytes) -> None:
        """Write to its input, without waiting until it is read."""

    async def close(self) -> str:
        """End the command and return what it said on its standard error. Safe to call again."""


Serve = Callable[[Client], Coroutine[Any, Any, None]]


class RelayError(Exception):
    """The relay did not start, or ended."""


@cache
def program(architecture: str) -> bytes:
    """Return the relay for a machine as ``uname -m`` names it.

    Raises:
        RelayError: there is none.
        SandboxConfigError: its file is missing, or is not the one of this release.
    """
    name = ARCHITECTURES.get(architecture)
    if name is None:
        raise RelayError(f"there is no relay for {architecture} sandboxes")
    return verified(_NATIVE, f"relay-{name}")


class Relay:
    """The harness's end of a relay."""

    def __init__(self, pipe: Pipe) -> None:
        self._pipe = pipe
        self._clients: dict[int, RelayedClient] = {}
        self._incoming = bytearray()
        self.unread = 0

    async def listening(self) -> None:
        """Wait until programs can connect.

        Raises:
            RelayError: it cannot listen, or ended.
        """
        while True:
            for kind, _, body in await self._frames():
                if kind is _Told.LISTENING:
                    return
                if kind is _Told.FAILED and len(body) == 8:
                    number = struct.unpack("<II", body)[1]
                    raise RelayError(
                        "the port is in use in the sandbox"
                        if number == errno.EADDRINUSE
                        else f"it cannot listen: {os.strerror(number)}"
                    )

    async def run(self, serve: Serve, tasks: TaskGroup) -> NoReturn:
        """Serve each connection in a separate task, until cancelled.

        Raises:
            RelayError: the relay ended.
        """
        while True:
            for kind, id, body in await self._frames():
                if kind is _Told.OPENED:
                    if id in self._clients or len(self._clients) >= _MOST_CONNECTIONS:
                        raise RelayError("it spoke nonsense")
                    client = self._clients[id] = RelayedClient(self, id)
                    tasks.start_soon(serve, client)
                elif id in self._clients:
                    self._tell(self._clients[id], kind, body)
            await anyio.lowlevel.checkpoint()  # let the readers run

    def _tell(self, client: RelayedClient, kind: _Told, body: bytes) -> None:
        if kind is _Told.DATA:
            client.arrived(body)
        elif kind is _Told.ENDED:
            client.ended()
        elif kind is _Told.GONE:
            del self._clients[client.id]
            client.lost()
        elif kind is _Told.TAKEN and len(body) == 4:
            client.taken(struct.unpack("<I", body)[0])

    async def _frames(self) -> list[tuple[_Told, int, bytes]]:
        data = await self._pipe.receive()
        if not data:
            said = await self._pipe.close()
            raise RelayError(f"it ended{f': {said}' if said else ''}")
        self._incoming += data
        found, start = [], 0
        while len(self._incoming) - start >= _HEAD.size:
            kind, id, size = _HEAD.unpack_from(self._incoming, start)
            if size > _CHUNK or not _Told.LISTENING <= kind <= _Told.FAILED:
                raise RelayError("it spoke nonsense")
            stop = start + _HEAD.size + size
            if len(self._incoming) < stop:
                break
            found.append((_Told(kind), id, bytes(self._incoming[start + _HEAD.size : stop])))
            start = stop
        del self._incoming[:start]
        return found

    async def order(self, kind: _Order, id: int, body: bytes = b"") -> None:
        """Tell the relay something about a connection."""
        await self._pipe.send(_HEAD.pack(kind, id, len(body)) + body)


class RelayedClient:
    """One connection of a relay."""

    def __init__(self, relay: Relay, id: int) -> None:
        self.id = id
        self._relay = relay
        self._arrived = bytearray()
        self._over = False
        self._lost = False
        self._closed = False
        self._credit = _WINDOW
        self._changed = anyio.Event()

    # messages from the relay

    def arrived(self, data: bytes) -> None:
        if self._over or self._closed:
            return
        if self._relay.unread + len(data) > _MOST_UNREAD:
            self._over = True
        else:
            self._relay.unread += len(data)
            self._arrived += data
        self._wake()

    def ended(self) -> None:
        self._over = True
        self._wake()

    def lost(self) -> None:
        self._over = self._lost = True
        self._wake()

    def taken(self, count: int) -> None:
        self._credit = min(_WINDOW, self._credit + count)
        self._wake()

    def _wake(self) -> None:
        self._changed.set()
        self._changed = anyio.Event()

    # calls of the connection's server

    async def receive(self) -> bytes:
        while not self._arrived and not self._over:
            await self._changed.wait()
        data = bytes(self._arrived)
        self._arrived.clear()
        self._relay.unread -= len(data)
        return data

    async def send(self, data: bytes) -> None:
        rest = memoryview(data)
        while rest:
            if self._lost or self._closed:
                raise ConnectionError("the program closed the connection")
            if not self._credit:
                await self._changed.wait()
                continue
            piece = rest[: min(self._credit, _CHUNK)]
            rest, self._credit = rest[len(piece) :], self._credit - len(piece)
            await self._relay.order(_Order.SEND, self.id, bytes(piece))

    async def close(self) -> None:
        if self._closed:
            return
        self._closed = True
        self._relay.unread -= len(self._arrived)
        self._arrived.clear()
        if not self._lost:
            await self._relay.order(_Order.CLOSE, self.id)
