"""Commands that run while a program is used (``exec_remote``), without polling.

Inspect copies 32 MB of tools into a sandbox to start such a command, and asks every five seconds
whether there is output or an end. In an episode, a sandbox of ``docker_pool``, ``docker`` or
``local`` starts it directly, and its output and its end are noticed at once. Evals are not
affected, nor are other sandboxes.
"""

from __future__ import annotations

import asyncio
import codecs
import os
import shlex
import signal
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager, suppress
from contextvars import ContextVar
from pathlib import Path
from typing import Any, Protocol

import anyio
import sniffio
from inspect_ai.event import SandboxEvent
from inspect_ai.util import (
    ExecCompleted,
    ExecRemoteAwaitableOptions,
    ExecRemoteStreamingOptions,
    ExecResult,
    ExecStderr,
    ExecStdout,
    SandboxEnvironment,
    SandboxEnvironmentLimits,
)

from inspect_tinker_plugin import inspect_internals as internals
from inspect_tinker_plugin.agents.connections import is_docker, is_local
from inspect_tinker_plugin.episode.operations import Operations

Subprocess = asyncio.subprocess.Process
Options = ExecRemoteStreamingOptions | ExecRemoteAwaitableOptions
Output = ExecStdout | ExecStderr | ExecCompleted

_LAST_OUTPUT_SECONDS = 1.0
"""Seconds that output may come behind the end of a command, whose children may hold it open."""

_LOOK_SECONDS = 0.1
"""Seconds between looks for the end of a command whose output is held open."""

_START_SECONDS = 60.0
"""Seconds that an engine may take to start or to end a command."""

_CHUNK = 64 * 1024

_here: ContextVar[_Commands | None] = ContextVar("inspect_rl_commands", default=None)
"""Commands of this episode."""

_IN_CONTAINER = 'cd "${2:-.}" && echo $$ && exec /bin/sh -c "$1"'
"""Says which process group it is, and becomes the command."""


@asynccontextmanager
async def use_processes(operations: Operations) -> AsyncIterator[None]:
    """Start the remote commands of this context directly, and end them with it.

    Args:
        operations: Those of the episode, with which the waiting for a command ends.
    """
    internals.route_remote_commands(_start)
    here = _Commands(operations)
    token = _here.set(here)
    try:
        yield
    finally:
        _here.reset(token)
        for command in here.started:
            await command.close()
            command.end_left()


class Running(Protocol):
    """A command that runs in a sandbox; one task reads it."""

    async def receive(self) -> tuple[bytes, bytes]:
        """Wait for standard output or error; nothing of both at its end."""

    async def send(self, data: bytes) -> None:
        """Write to its standard input."""

    async def end_input(self) -> None:
        """End its standard input."""

    def end(self) -> tuple[int, bytes, bytes]:
        """Return its status, once it has ended, and what it did not say itself."""

    async def close(self) -> None:
        """End it with everything that it started. Safe to call again."""


async def _start(
    environment: SandboxEnvironment, cmd: list[str], options: Options | None, stream: bool
) -> Any:
    """Start a command in a sandbox that is served here; ``None`` to use Inspect's own way."""
    here = _here.get()
    if here is None:
        return None
    given = options or ExecRemoteAwaitableOptions()
    command = await here.open(internals.unproxied(environment), cmd, given)
    if command is None:
        return None
    _record(cmd, given)
    process = Process(command)
    keeps_open = isinstance(given, ExecRemoteStreamingOptions) and given.stdin_open
    try:
        if given.input is not None:
            data = given.input.encode() if isinstance(given.input, str) else given.input
            await command.send(data)
        if not keeps_open:
            await command.end_input()
        process.takes_input = keeps_open
        if stream:
            return process
        timeout = given.timeout if isinstance(given, ExecRemoteAwaitableOptions) else None
        with anyio.fail_after(timeout):
            return await process.result()
    except BaseException:
        with anyio.CancelScope(shield=True):
            await command.close()
        raise


class _Commands:
    """The commands of an episode.

    Attributes:
        started: Those that the end of a sandbox may not end.
    """

    def __init__(self, operations: Operations) -> None:
        self.started: list[LocalCommand] = []
        self._operations = operations

    async def open(
        self, environment: SandboxEnvironment, cmd: list[str], options: Options
    ) -> Running | None:
        """Start a command; ``None`` where that is left to Inspect."""
        opened = self._operations.watched(self._open)
        command: Running | None = await opened(environment, cmd, options)
        return None if command is None else WatchedCommand(command, self._operations)

    async def _open(
        self, environment: SandboxEnvironment, cmd: list[str], options: Options
    ) -> Running | None:
        from inspect_tinker_plugin.docker_pool.environment import DockerPoolSandboxEnvironment

        shell = ["/bin/sh", "-c", shlex.join(cmd)]  # as Inspect's own server in the sandbox
        if isinstance(environment, DockerPoolSandboxEnvironment):
            if environment.tape is not None:  # what a set-up that is shared does is recorded
                return None
            return PoolCommand(
                await environment.open(
                    shell,
                    cwd=options.cwd,
                    env=options.env,
                    user=options.user,
                    said=SandboxEnvironmentLimits.MAX_EXEC_OUTPUT_SIZE,
                )
            )
        if os.name != "posix" or sniffio.current_async_library() != "asyncio":
            return None
        command: LocalCommand | None = None
        if is_docker(environment):
            command = await DockerCommand.start_in(environment, shlex.join(cmd), options)
        elif is_local(environment) and options.user is None:
            directory: Any = vars(environment)["directory"]
            folder = Path(directory.name, options.cwd or "")
            command = await LocalCommand.start(shell, folder, options.env)
        if command is not None:
            self.started.append(command)
        return command


def _record(cmd: list[str], options: Options) -> None:
    shown: dict[str, Any] = {"cwd": options.cwd, "env": options.env, "user": options.user}
    internals.record_event(
        SandboxEvent(
            action="exec",
            cmd=shlex.join(cmd),
            options={name: value for name, value in shown.items() if value},
        )
    )


class Process:
    """What a solver gets for Inspect's ``ExecRemoteProcess``; it has no process id to tell."""

    takes_input = False

    def __init__(self, command: Running) -> None:
        self._command = command
        self._waiting: list[Output] = []
        self._decoders = [codecs.getincrementaldecoder("utf-8")("replace") for _ in range(2)]
        self._receiving = anyio.CancelScope()
        self._iterated = self._ended = self._killed = False

    def __aiter__(self) -> Process:
        if self._iterated:
            raise RuntimeError("ExecRemoteProcess can only be iterated once")
        self._iterated = True
        return self

    async def __anext__(self) -> Output:
        while not self._waiting:
            if self._ended or self._killed:
                raise StopAsyncIteration
            await self._receive()
        return self._waiting.pop(0)

    async def _receive(self) -> None:
        said = (b"", b"")
        try:
            with anyio.CancelScope() as self._receiving:
                said = await self._command.receive()
        except BaseException:
            with anyio.CancelScope(shield=True):
                await self.kill()
            raise
        if any(said) or self._killed:
            self._tell(*said)
            return
        status, out, err = self._command.end()
        self._ended = True
        self._tell(out, err, final=True)
        self._waiting.append(ExecCompleted(exit_code=status))
        await self._command.close()

    def _tell(self, out: bytes, err: bytes, final: bool = False) -> None:
        if text := self._decoders[0].decode(out, final):
            self._waiting.append(ExecStdout(data=text))
        if text := self._decoders[1].decode(err, final):
            self._waiting.append(ExecStderr(data=text))

    async def result(self) -> ExecResult[str]:
        """Wait for its end; of each stream the last 10 MiB are returned."""
        streams = bytearray(), bytearray()
        status = -1
        async for event in self:
            if isinstance(event, ExecCompleted):
                status = event.exit_code
                continue
            kept = streams[isinstance(event, ExecStderr)]
            kept += event.data.encode()
            del kept[: -SandboxEnvironmentLimits.MAX_EXEC_OUTPUT_SIZE]
        out, err = (bytes(stream).decode(errors="replace") for stream in streams)
        return ExecResult(success=status == 0, returncode=status, stdout=out, stderr=err)

    async def write_stdin(self, data: str | bytes) -> None:
        """Write to its standard input.

        Raises:
            RuntimeError: it was started without one, or has ended.
        """
        self._check_input()
        if self._ended or self._killed:
            raise RuntimeError("Cannot write to stdin: process has terminated")
        await self._command.send(data.encode() if isinstance(data, str) else data)

    async def close_stdin(self) -> None:
        """End its standard input. Safe to call again.

        Raises:
            RuntimeError: it was started without one.
        """
        self._check_input()
        if not (self._ended or self._killed):
            await self._command.end_input()

    def _check_input(self) -> None:
        if not self.takes_input:
            raise RuntimeError("stdin of this command needs stdin_open=True in its options")

    async def kill(self) -> None:
        """End it, and with it the iteration. Safe to call again."""
        if self._ended or self._killed:
            return
        self._killed = True
        await self._command.close()
        self._receiving.cancel()


class WatchedCommand:
    """A command; who waits for it waits no longer than the episode."""

    def __init__(self, command: Running, operations: Operations) -> None:
        self.receive = operations.watched(command.receive)
        self.send = operations.watched(command.send)
        self.end_input = operations.watched(command.end_input)
        self.end = command.end
        self.close = command.close


class PoolCommand:
    """A command in a container of the pool."""

    def __init__(self, command: Any) -> None:
        self._command = command
        self.receive = command.receive_all
        self.send = command.send
        self.end_input = command.end_input

    def end(self) -> tuple[int, bytes, bytes]:
        result = self._command.result()
        return result.status, result.stdout, result.stderr

    async def close(self) -> None:
        await self._command.close()


class LocalCommand:
    """A command on this machine, with a process group of its own."""

    def __init__(self, process: Subprocess) -> None:
        self._process = process
        self._said = bytearray(), bytearray()
        self._changed = asyncio.Event()
        assert process.stdout is not None
        assert process.stderr is not None
        streams = zip((process.stdout, process.stderr), self._said, strict=True)
        self._readers = [asyncio.create_task(self._read(*each)) for each in streams]
        self._over = asyncio.create_task(self._wait())

    @classmethod
    async def start(cls, cmd: list[str], cwd: Path, env: dict[str, str] | None) -> LocalCommand:
        """Start a command.

        Raises:
            OSError: it cannot be started there.
        """
        return cls(await _started(cmd, cwd=cwd, env={**os.environ, **(env or {})}))

    async def _read(self, stream: asyncio.StreamReader, said: bytearray) -> None:
        while data := await stream.read(_CHUNK):
            said += data
            del said[: -SandboxEnvironmentLimits.MAX_EXEC_OUTPUT_SIZE]
            self._changed.set()

    async def _wait(self) -> None:
        ended = asyncio.create_task(self._process.wait())
        while self._process.returncode is None:  # which waits for the output's end as well
            await asyncio.wait([ended], timeout=_LOOK_SECONDS)
        await asyncio.wait(self._readers, timeout=_LAST_OUTPUT_SECONDS)
        for task in (*self._readers, ended):
            task.cancel()
        transport: Any = vars(self._process)["_transport"]
        transport.close()  # nothing public closes pipes that children hold open
        self._changed.set()

    async def receive(self) -> tuple[bytes, bytes]:
        while not any(self._said) and not self._over.done():
            self._changed.clear()
            await self._changed.wait()
        out, err = map(bytes, self._said)
        for stream in self._said:
            stream.clear()
        return out, err

    async def send(self, data: bytes) -> None:
        stdin = self._process.stdin
        assert stdin is not None
        with suppress(ConnectionError):  # its end tells that it has not read it
            stdin.write(data)
            await stdin.drain()

    async def end_input(self) -> None:
        stdin = self._process.stdin
        assert stdin is not None
        stdin.close()

    def end(self) -> tuple[int, bytes, bytes]:
        status = self._process.returncode
        assert status is not None
        return status, b"", b""

    async def close(self) -> None:
        with anyio.CancelScope(shield=True):
            if not self._over.done():
                await self._kill()
            await asyncio.wait([self._over], timeout=5)

    def end_left(self) -> None:
        """Kill what it started and left behind."""
        internals.end_processes({self._process.pid: self._process})

    async def _kill(self) -> None:
        with suppress(ProcessLookupError):
            os.killpg(self._process.pid, signal.SIGKILL)


class DockerCommand(LocalCommand):
    """A command in a container of Inspect's ``docker``, by one ``docker exec``."""

    def __init__(self, process: Subprocess, container: str, group: int) -> None:
        super().__init__(process)
        self._container = container
        self._group = group

    @classmethod
    async def start_in(
        cls, environment: SandboxEnvironment, text: str, options: Options
    ) -> DockerCommand | None:
        """Start the shell command ``text``; ``None`` where the container cannot run it."""
        try:
            container = (await environment.connection()).container
        except (ConnectionError, NotImplementedError):
            return None
        if container is None:
            return None
        given = ["--user", options.user] if options.user else []
        for name, value in (options.env or {}).items():
            given += ["--env", f"{name}={value}"]
        wrapped = ["/bin/sh", "-c", _IN_CONTAINER, "sh", text, options.cwd or ""]
        process = await _started(["docker", "exec", "-i", *given, container, *wrapped])
        try:
            assert process.stdout is not None
            with anyio.fail_after(_START_SECONDS):
                group = await process.stdout.readline()
            if not group.strip().isdigit():  # Inspect's own way says why
                await _discard(process)
                return None
        except BaseException:
            await _discard(process)
            raise
        return cls(process, container, int(group))

    async def _kill(self) -> None:
        kill = f"kill -9 -{self._group}"  # all shells read this form
        order = ["docker", "exec", "--user", "0", self._container, "/bin/sh", "-c", kill]
        with suppress(OSError, TimeoutError), anyio.fail_after(_START_SECONDS):
            await anyio.run_process(order, check=False)
        await super()._kill()


async def _started(command: list[str], **where: Any) -> Subprocess:
    pipe = asyncio.subprocess.PIPE
    return await asyncio.create_subprocess_exec(
        *command, stdin=pipe, stdout=pipe, stderr=pipe, start_new_session=True, **where
    )


async def _discard(process: Subprocess) -> None:
    with suppress(ProcessLookupError):
        process.kill()
    with anyio.CancelScope(shield=True):
        await process.communicate()
