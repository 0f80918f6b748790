"""The connections from programs in a sandbox to the model API, for each provider.

====================  =============================================================================
``docker_pool``       the relay, as a command of the pool's own executor
``docker``            the relay, by ``docker exec`` in the container
``local``             a port of this machine: there is no wall to cross
any other             nothing here: Inspect's own proxy in the sandbox, which is polled
====================  =============================================================================

The relay carries the connections of a sandbox's port over the input and output of one command
there: ``native/relay.c`` listens in the sandbox and passes bytes on in frames: a head of three
32-bit numbers (kind, connection, payload length), then the payload. It is as trustworthy as the
programs in the sandbox: it may open connections and send bytes, which they may do as well, and
nothing else depends on it.
"""

from __future__ import annotations

import errno
import os
import struct
import subprocess
from collections.abc import Callable, Coroutine
from contextlib import suppress
from enum import IntEnum
from functools import cache
from importlib.resources import files
from typing import Any, NoReturn, Protocol

import anyio
import anyio.lowlevel
from anyio.abc import Process, SocketStream, TaskGroup
from inspect_ai.util import SandboxEnvironment

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


_SAID = 16 * 1024


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
_COMMAND = ["/bin/sh", "-c", _INSTALL]
_INSTALL_SECONDS = 60.0


async def open_relay(environment: SandboxEnvironment) -> Installed | None:
    """Bring the relay into a sandbox; ``None`` for providers without a way to run it.

    Args:
        environment: the provider's own object.

    Raises:
        RelayError: the sandbox cannot run it: no shell, nowhere to write, another machine.
        SandboxError: the sandbox is lost.
    """
    from inspect_tinker_plugin.docker_pool.environment import DockerPoolSandboxEnvironment

    pipe: Pipe
    if isinstance(environment, DockerPoolSandboxEnvironment):
        pipe = await environment.open(_COMMAND, cwd="/", user="0")
    elif is_docker(environment):
        pipe = await _docker_exec(environment)
    else:
        return None
    installed = Installed(pipe)
    try:
        with anyio.fail_after(_INSTALL_SECONDS):
            await installed.install()
    except BaseException as ex:
        with anyio.CancelScope(shield=True):
            await pipe.close()
        if isinstance(ex, TimeoutError):
            raise RelayError("the sandbox did not take the relay in time") from ex
        raise
    return installed


class Installed:
    """A relay that is in its sandbox and has no port yet."""

    def __init__(self, pipe: Pipe) -> None:
        self.pipe = pipe
        self._read = bytearray()

    async def install(self) -> None:
        code = program(await self._line())
        await self.pipe.send(f"{len(code)}\n".encode() + code)
        if await self._line() != "ready":
            raise RelayError("the sandbox could not take the relay")

    async def listen(self, port: int) -> Pipe:
        """Start it; everything after that on the pipe is frames."""
        await self.pipe.send(f"{port}\n".encode())
        return self.pipe

    async def _line(self) -> str:
        while b"\n" not in self._read:
            data = await self.pipe.receive()
            if not data:
                said = await self.pipe.close()
                raise RelayError(f"the sandbox cannot run the relay: {said or 'no reason given'}")
            self._read += data
        line, _, rest = bytes(self._read).partition(b"\n")
        self._read = bytearray(rest)
        return line.decode(errors="replace").strip()


async def _docker_exec(environment: SandboxEnvironment) -> Pipe:
    try:
        connection = await environment.connection()
    except ConnectionError as ex:
        raise RelayError(str(ex)) from ex
    if connection.container is None:
        raise RelayError("the sandbox has no container")
    command = ["docker", "exec", "-i", "--user", "0", connection.container, *_COMMAND]
    return DockerExec(
        await anyio.open_process(
            command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=subprocess.PIPE
        )
    )


class DockerExec:
    """A command of ``docker exec``. It ends with its input, as the relay does."""

    def __init__(self, process: Process) -> None:
        self._process = process

    async def receive(self) -> bytes:
        assert self._process.stdout is not None
        try:
            return await self._process.stdout.receive()
        except (anyio.EndOfStream, anyio.BrokenResourceError, anyio.ClosedResourceError):
            return b""

    async def send(self, data: bytes) -> None:
        assert self._process.stdin is not None
        with suppress(anyio.BrokenResourceError, anyio.ClosedResourceError):
            await self._process.stdin.send(data)  # the reader notices that it ended

    async def close(self) -> str:
        process, said = self._process, b""
        assert process.stdin is not None
        assert process.stderr is not None
        with anyio.CancelScope(shield=True):
            await process.stdin.aclose()
            with anyio.move_on_after(5), suppress(Exception):
                while len(said) < _SAID:
                    said += await process.stderr.receive()
            with anyio.move_on_after(5):
                await process.wait()
            if process.returncode is None:
                process.kill()
            await process.aclose()
        return said.decode(errors="replace").strip()


class LocalClient:
    """A connection to a port of this machine."""

    def __init__(self, stream: SocketStream) -> None:
        self._stream = stream

    async def receive(self) -> bytes:
        try:
            return await self._stream.receive()
        except anyio.EndOfStream:
            return b""
        except (anyio.BrokenResourceError, anyio.ClosedResourceError) as ex:
            raise ConnectionError(str(ex)) from ex

    async def send(self, data: bytes) -> None:
        try:
            await self._stream.send(data)
        except (anyio.BrokenResourceError, anyio.ClosedResourceError) as ex:
            raise ConnectionError(str(ex)) from ex

    async def close(self) -> None:
        with suppress(Exception):
            await self._stream.aclose()


def is_local(environment: Any) -> bool:
    """Tell whether programs in a sandbox reach ports of this machine as their own."""
    return type(environment).__name__ == "LocalSandboxEnvironment"


def is_docker(environment: Any) -> bool:
    """Tell whether a sandbox is a container of Inspect's own ``docker`` provider."""
    return type(environment).__name__ == "DockerSandboxEnvironment"
