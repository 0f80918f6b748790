"""Ends builds and pulls that make no progress, with an error that says why."""

from __future__ import annotations

import socket
import time
from collections.abc import Iterable, Iterator
from contextlib import suppress
from types import TracebackType
from typing import TYPE_CHECKING, Any, Self

from inspect_tinker_plugin.docker_pool.engine import Engine, engine_address, quietly
from inspect_tinker_plugin.docker_pool.threads import Ticker
from inspect_tinker_plugin.errors import SandboxEngineError, SandboxError, SandboxImageError

if TYPE_CHECKING:
    from docker import APIClient

BEGIN_SECONDS = 300.0
"""Seconds until an engine begins to answer: to a pull, it answers after the registry did."""

ASK_SECONDS = 60.0
"""Seconds of silence after which the engine is asked whether it lives."""

ANSWER_SECONDS = 30.0
_LOOK_SECONDS = 0.5


class EngineWork:
    """One build or pull with its own connection, watched while it runs.

    Args:
        engine: runs it; when it is closed, the work is cut off, which also ends it there.
        what: a description of the work, for messages.
        silence: seconds without output after which it is ended although the engine lives.

    Raises:
        SandboxEngineError: on leaving: the engine stopped answering.
        SandboxImageError: on leaving: there was no output for too long.
    """

    def __init__(self, engine: Engine, what: str, silence: float) -> None:
        self._engine = engine
        self._what = what
        self._silence = silence
        self._last = time.monotonic()
        self._asked = self._last
        self._socket: socket.socket | None = None
        self._fault: SandboxError | None = None
        self._ticker = Ticker("docker_pool_progress", _LOOK_SECONDS, self._look)
        self.client: APIClient = engine.connect(BEGIN_SECONDS)
        send = self.client.send

        def begin(request: Any, **options: Any) -> Any:
            # The SDK gives pulls no time-out at all.
            response = send(request, **{**options, "timeout": BEGIN_SECONDS})
            file = getattr(getattr(response.raw, "_fp", None), "fp", None)
            found = getattr(getattr(file, "raw", None), "_sock", None)
            if isinstance(found, socket.socket):
                found.settimeout(None)  # from here on it is watched
                self._socket = found
            return response

        self.client.send = begin  # type: ignore[method-assign]

    def events(self, stream: Iterable[dict[str, Any]]) -> Iterator[dict[str, Any]]:
        """Yield the engine's output, and record that there was some."""
        for event in stream:
            self._last = time.monotonic()
            yield event

    def cut(self, fault: SandboxError) -> None:
        """End the work from another thread."""
        self._fault = self._fault or fault
        if self._socket is not None:
            with suppress(OSError):
                self._socket.shutdown(socket.SHUT_RDWR)

    def __enter__(self) -> Self:
        self._engine.streams.add(self)
        self._ticker.start()
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self._engine.streams.discard(self)
        self._ticker.stop(1)
        self.client.close()
        if self._fault is not None:
            raise self._fault from error

    def _look(self) -> None:
        now = time.monotonic()
        silent = now - self._last
        if silent > self._silence:
            self.cut(SandboxImageError(f"{self._what}: there was no progress for {silent:.0f} s"))
        elif now - max(self._last, self._asked) > ASK_SECONDS:
            if not quietly(self._ask):
                self.cut(
                    SandboxEngineError(
                        f"{self._what}: the Docker engine at {engine_address()} does not answer"
                    )
                )
            self._asked = time.monotonic()

    def _ask(self) -> None:
        client = self._engine.connect(ANSWER_SECONDS)
        try:
            client.ping()
        finally:
            client.close()
