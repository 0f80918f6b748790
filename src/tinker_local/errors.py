"""The errors that the local server raises on purpose."""

from __future__ import annotations

from pathlib import Path

TAIL_LINES = 30


class LocalServerError(Exception):
    """The local server did not start, or has stopped by itself.

    Attributes:
        log: the server's log file, or None if it never wrote one.
        tail: its last lines.
    """

    def __init__(self, message: str, *, log: Path | None = None) -> None:
        self.log = log
        self.tail = _tail(log)
        if self.tail:
            message = f"{message}\n--- the end of {log}:\n{self.tail}"
        super().__init__(message)


class LocalConfigError(LocalServerError, ValueError):
    """Bad input, or something missing here, that is found before anything starts."""


def _tail(log: Path | None) -> str:
    if log is None or not log.is_file():
        return ""
    with open(log, "rb") as file:
        file.seek(0, 2)
        file.seek(max(0, file.tell() - 16_384))
        lines = file.read().decode(errors="replace").splitlines()
    return "\n".join(lines[-TAIL_LINES:])
