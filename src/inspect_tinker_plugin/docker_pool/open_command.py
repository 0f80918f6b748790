"""A command in a container that is read and written while it runs."""

from __future__ import annotations

from collections.abc import Awaitable, Callable

from inspect_tinker_plugin.docker_pool.executor import Call, Executor, ExecutorSilent
from inspect_tinker_plugin.errors import SandboxError

Failure = Callable[[ConnectionError | ExecutorSilent], Awaitable[SandboxError]]
"""Decides what a failed request means for its container."""


class OpenCommand:
    """A running command; one task reads it."""

    def __init__(self, executor: Executor, call: Call, failure: Failure) -> None:
        self._failure = failure
        self._executor = executor
        self._call = call

    async def receive(self) -> bytes:
        """Wait for some of its standard output; nothing at its end.

        Raises:
            SandboxDiedError, SandboxMisusedError, SandboxEngineError: the container is lost.
        """
        try:
            return await self._executor.read(self._call)
        except (ConnectionError, ExecutorSilent) as ex:
            raise await self._failure(ex) from ex

    async def send(self, data: bytes) -> None:
        """Write to its standard input, without waiting until it is read.

        Raises:
            SandboxDiedError, SandboxMisusedError, SandboxEngineError: the container is lost.
        """
        try:
            await self._executor.write(self._call, data)
        except ConnectionError as ex:
            raise await self._failure(ex) from ex

    async def close(self) -> str:
        """End it with everything that it started; return its standard error.

        Safe to call again.
        """
        self._executor.leave(self._call)
        end = self._call.end
        said = bytes(self._call.err.data).decode(errors="replace").strip()
        if end is not None and end.error:
            return said or end.reason
        return said
