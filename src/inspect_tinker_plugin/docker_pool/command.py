"""One command for a sandbox, and how it ended."""

from __future__ import annotations

from dataclasses import dataclass, field


@dataclass(frozen=True)
class Command:
    """A command to run."""

    argv: tuple[str, ...]
    cwd: str
    """Absolute path."""
    env: dict[str, str] = field(default_factory=dict)
    user: str | None = None
    stdin: bytes | None = None
    timeout: float | None = None
    """Seconds after which the command and all its descendants are ended."""
    limit: int = 10 * 1024**2
    """Bytes per output stream after which the command and all its descendants are killed."""


@dataclass(frozen=True)
class CommandResult:
    """How a command ended."""

    status: int
    """Exit status; 128 and the signal's number for a command that a signal ended."""
    stdout: bytes
    stderr: bytes
    timed_out: bool = False
    overflowed: bool = False
    denied: bool = False
    """The file to execute is not executable for this user."""


@dataclass
class Capture:
    """Collects one stream up to a limit."""

    limit: int
    data: bytearray = field(default_factory=bytearray)
    overflowed: bool = False

    def add(self, piece: bytes | bytearray | memoryview) -> None:
        room = self.limit - len(self.data)
        if len(piece) > room:
            self.overflowed = True
            piece = piece[:room]
        self.data += piece
