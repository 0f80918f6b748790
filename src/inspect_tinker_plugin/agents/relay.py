"""The connections from programs in a sandbox's container, carried over one command there.

``native/relay.c`` listens in the sandbox and passes bytes on in frames: a head of three 32-bit
numbers (kind, connection, payload length), then the payload. It is as trustworthy as the programs
in the sandbox: it may open connections and send bytes, which they may do as well, and nothing else
depends on it.
"""

from __future__ import annotations

import errno
import os
import struct
from collections.abc import Callable, Coroutine
from enum import IntEnum
from functools import cache
from importlib.resources import files
from typing import Any, NoReturn

import anyio
import anyio.lowlevel
from anyio.abc import TaskGroup
from inspect_ai.util import SandboxEnvironment

from inspect_tinker_plugin.agents.api import Client
from inspect_tinker_plugin.agents.processes import open_command
from inspect_tinker_plugin.contracts.sandboxes import OpenCommand

_HEAD = struct.Struct("<III")
_WINDOW = 64 * 1024
_CHUNK = 16 * 1024
_MOST_CONNECTIONS = 256
_MOST_UNREAD = 64 * 1024**2
"""Maximum unread bytes of all connections together; connections that send more are not read.
Requests are read as they arrive: only data after a request can pile up."""

_MOST_COMPLAINTS = 16 * 1024
_INSTALL_SECONDS = 60.0
_END_SECONDS = 5.0
ARCHITECTURES = {"x86_64": "amd64", "amd64": "amd64", "aarch64": "arm64", "arm64": "arm64"}

# Output: the machine's name. Input: the program's size, the program, the port. Only tools in the
# system's folders are used, as the policy may own others on the image's PATH.
_INSTALL = """
set -eu
PATH=/usr/sbin:/usr/bin:/sbin:/bin
umask 077
folder=$(mktemp -d /var/tmp/.XXXXXXXXXX)
uname -m
read -r size
head -c "$size" > "$folder/relay"
chmod 700 "$folder/relay"
echo ready
if read -r port; then exec "$folder/relay" "$port" "$folder/relay" "$folder"; fi
rm -rf "$folder"
"""


class _Report(IntEnum):
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


Serve = Callable[[Client], Coroutine[Any, Any, None]]


class RelayError(Exception):
    """The relay did not start, or ended."""


@cache
def read_program(architecture: str) -> bytes:
    """Return the relay for a machine as ``uname -m`` names it."""
    name = ARCHITECTURES.get(architecture)
    if name is None:
        raise RelayError(f"there is no relay for {architecture} sandboxes")
    return (files(__package__) / "native" / f"relay-{name}").read_bytes()


async def open_relay(environment: SandboxEnvironment) -> Relay:
    """Bring the relay into a sandbox; it has no port yet.

    Raises:
        RelayError: the sandbox cannot run it: its provider opens no commands, no shell, nowhere
            to write, another machine.
        SandboxError: the sandbox is lost.
    """
    command = await open_command(environment, ["/bin/sh", "-c", _INSTALL], cwd="/", user="0")
    if command is None:
        raise RelayError("its provider opens no command that is read as it runs")
    relay = Relay(command)
    try:
        with anyio.fail_after(_INSTALL_SECONDS):
            await relay.install()
    except BaseException as ex:
        await relay.close()
        if isinstance(ex, TimeoutError):
            raise RelayError("the sandbox did not take the relay in time") from ex
        raise
    return relay


class Relay:
    """The harness's end of a relay."""

    def __init__(self, command: OpenCommand) -> None:
        self._command = command
        self._clients: dict[int, RelayedClient] = {}
        self._incoming = bytearray()
        self._complaints = bytearray()
        self.unread = 0

    async def install(self) -> None:
        """Copy the program."""
        code = read_program(await self._read_line())
        await self._command.send(f"{len(code)}\n".encode() + code)
        if await self._read_line() != "ready":
            raise RelayError("the sandbox could not take the relay")

    async def listen(self, port: int) -> None:
        """Start it and wait until programs can connect."""
        await self._command.send(f"{port}\n".encode())
        while True:
            kind, _, body = await self._read_frame()
            if kind is _Report.LISTENING:
                return
            if kind is _Report.FAILED and len(body) == 8:
                number = struct.unpack("<II", body)[1]
                raise RelayError(
                    "the port is in use in the sandbox"
                    if number == errno.EADDRINUSE
                    else f"it cannot listen: {os.strerror(number)}"
                )

    async def run(self, serve: Serve, tasks: TaskGroup) -> NoReturn:
        """Serve each connection in a separate task, until cancelled."""
        while True:
            kind, id, body = await self._read_frame()
            if kind is _Report.OPENED:
                if id in self._clients or len(self._clients) >= _MOST_CONNECTIONS:
                    raise RelayError("it sent nonsense")
                client = self._clients[id] = RelayedClient(self, id)
                tasks.start_soon(serve, client)
            elif id in self._clients:
                self._clients[id].note(kind, body)
                if kind is _Report.GONE:
                    del self._clients[id]

    async def send(self, kind: _Order, id: int, body: bytes = b"") -> None:
        """Order the relay to do something with a connection."""
        await self._command.send(_HEAD.pack(kind, id, len(body)) + body)

    async def close(self) -> None:
        """End its input, by which it removes what is left of itself, and then the command."""
        with anyio.CancelScope(shield=True):
            with anyio.move_on_after(_END_SECONDS):
                await self._command.end_input()
                while any(await self._command.receive()):
                    pass
            await self._command.close()

    async def _read_frame(self) -> tuple[_Report, int, bytes]:
        while True:
            if len(self._incoming) >= _HEAD.size:
                kind, id, size = _HEAD.unpack_from(self._incoming)
                if size > _CHUNK or not _Report.LISTENING <= kind <= _Report.FAILED:
                    raise RelayError("it sent nonsense")
                stop = _HEAD.size + size
                if len(self._incoming) >= stop:
                    body = bytes(self._incoming[_HEAD.size : stop])
                    del self._incoming[:stop]
                    return _Report(kind), id, body
            await anyio.lowlevel.checkpoint()  # let the readers run
            await self._receive()

    async def _read_line(self) -> str:
        while b"\n" not in self._incoming:
            if len(self._incoming) > _CHUNK:  # of a shell that a policy has replaced
                raise RelayError("it sent nonsense")
            await self._receive()
        line, _, rest = bytes(self._incoming).partition(b"\n")
        self._incoming = bytearray(rest)
        return line.decode(errors="replace").strip()

    async def _receive(self) -> None:
        out, err = await self._command.receive()
        self._incoming += out
        self._complaints += err
        del self._complaints[:-_MOST_COMPLAINTS]
        if not out and not err:
            reason = self._complaints.decode(errors="replace").strip()
            raise RelayError(f"it ended{f': {reason}' if reason else ''}")


class RelayedClient:
    """One connection of a relay."""

    def __init__(self, relay: Relay, id: int) -> None:
        self._id = id
        self._relay = relay
        self._arrived = bytearray()
        self._over = self._lost = self._closed = False
        self._credit = _WINDOW
        self._changed = anyio.Event()

    def note(self, kind: _Report, body: bytes) -> None:
        """Take in what the relay reports of the connection."""
        if kind is _Report.DATA and not self._over and not self._closed:
            if self._relay.unread + len(body) > _MOST_UNREAD:
                self._over = True
            else:
                self._relay.unread += len(body)
                self._arrived += body
        elif kind in (_Report.ENDED, _Report.GONE):
            self._over = True
            self._lost = self._lost or kind is _Report.GONE
        elif kind is _Report.TAKEN and len(body) == 4:
            self._credit = min(_WINDOW, self._credit + struct.unpack("<I", body)[0])
        self._changed.set()
        self._changed = anyio.Event()

    async def receive(self) -> bytes:
        while not self._arrived:
            if self._over:
                raise anyio.EndOfStream
            await self._changed.wait()
        return self._take_arrived()

    async def send(self, data: bytes) -> None:
        rest = memoryview(data)
        while rest:
            if self._lost or self._closed:
                raise anyio.BrokenResourceError
            if not self._credit:
                await self._changed.wait()
                continue
            piece = rest[: min(self._credit, _CHUNK)]
            rest, self._credit = rest[len(piece) :], self._credit - len(piece)
            await self._relay.send(_Order.SEND, self._id, bytes(piece))

    async def aclose(self) -> None:
        if self._closed:
            return
        self._closed = True
        self._take_arrived()
        if not self._lost:
            await self._relay.send(_Order.CLOSE, self._id)

    def _take_arrived(self) -> bytes:
        data = bytes(self._arrived)
        self._arrived.clear()
        self._relay.unread -= len(data)
        return data
