"""Worker processes, signals that stop them, their memory, and journals that survive a kill."""

from __future__ import annotations

from inspect_tinker_plugin.processes.journal import (
    Journal,
    alone_in,
    is_remote,
    local_path,
    read_rows,
    replacing,
    write_whole,
)

__all__ = [
    "Journal",
    "alone_in",
    "is_remote",
    "local_path",
    "read_rows",
    "replacing",
    "write_whole",
]
