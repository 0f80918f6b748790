"""Every error that the provider raises on purpose."""

from __future__ import annotations


class SandboxError(Exception):
    """A sandbox could not be provided, or was lost while in use.

    Attributes:
        inside_sandbox: whether commands inside the sandbox provoked it.
        container: id or name of the container concerned, when there is one.
    """

    inside_sandbox = False

    def __init__(self, message: str, *, container: str | None = None) -> None:
        super().__init__(message)
        self.container = container


class SandboxConfigError(SandboxError, ValueError):
    """A sandbox configuration asks for something that the provider cannot honour."""


class SandboxEngineError(SandboxError):
    """The Docker engine is not reachable, stopped answering, or has paused a container."""


class SandboxImageError(SandboxError):
    """An image is missing or could not be built or pulled."""


class SandboxStartError(SandboxError):
    """A container could not be created or started."""


class SandboxDiedError(SandboxError):
    """A container went away (killed, out of memory, removed) while an episode used it."""


class SandboxMisusedError(SandboxDiedError):
    """Commands inside a sandbox used it up or broke it: its memory, processes or disk."""

    inside_sandbox = True


class SandboxSlowError(SandboxMisusedError, TimeoutError):
    """A file could not be read or written in time: processes held it, or left it no processor."""
