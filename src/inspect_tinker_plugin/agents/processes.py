"""Commands that run in a sandbox while they are read and written, without polling.

For such a command (``exec_remote``) Inspect copies 32 MB of tools into a sandbox, and asks every
five seconds whether there is output or an end. In an episode, a sandbox whose provider opens
commands itself (:class:`SandboxAbilities`), ``docker`` or ``local`` starts it directly, and its
output and end are noticed as they come. Evals are not affected, nor are other sandboxes.
"""

from __future__ import annotations

import asyncio
import codecs
import os
import shlex
import signal
from collections.abc import AsyncIterator, Collection
from contextlib import asynccontextmanager, suppress
from pathlib import Path
from typing import Any

import anyio
import psutil
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
from inspect_tinker_plugin.contracts.sandboxes import OpenCommand, Watch

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

_IN_CONTAINER = 'cd "${1:-.}" && echo $$ && shift && exec "$@"'
"""Prints its process group, and becomes the command."""


@asynccontextmanager
async def use_processes(
    environments: Collection[SandboxEnvironment], watch: Watch
) -> AsyncIterator[None]:
    """Start the remote commands of an episode's sandboxes directly, and end them with it.

    Args:
        environments: The sandboxes, as the episode's code gets them.
        watch: Makes an operation of the episode of what waits for a command.
    """
    local: list[LocalCommand] = []
    for environment in environments:
        vars(environment)["exec_remote"] = _starting_in(environment, watch, local)
    try:
        yield
    finally:
        for environment in environments:
            vars(environment).pop("exec_remote", None)  # which refers to the environment
        for command in local:
            await command.close()
            command.end_children()


async def open_command(
    environment: SandboxEnvironment, cmd: list[str], **options: Any
) -> OpenCommand | None:
    """Start a command in a sandbox; ``None`` where its provider has no way to do so."""
    open_there = getattr(environment, "open_command", None)
    if open_there is not None:
        opened: OpenCommand | None = await open_there(cmd, **options)
        return opened
    if type(environment).__name__ == "DockerSandboxEnvironment":
        return await DockerCommand.start_in(environment, cmd, **options)
    if is_local(environment) and options.get("user") is None:
        return await LocalCommand.start_in(environment, cmd, **options)
    return None


def is_local(environment: object) -> bool:
    """Tell whether programs in a sandbox reach ports of this machine as their own."""
    return type(environment).__name__ == "LocalSandboxEnvironment"


def _starting_in(environment: SandboxEnvironment, watch: Watch, local: list[LocalCommand]) -> Any:
    """Return what starts the commands of a sandbox: directly, or in Inspect's own way.

    Args:
        environment: The sandbox.
        watch: Makes an operation of the episode of what waits for a command.
        local: Gets the commands that the end of the sandbox may not end.
    """
    inspects = environment.exec_remote

    async def exec_remote(
        cmd: list[str], options: Options | None = None, *, stream: bool = True
    ) -> Any:
        given = options or ExecRemoteAwaitableOptions()
        where: dict[str, Any] = {"cwd": given.cwd, "env": given.env, "user": given.user}

        async def open_noted() -> OpenCommand | None:
            shell = ["/bin/sh", "-c", shlex.join(cmd)]  # as Inspect's own server in the sandbox
            command = await open_command(internals.strip_proxy(environment), shell, **where)
            if isinstance(command, LocalCommand):
                local.append(command)
            return command

        command = await watch(open_noted)()
        if command is None:
            return await inspects(cmd, options, stream=stream)  # type: ignore[call-overload]
        process = Process(command, watch)
        shown = {name: value for name, value in where.items() if value}
        internals.record_event(SandboxEvent(action="exec", cmd=shlex.join(cmd), options=shown))
        try:
            await process.start_input(given)
            if stream:
                return process
            timeout = given.timeout if isinstance(given, ExecRemoteAwaitableOptions) else None
            with anyio.fail_after(timeout):
                return await process.result()
        except BaseException:
            with anyio.CancelScope(shield=True):
                await process.kill()
            raise

    return exec_remote


class Process:
    """What a solver gets for Inspect's ``ExecRemoteProcess``; its process id is not known.

    Who waits for the command waits no longer than the episode.
    """

    def __init__(self, command: OpenCommand, watch: Watch) -> None:
        self._command = command
        self._receive_output = watch(command.receive)
        self._send = watch(command.send)
        self._end_input = watch(command.end_input)
        self._takes_input = False
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
        output = (b"", b"")
        try:
            with anyio.CancelScope() as self._receiving:
                output = await self._receive_output()
        except BaseException:
            with anyio.CancelScope(shield=True):
                await self.kill()
            raise
        if any(output) or self._killed:
            self._add_output(*output)
            return
        end = self._command.result()
        self._ended = True
        self._add_output(end.stdout, end.stderr, final=True)
        self._waiting.append(ExecCompleted(exit_code=end.returncode))
        await self._command.close()

    def _add_output(self, out: bytes, err: bytes, final: bool = False) -> None:
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

    async def start_input(self, options: Options) -> None:
        """Send what the options give for input, and end it unless they keep it open."""
        if options.input is not None:
            await self._send(_encode(options.input))
        if isinstance(options, ExecRemoteStreamingOptions) and options.stdin_open:
            self._takes_input = True
        else:
            await self._end_input()

    async def write_stdin(self, data: str | bytes) -> None:
        """Write to its standard input, if it was started with one and has not ended."""
        self._check_input()
        if self._ended or self._killed:
            raise RuntimeError("Cannot write to stdin: process has terminated")
        await self._send(_encode(data))

    async def close_stdin(self) -> None:
        """End its standard input. Safe to call again."""
        self._check_input()
        if not (self._ended or self._killed):
            await self._end_input()

    def _check_input(self) -> None:
        if not self._takes_input:
            raise RuntimeError("stdin of this command needs stdin_open=True in its options")

    async def kill(self) -> None:
        """End it, and the iteration, behind the output that came so far. Safe to call again."""
        if self._ended or self._killed:
            return
        self._killed = True
        await self._command.close()
        self._receiving.cancel()
        with anyio.move_on_after(0), suppress(Exception):  # as Inspect: a kill does not fail
            self._add_output(*await self._command.receive(), final=True)


def _encode(data: str | bytes) -> bytes:
    return data.encode() if isinstance(data, str) else data


class LocalCommand:
    """A command on this machine, with a process group of its own."""

    def __init__(self, process: Subprocess) -> None:
        self._process = process
        self._output = bytearray(), bytearray()
        self._changed = asyncio.Event()
        assert process.stdout is not None
        assert process.stderr is not None
        streams = zip((process.stdout, process.stderr), self._output, strict=True)
        self._readers = [asyncio.create_task(self._read(*each)) for each in streams]
        self._over = asyncio.create_task(self._wait())

    @classmethod
    async def start_in(
        cls, environment: Any, cmd: list[str], *, cwd: Any = None, env: Any = None, user: Any = None
    ) -> LocalCommand | None:
        """Start a command in the sandbox's folder; its user is the harness's own."""
        folder = Path(vars(environment)["directory"].name, cwd or "")
        return cls(await _start_process(cmd, cwd=folder, env={**os.environ, **(env or {})}))

    async def _read(self, stream: asyncio.StreamReader, output: bytearray) -> None:
        while data := await stream.read(_CHUNK):
            output += data
            del output[: -SandboxEnvironmentLimits.MAX_EXEC_OUTPUT_SIZE]
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
        while not any(self._output) and not self._over.done():
            self._changed.clear()
            await self._changed.wait()
        out, err = map(bytes, self._output)
        for stream in self._output:
            stream.clear()
        return out, err

    async def send(self, data: bytes) -> None:
        stdin = self._process.stdin
        assert stdin is not None
        with suppress(ConnectionError):  # its end shows that it has not read it
            stdin.write(data)
            await stdin.drain()

    async def end_input(self) -> None:
        stdin = self._process.stdin
        assert stdin is not None
        stdin.close()

    def result(self) -> ExecResult[bytes]:
        status = self._process.returncode
        assert status is not None
        return ExecResult(status == 0, status, b"", b"")

    async def close(self) -> None:
        with anyio.CancelScope(shield=True):
            if not self._over.done():
                await self._kill()
            await asyncio.wait([self._over], timeout=5)

    def end_children(self) -> None:
        """Kill what it started and left behind."""
        # If another process has the id of one that has ended, so may another group.
        if self._process.returncode is None or not psutil.pid_exists(self._process.pid):
            self._kill_group()

    async def _kill(self) -> None:
        self._kill_group()

    def _kill_group(self) -> None:
        with suppress(ProcessLookupError, PermissionError):
            os.killpg(self._process.pid, signal.SIGKILL)


class DockerCommand(LocalCommand):
    """A command in a container of Inspect's ``docker``, by one ``docker exec``."""

    def __init__(self, process: Subprocess, container: str, group: int) -> None:
        super().__init__(process)
        self._container = container
        self._group = group

    @classmethod
    async def start_in(
        cls, environment: Any, cmd: list[str], *, cwd: Any = None, env: Any = None, user: Any = None
    ) -> DockerCommand | None:
        """Start a command; ``None`` where the container cannot run it."""
        try:
            container = (await environment.connection()).container
        except (ConnectionError, NotImplementedError):
            return None
        if container is None:
            return None
        given = ["--user", user] if user else []
        for name, value in (env or {}).items():
            given += ["--env", f"{name}={value}"]
        wrapped = ["/bin/sh", "-c", _IN_CONTAINER, "sh", cwd or "", *cmd]
        process = await _start_process(["docker", "exec", "-i", *given, container, *wrapped])
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


async def _start_process(command: list[str], **options: Any) -> Subprocess:
    pipe = asyncio.subprocess.PIPE
    return await asyncio.create_subprocess_exec(
        *command, stdin=pipe, stdout=pipe, stderr=pipe, start_new_session=True, **options
    )


async def _discard(process: Subprocess) -> None:
    with suppress(ProcessLookupError):
        process.kill()
    with anyio.CancelScope(shield=True):
        await process.communicate()
