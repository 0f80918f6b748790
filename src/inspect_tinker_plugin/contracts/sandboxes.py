"""What a sandbox provider may offer beside Inspect's interface, and what runs around sandboxes."""

from __future__ import annotations

from collections.abc import Callable, Coroutine
from contextlib import AbstractAsyncContextManager
from typing import Any, Protocol

from inspect_ai.util import ExecResult, SandboxEnvironmentSpec

SandboxMapper = Callable[[SandboxEnvironmentSpec], SandboxEnvironmentSpec]
"""Returns the specification to use instead of the one that a task or a sample asks for."""


class OpenCommand(Protocol):
    """A command in a sandbox that is read and written while it runs; one task reads it."""

    async def receive(self) -> tuple[bytes, bytes]:
        """Wait for some standard output or error; both are empty at its end."""

    async def send(self, data: bytes) -> None:
        """Write to its standard input."""

    async def end_input(self) -> None:
        """End its standard input, behind what was sent."""

    def result(self) -> ExecResult[bytes]:
        """Return how it ended, once it has, with the output that was not received."""

    async def close(self) -> None:
        """End it with everything that it started. Safe to call again."""


class OpensCommands(Protocol):
    """A sandbox environment whose provider starts such commands. The method is optional.

    With it, agent programs in the provider's sandboxes reach the model without polling.
    """

    async def open_command(
        self,
        cmd: list[str],
        *,
        cwd: str | None = None,
        env: dict[str, str] | None = None,
        user: str | None = None,
    ) -> OpenCommand | None:
        """Start a command; ``None`` where that is left to Inspect's own way for now."""


Work = Callable[..., Coroutine[Any, Any, Any]]
"""Waits for something inside a sandbox."""

Watch = Callable[[Work], Work]
"""Makes work an operation of an episode, which ends with it."""

SandboxService = Callable[[Watch], AbstractAsyncContextManager[None]]
"""Runs around everything that an episode does with its sandboxes."""

SANDBOX_SERVICES: list[SandboxService] = []
"""Services of all episodes with sandboxes; ``_registry`` adds those of this package."""
