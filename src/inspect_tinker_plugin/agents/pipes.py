"""The connections from programs in a sandbox to the model API, for each provider.

====================  =============================================================================
``docker_pool``       the relay, as a command of the pool's own executor
``docker``            the relay, by ``docker exec`` in the container
``local``             a port of this machine: there is no wall to cross
any other             nothing here: Inspect's own proxy in the sandbox, which is polled
====================  =============================================================================
"""

from __future__ import annotations

import subprocess
from contextlib import suppress
from typing import Any

import anyio
from anyio.abc import Process, SocketStream
from inspect_ai.util import SandboxEnvironment

from inspect_tinker_plugin.agents.relay import Pipe, RelayError, program

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
        pipe = await environment.open(_COMMAND, user="0")
    elif type(environment).__name__ == "DockerSandboxEnvironment":
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
