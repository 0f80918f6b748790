"""The shell kept open in a container: quote a request, read its answer, stop what runs.

``executor.sh`` says why a policy's command can neither reach, stop nor read this channel.
One command runs here at a time; further ones, and all while processes of an earlier
command live, go through the engine's exec (``direct.py``).
"""

from __future__ import annotations

import re
import secrets
import threading
import time
from collections.abc import Iterable
from importlib.resources import files

import anyio

from inspect_tinker_plugin.errors import SandboxDiedError, SandboxStartError
from inspect_tinker_plugin.sandboxes.engine import Engine, quietly
from inspect_tinker_plugin.sandboxes.job import Capture, Job, Outcome
from inspect_tinker_plugin.sandboxes.stream import STDERR, STDOUT, AttachedSocket

MAX_REQUEST = 24 * 1024
"""Bytes of a request. The shell reads byte by byte; beyond this the engine is faster."""

GRACE_SECONDS = 5.0
"""From the request to end to the kill, as in Inspect's own Docker provider."""

_NAME = re.compile(r"^[A-Za-z_][A-Za-z0-9_]*$")
_SHELL_NAMES = frozenset(
    [
        *("IFS", "PPID", "UID", "EUID", "SHELLOPTS", "BASHOPTS", "BASH_VERSINFO", "OPTIND"),
        *("OPTARG", "LINENO", "PWD", "OLDPWD", "_", "nl", "KEEP"),
        *"NCEIBPSHKLVWQX",
    ]
)
_BUSY_PAUSE = 0.25


def script(name: str) -> str:
    """Give a shell script of this package without its comments."""
    text = files(__package__).joinpath(name).read_text()
    lines = (line for line in text.splitlines() if not line.lstrip().startswith("#"))
    return "\n".join(line for line in lines if line.strip())


class Unsuitable(Exception):
    """This command cannot run in the executor, or not now; use the engine's exec."""


class Executor:
    """The channel to process 1 of one container."""

    def __init__(self, engine: Engine, container: str, channel: AttachedSocket) -> None:
        self._engine = engine
        self._container = container
        self._channel = channel
        self._token = secrets.token_hex(16)
        self._lock = threading.Lock()
        self._busy_until = 0.0
        self.usable = False
        self.reason = "not started"

    def greet(self, timeout: float) -> None:
        """Exchange the first lines, in this thread; afterwards ``usable`` tells the result.

        Raises:
            SandboxStartError: the container ended or stayed silent.
        """
        answer = b"\x1eh" + self._token.encode() + b" "
        said = {STDOUT: bytearray(), STDERR: bytearray()}
        deadline = time.monotonic() + timeout
        try:
            self._channel.send_blocking(self._token.encode() + b"\n", timeout)
            while answer not in said[STDOUT] or not said[STDOUT].endswith(b"\n"):
                pieces = self._channel.receive_blocking(max(0.1, deadline - time.monotonic()))
                if not pieces:
                    raise OSError("the container ended")
                for stream, piece in pieces:
                    said[stream] += piece
        except OSError as ex:
            output = b"".join(map(bytes, said.values())).decode(errors="replace").strip()
            raise SandboxStartError(
                f"the container did not come up: {ex}; it said: {output[-2000:] or 'nothing'}",
                container=self._container,
            ) from ex
        fields = said[STDOUT].split(answer, 1)[1].decode().split()
        self.usable = fields[0] == "closed" and fields[1] != "-"
        if fields[0] != "closed":
            self.reason = "commands in this container could reach the executor"
        elif fields[1] == "-":
            self.reason = "the image has no setsid, or no env that resets signals"

    def is_open(self) -> bool:
        return self._channel.is_open()

    def close(self) -> None:
        self.usable = False
        self._channel.close()

    async def run(self, job: Job) -> Outcome:
        """Run a command.

        Raises:
            Unsuitable: nothing was run; use the engine's exec.
            ConnectionError: the channel closed while the command ran.
            SandboxDiedError: the command could not be stopped; the container was killed.
        """
        if not self.usable:
            raise Unsuitable(self.reason)
        if time.monotonic() < self._busy_until:
            raise Unsuitable("processes of an earlier command run on")
        code = _code(job)
        if not self._lock.acquire(blocking=False):
            raise Unsuitable("another command runs")
        try:
            return await self._run(code, job)
        finally:
            self._lock.release()

    async def keep(self) -> None:
        """Let the container outlive this process."""
        with self._lock:
            await self._exchange("KEEP=1 S=0", _Answer(secrets.token_hex(16), 0))

    async def _run(self, code: str, job: Job) -> Outcome:
        answer = _Answer(secrets.token_hex(16), job.limit)
        timed_out = False
        try:
            with anyio.move_on_after(job.timeout) as scope:
                await self._exchange(code, answer)
            if scope.cancelled_caught:
                timed_out = not answer.ended
            if not answer.ended:
                signals = ["SIGTERM"] if timed_out else []
                await self._stop(answer, [*signals, "SIGUSR1", "SIGUSR2"])
            if timed_out:
                await self._exchange("P=$Q; _tree; S=0", _Answer(secrets.token_hex(16), 0))
        except ConnectionError:
            self.usable, self.reason = False, "the channel closed"
            raise
        except BaseException:  # cancellation: the command must not outlive its caller
            if not answer.ended:
                with anyio.CancelScope(shield=True):
                    await self._abandon(answer)
            raise
        return self._outcome(answer, timed_out)

    def _outcome(self, answer: _Answer, timed_out: bool) -> Outcome:
        if answer.status == "busy":
            self._busy_until = time.monotonic() + _BUSY_PAUSE
            raise Unsuitable("processes of an earlier command run on")
        out, err = answer.sections[STDOUT], answer.sections[STDERR]
        denied = out.data.startswith(b"\x1ed" + answer.nonce + b"\n")
        if answer.status == "failed":
            # The shell could not fork: the container is out of processes or memory.
            raise Unsuitable("the executor could not start a process")
        return Outcome(
            status=int(answer.status),
            stdout=b"" if denied else bytes(out.data),
            stderr=bytes(err.data),
            timed_out=timed_out,
            overflowed=out.overflowed or err.overflowed,
            denied=denied,
        )

    async def _exchange(self, code: str, answer: _Answer) -> None:
        line = f"{self._token} N={answer.nonce.decode()}; {code} #{self._token}\n"
        await self._channel.send(line.encode("utf-8", "surrogateescape"))
        await self._read(answer, until_overflow=True)

    async def _read(self, answer: _Answer, *, until_overflow: bool) -> None:
        while not answer.ended and not (until_overflow and answer.overflowed):
            pieces = await self._channel.receive()
            if not pieces:
                raise ConnectionError("the executor's channel closed")
            for stream, piece in pieces:
                answer.sections[stream].feed(piece)

    async def _stop(self, answer: _Answer, signals: list[str]) -> None:
        for signal in signals:
            await self._engine.run(quietly, self._engine_kill, signal)
            with anyio.move_on_after(GRACE_SECONDS):
                await self._read(answer, until_overflow=False)
            if answer.ended:
                return
        await self._engine.run(quietly, self._engine_kill, "SIGKILL")
        self.usable, self.reason = False, "killed"
        raise SandboxDiedError(
            "a command could not be stopped, so its container was killed",
            container=self._container,
        )

    async def _abandon(self, answer: _Answer) -> None:
        try:
            await self._stop(answer, ["SIGUSR1", "SIGUSR2"])
        except (ConnectionError, SandboxDiedError):
            self.usable, self.reason = False, "the container ended"

    def _engine_kill(self, signal: str) -> None:
        self._engine.api.kill(self._container, signal)


class _Answer:
    """The two streams of one request."""

    def __init__(self, nonce: str, limit: int) -> None:
        self.nonce = nonce.encode()
        self.sections = {STDOUT: _Section(self.nonce, limit), STDERR: _Section(self.nonce, limit)}

    @property
    def ended(self) -> bool:
        return all(section.status is not None for section in self.sections.values())

    @property
    def overflowed(self) -> bool:
        return any(section.overflowed for section in self.sections.values())

    @property
    def status(self) -> str:
        return self.sections[STDOUT].status or "failed"


class _Section(Capture):
    """One stream from its begin mark to its end mark; everything else is not ours."""

    def __init__(self, nonce: bytes, limit: int) -> None:
        super().__init__(limit)
        self._begin = b"\x1eb" + nonce + b"\n"
        self._end = b"\x1ee" + nonce + b" "
        self._pending = bytearray()
        self._begun = False
        self.status: str | None = None

    def feed(self, piece: bytes) -> None:
        if self.status is not None:
            return
        self._pending += piece
        if not self._begun:
            # A request of the shell itself has no begin mark, only an end.
            start = self._pending.find(self._begin)
            if start >= 0:
                del self._pending[: start + len(self._begin)]
                self._begun = True
        end = self._pending.find(self._end)
        if end < 0:
            # The mark may be half here: keep as much of the tail as it is long.
            settled = max(0, len(self._pending) - len(self._end))
            if self._begun:
                self.add(memoryview(self._pending)[:settled].tobytes())
            del self._pending[:settled]
            return
        stop = self._pending.find(b"\n", end)
        if stop >= 0:
            if self._begun:
                self.add(bytes(self._pending[:end]))
            self.status = self._pending[end + len(self._end) : stop].decode()


def odd_names(env: Iterable[str]) -> list[str]:
    """Select the variables that a shell would drop or change on their way to a command."""
    return [key for key in env if not _NAME.match(key) or key in _SHELL_NAMES]


def _code(job: Job) -> str:
    """Write the request for a job as one line of shell."""
    if odd_names(job.env):
        raise Unsuitable("a variable's name is one of the shell's own")
    size = sum(map(len, job.command)) + sum(map(len, job.env.values())) + len(job.stdin or b"")
    if size > MAX_REQUEST:
        raise Unsuitable("the request is long")
    parts = [f"C={_quote(job.cwd)}"]
    if job.env:
        exports = " ".join(f"{key}={_quote(value)}" for key, value in job.env.items())
        parts.append(f"E={_quote('export ' + exports)}")
    if job.stdin:
        parts.append(f"I={_quote(_escape(job.stdin))}")
    if job.shell is not None:
        parts.append(f"B={_quote(job.shell)}")
    parts.append("_run " + " ".join(map(_quote, job.command)))
    code = "; ".join(parts)
    if len(code) > 2 * MAX_REQUEST or "\0" in code:
        raise Unsuitable("the request is long")
    return code


def _quote(text: str) -> str:
    return "'" + text.replace("'", "'\\''").replace("\n", "'\"$nl\"'") + "'"


def _escape(data: bytes) -> str:
    """Write bytes for printf's ``%b``: whatever is no plain character in octal."""
    if b"\0" not in data:
        try:
            return data.decode().replace("\\", "\\\\")
        except UnicodeDecodeError:
            pass
    return "".join(
        chr(byte) if 32 <= byte < 127 and byte != 92 else f"\\0{byte:03o}" for byte in data
    )
