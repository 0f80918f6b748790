"""Talks to the executor, process 1 of a container: runs commands, writes and reads files.

``native/executor.c`` says why no command in the container can reach this channel. Frames go
both ways over the engine's attached streams, any number of requests at once: a head of three
32-bit numbers (payload length, kind, request), then the payload.
"""

from __future__ import annotations

import errno
import itertools
import struct
import threading
import time
from collections.abc import Awaitable, Callable, Iterator, Sequence
from dataclasses import replace
from enum import IntEnum
from functools import partial

import anyio
import anyio.lowlevel
from inspect_ai.util import ExecResult

from inspect_docker_pool.command import (
    STDOUT,
    AttachedSocket,
    Call,
    Capture,
    CommandResult,
    End,
    FailedAt,
    Flag,
    How,
    RequestKind,
    Setup,
    encode_request,
    explain_end,
    join_null_terminated,
)
from inspect_docker_pool.engine import undo
from inspect_docker_pool.errors import SandboxError, SandboxStartError

GRACE_SECONDS = 5.0
"""Seconds from asking a command to end until it is killed, as in Inspect's Docker provider."""

_SILENCE_SECONDS = 60.0
"""Seconds without news of a request after which the executor is asked whether it is there."""

_VERSION = 1
_HEAD = struct.Struct("<III")
_READY = struct.Struct("<IIII")
_END_SECONDS = 5.0
"""Seconds that a command which is killed may take to end before nobody waits for it."""

_BUSY_PAUSE = 0.02
_ENDLESS = 2**63
_MOST_UNREAD = 64 * 1024**2
"""Bytes of an open command's output that are kept until they are read: a policy may write more."""

_FULL_PAUSE = 0.001


class _Request(IntEnum):
    CONFIGURE = 1
    RUN = 2
    INPUT = 3
    INPUT_END = 4
    STOP = 5
    KEEP = 6
    PING = 7


class _Answer(IntEnum):
    HELLO = 1
    OUT = 2
    ERR = 3
    TAKEN = 4
    END = 5
    PONG = 6
    LOG = 7
    READY = 8


class ExecutorSilent(Exception):
    """The executor did not answer in time: its engine or its container is stuck."""


class Executor:
    """The channel to process 1 of one container. Usable from any event loop."""

    _setup: Setup

    def __init__(self, channel: AttachedSocket) -> None:
        self._channel = channel
        self._calls: dict[int, Call] = {}
        self._ids = itertools.count(1)
        self._incoming = bytearray()
        self._outgoing = bytearray()
        self._sending = threading.RLock()  # what one thread reads may let it send for another
        self._reading = threading.Lock()
        self._reader: object = None
        self._heard = time.monotonic()
        self._lost = False
        self._events: list[tuple[_Answer, bytes]] = []
        self._log = bytearray()  # of the container's own command; the executor limits it
        self._said = bytearray()

    # starting, in a thread

    def greet(self, setup: Setup, timeout: float, container: str, label: str) -> None:
        """Send the executor its setup, and wait until the container is ready."""
        self._setup = setup
        words = [setup.user, setup.folder, *setup.command]
        flags = setup.has_home | setup.holds << 1 | setup.bounded << 2
        head = struct.pack("<QII", setup.capabilities, len(setup.command), flags)
        deadline = time.monotonic() + timeout
        problem = ""
        try:
            self._send(_Request.CONFIGURE, 0, head + join_null_terminated(words))
            for kind, body in self._answers(deadline):
                if kind is _Answer.HELLO:
                    version, problems = struct.unpack("<II", body)
                    if version != _VERSION or problems:
                        problem = f"the executor cannot protect itself on this engine ({problems})"
                        break
                elif kind is _Answer.READY:
                    state, _, stage, _ = _READY.unpack(body)
                    if state == 3 and (setup.command or stage):
                        problem = self._explain(body)
                    break
        except OSError as ex:
            problem = str(ex)
        if problem:
            raise SandboxStartError(
                f"{label}: {problem}; it said: {self.said}", container=container
            )

    def _explain(self, ready: bytes) -> str:
        _, status, stage, error = _READY.unpack(ready)
        return explain_end(self._setup, FailedAt(stage), error, status)

    @property
    def said(self) -> str:
        """The end of what the container's own command printed, for messages."""
        said = (bytes(self._log) + bytes(self._said)).decode(errors="replace").strip()
        return said[-2000:] or "nothing"

    def why_ended(self) -> str:
        """Describe, for messages, why it is not ready."""
        reports = [body for kind, body in self._events if kind is _Answer.READY]
        return self._explain(reports[0]) if reports else "the container ended"

    def _answers(self, deadline: float) -> Iterator[tuple[_Answer, bytes]]:
        while True:
            pieces = self._channel.receive_blocking(max(0.1, deadline - time.monotonic()))
            if not pieces:
                raise OSError("the container ended")
            self._take(pieces)
            while self._events:  # what follows the one that the caller waits for is kept
                yield self._events.pop(0)

    # requests

    def is_ready(self) -> bool:
        """Return, without waiting, whether it can be asked and the container's command runs."""
        if self._lost or not self._channel.is_open():
            return False
        while self._hear(None):
            pass
        return all(kind is not _Answer.READY for kind, _ in self._events)

    def close(self) -> None:
        self._lost = True
        self._channel.close()

    def keep(self) -> None:
        """Let the container outlive this process."""
        self._send(_Request.KEEP, 0)

    async def call(
        self,
        kind: RequestKind,
        words: Sequence[str | bytes],
        *,
        env: Sequence[bytes] = (),
        stdin: bytes | None = None,
        timeout: float | None = None,
        limit: int,
    ) -> Call:
        """Make a request and wait for its end.

        Raises:
            ConnectionError: the channel closed.
            ExecutorSilent: no answer came in time.
            OSError: the request is larger than a command can be.
        """
        begun = time.monotonic()
        head = encode_request(
            kind, words, env, has_input=stdin is not None, timeout=timeout, limit=limit
        )
        while True:
            call = Call(next(self._ids), Capture(limit), Capture(limit))
            await self._complete(call, head, stdin, timeout)
            assert call.end is not None
            if call.end.how is How.NOT_STARTED and call.end.error == errno.EUSERS:
                # As many commands as it can run are running. Waiting counts as running.
                if not timeout or time.monotonic() < begun + timeout:
                    await anyio.sleep(_BUSY_PAUSE)
                    continue
                call.end = replace(call.end, flags=Flag.TIMED_OUT)
            return call

    def open(self, words: Sequence[str | bytes], *, env: Sequence[bytes] = (), said: int) -> Call:
        """Start a command to be read and written while it runs. Raises as :meth:`call`.

        Args:
            words: the user, the folder, and the command's words.
            env: ``name=value`` of the command.
            said: bytes of its standard error to keep until they are read.
        """
        head = encode_request(
            RequestKind.EXEC, words, env, has_input=True, timeout=None, limit=_ENDLESS
        )
        unread = Capture(_MOST_UNREAD, rolls=True)
        call = Call(next(self._ids), unread, Capture(said), open=True)
        self._calls[call.id] = call
        self._send(_Request.RUN, call.id, head)
        return call

    async def wait_for_output(self, call: Call) -> None:
        """Wait until an open call has output that nobody took, or has ended; see :meth:`call`."""
        try:
            while call.end is None and not (call.out.data or call.err.data):
                await self._turn(call, None)
        finally:
            self._wake()  # another task must read now

    async def flush(self) -> None:
        """Wait until the engine has taken what was sent."""
        while self._outgoing and not self._lost:
            await anyio.sleep(_FULL_PAUSE)
            self._flush()

    async def leave(self, call: Call) -> None:
        """End an open call's command with all that it started. Safe to call again.

        Returns when it has ended, so that its port is free, say; after a few seconds at most.
        """
        if call.id not in self._calls:
            return
        self._stop(call)
        try:
            with anyio.move_on_after(_END_SECONDS, shield=True):
                while call.end is None:
                    await self._turn(call, None)
        except ConnectionError:
            self._lost = True
        except ExecutorSilent:
            pass
        finally:
            self._calls.pop(call.id, None)
            self._wake()  # another task must read now

    def _stop(self, call: Call) -> None:
        """Have a command killed that has not ended."""
        if call.end is not None or self._lost:
            return
        try:
            self._send(_Request.STOP, call.id)
        except ConnectionError:
            self._lost = True

    def feed(self, call: Call, taken: int = 0) -> None:
        """Send what there is room for of a call's input; more follows when some was taken."""
        with self._sending:
            call.credit += taken
            while call.credit and call.rest and call.end is None:
                piece = bytes(call.rest[: call.credit])
                del call.rest[: len(piece)]
                call.credit -= len(piece)
                self._send(_Request.INPUT, call.id, piece)
            if call.input_ends and not call.rest and call.end is None:
                call.input_ends = False
                self._send(_Request.INPUT_END, call.id)

    async def _complete(
        self, call: Call, head: bytes, stdin: bytes | None, timeout: float | None
    ) -> None:
        # The executor measures the time; this is for when it cannot report.
        limit = time.monotonic() + timeout + 4 * GRACE_SECONDS if timeout else None
        call.rest += stdin or b""
        call.input_ends = stdin is not None
        self._calls[call.id] = call
        try:
            self._send(_Request.RUN, call.id, head)
            self.feed(call)
            while call.end is None:
                await self._turn(call, limit)
        except BaseException as ex:
            # The command must not outlive its caller, and a cancelled caller must not wait.
            undo(ex, partial(self._stop, call))
            raise
        finally:
            del self._calls[call.id]
            self._wake()  # another task must read now

    async def _turn(self, call: Call, limit: float | None) -> None:
        """Read on behalf of all calls, or wait while another task does."""
        if self._lost:
            raise ConnectionError("the executor's channel is closed")
        token = anyio.lowlevel.current_token()
        with anyio.move_on_after(self._patience(limit)):
            if self._reading.acquire(blocking=False):
                self._reader = token
                try:
                    await self._read()
                finally:
                    self._reader = None
                    self._reading.release()
            elif self._reader is token:
                call.changed, call.loop = anyio.Event(), token
                with anyio.move_on_after(1):  # in case the reader's loop has ended
                    await call.changed.wait()
                call.changed = None
            else:
                await anyio.sleep(0.002)  # another loop reads
        now = time.monotonic()
        overdue = limit is not None and now > limit
        silent = now - max(self._heard, call.since) > _SILENCE_SECONDS
        # A process that was busy has heard nothing, and finds the answer now.
        if call.end is not None or ((overdue or silent) and self._hear(token)):
            return
        if overdue or (silent and call.asked and call.since > self._heard):
            raise ExecutorSilent
        if silent:
            call.since, call.asked = now, True
            self._send(_Request.PING, 0)

    def _hear(self, token: object) -> bool:
        """Take what has come without waiting for it; return whether anything has."""
        if not self._reading.acquire(blocking=False):
            return False
        self._reader = token
        try:
            pieces = self._channel.receive_now()
            if pieces:
                self._take(pieces)
            return bool(pieces)
        finally:
            self._reader = None
            self._reading.release()

    def _patience(self, limit: float | None) -> float:
        if limit is None:
            return _SILENCE_SECONDS
        return min(_SILENCE_SECONDS, max(0.01, limit - time.monotonic() + 0.01))

    async def _read(self) -> None:
        # Output may always be there: never starve the loop, nor its cancellations.
        await anyio.lowlevel.checkpoint()
        pieces = self._channel.receive_now()
        while pieces is None:
            self._flush()
            await self._channel.wait(writable=bool(self._outgoing))
            pieces = self._channel.receive_now()
            if pieces is None and self._outgoing:
                self._flush()
        if not pieces:
            self._lost = True
            self._wake()
            raise ConnectionError("the executor's channel closed")
        self._take(pieces)

    def _wake(self) -> None:
        token = anyio.lowlevel.current_token()
        for call in list(self._calls.values()):  # other loops add to it
            if call.changed is not None and call.loop is token:
                call.changed.set()

    def _send(self, kind: _Request, id: int, body: bytes = b"") -> None:
        with self._sending:
            self._outgoing += _HEAD.pack(len(body), kind, id) + body
        self._flush()

    def _flush(self) -> None:
        with self._sending:
            while self._outgoing:
                sent = self._channel.send_now(self._outgoing)
                if not sent:
                    return
                del self._outgoing[:sent]

    def _take(self, pieces: list[tuple[int, bytes]]) -> None:
        self._heard = time.monotonic()
        for stream, piece in pieces:
            if stream == STDOUT:
                self._incoming += piece
            elif len(self._said) < 4096:
                self._said += piece
        start = 0
        while len(self._incoming) - start >= _HEAD.size:
            size, kind, id = _HEAD.unpack_from(self._incoming, start)
            stop = start + _HEAD.size + size
            if len(self._incoming) < stop:
                break
            self._dispatch(_Answer(kind), id, bytes(self._incoming[start + _HEAD.size : stop]))
            start = stop
        del self._incoming[:start]

    def _dispatch(self, kind: _Answer, id: int, body: bytes) -> None:
        if id == 0:
            if kind is _Answer.LOG:
                self._log += body
            elif kind is not _Answer.PONG:
                self._events.append((kind, body))
            return
        call = self._calls.get(id)
        if call is None:
            return  # its caller was cancelled
        if kind is _Answer.OUT:
            call.out.add(body)
        elif kind is _Answer.ERR:
            call.err.add(body)
        elif kind is _Answer.TAKEN:
            self.feed(call, *struct.unpack("<I", body))
        elif kind is _Answer.END:
            how, flags, status, stage, error = struct.unpack("<IIIII", body)
            call.end = End(How(how), Flag(flags), status, FailedAt(stage), error)
        else:
            return
        if (
            (call.open or kind in (_Answer.TAKEN, _Answer.END))
            and call.changed is not None
            and call.loop is self._reader
        ):
            call.changed.set()


Failure = Callable[[ConnectionError | ExecutorSilent], Awaitable[SandboxError]]
"""Decides what a failed request means for its container."""


class OpenCommand:
    """A running command; one task reads it.

    Its methods raise ``SandboxDiedError``, ``SandboxMisusedError`` or ``SandboxEngineError`` if
    the container is lost.
    """

    def __init__(
        self, executor: Executor, call: Call, failure: Failure, result: Callable[[], CommandResult]
    ) -> None:
        self._failure = failure
        self._executor = executor
        self._call = call
        self._result = result

    async def receive(self) -> tuple[bytes, bytes]:
        """Wait for some of its standard output and error; nothing of both at its end."""
        try:
            await self._executor.wait_for_output(self._call)
        except (ConnectionError, ExecutorSilent) as ex:
            raise await self._failure(ex) from ex
        return self._call.out.take(), self._call.err.take()

    async def send(self, data: bytes) -> None:
        """Write to its standard input, without waiting until it is read."""
        self._call.rest += data
        await self._feed()

    async def end_input(self) -> None:
        """End its standard input, behind what was sent."""
        self._call.input_ends = True
        await self._feed()

    async def _feed(self) -> None:
        try:
            self._executor.feed(self._call)
            await self._executor.flush()
        except ConnectionError as ex:
            raise await self._failure(ex) from ex

    def result(self) -> ExecResult[bytes]:
        """Return how it ended, with the output that was not received yet.

        Raises:
            SandboxMisusedError: commands in the container kept this one from running.
        """
        end = self._result()
        return ExecResult(end.status == 0, end.status, end.stdout, end.stderr)

    async def close(self) -> None:
        """End it with everything that it started. Safe to call again."""
        await self._executor.leave(self._call)
