"""What a sandbox provider may offer beside Inspect's interface, and what runs around sandboxes."""

from __future__ import annotations

from collections.abc import Callable, Collection, Coroutine, Hashable, Mapping
from concurrent.futures import Future
from contextlib import AbstractAsyncContextManager, AbstractContextManager
from typing import Any, Protocol

from inspect_ai.util import ExecResult, SandboxEnvironment, SandboxEnvironmentSpec

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


class SharedSetup(Protocol):
    """A sample's set-up that is under way."""

    async def finish(self) -> None:
        """Files and set-up script are applied, and nothing else has run in the sandbox."""


class Recorder(Protocol):
    """Measures the sandboxes of one episode."""

    def snapshot(self) -> Mapping[str, float]:
        """Return the sums so far, by the names of their metrics (``sandbox/execs``)."""


class SandboxAhead(Protocol, Hashable):
    """What a sample's sandbox takes; equal for samples that can use each other's."""

    def make(self) -> Future[Any]:
        """Begin to build or pull its image."""

    def expect(self, count: int) -> None:
        """Have this many started, once the image is there; none any more with 0."""


class SandboxAbilities(Protocol):
    """What a provider may offer: a ``SandboxEnvironment`` with any of these members.

    Each is looked up by its name, and does without the others and without this class. A sandbox's
    exceptions may have an attribute ``inside_sandbox``: true if commands inside the sandbox
    provoked it, false if it is the fault of the sandbox, its engine or its configuration.
    """

    start_is_cancellable: bool
    """Whether a start that is cancelled leaves nothing behind."""

    @classmethod
    def record_metrics(cls) -> AbstractContextManager[Recorder]:
        """Measure an episode's sandboxes, in this context and its tasks."""

    @classmethod
    def share_setup(
        cls, files: Mapping[str, bytes], script: bytes | None
    ) -> AbstractContextManager[SharedSetup]:
        """Announce the set-up that Inspect applies meanwhile, so that a group can share it."""

    @classmethod
    def exceed_bounds(cls) -> AbstractContextManager[object]:
        """Let sandboxes that are started inside wait for no bound: their episode holds others."""

    @classmethod
    def look_ahead(
        cls, config: Any, metadata: dict[str, Any], *, files: bool, script: bool
    ) -> tuple[SandboxAhead, bool]:
        """Return what a sample's sandbox takes, and whether its group shares one set-up."""

    async def open_command(
        self,
        cmd: list[str],
        *,
        cwd: str | None = None,
        env: dict[str, str] | None = None,
        user: str | None = None,
    ) -> OpenCommand | None:
        """Start a command; ``None`` where that is left to Inspect's own way for now.

        With it, agent programs in the provider's sandboxes reach the model without polling.
        """


Work = Callable[..., Coroutine[Any, Any, Any]]
"""Waits for something inside a sandbox."""

Watch = Callable[[Work], Work]
"""Makes work an operation of an episode, which ends with it."""

SandboxService = Callable[
    [Collection[SandboxEnvironment], Watch], AbstractAsyncContextManager[None]
]
"""Runs around everything that an episode does with its sandboxes, which it is given."""

SANDBOX_SERVICES: list[SandboxService] = []
"""Services of all episodes with sandboxes; ``_registry`` adds those of this package."""
