"""The progress bar of the commands."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Protocol


class ShowProgress(Protocol):
    """Shows how far a command is."""

    def __call__(self, done: int, total: int, failed: int = 0, *, what: str | None = None) -> None:
        """Show how many are done, how many there are, how many failed, and what is counted."""


@contextmanager
def progress_bar(what: str) -> Iterator[ShowProgress]:
    """Draw a bar on stderr, if that is a terminal.

    Args:
        what: The label in front of the bar.
    """
    from rich.console import Console
    from rich.progress import (
        BarColumn,
        MofNCompleteColumn,
        Progress,
        TextColumn,
        TimeRemainingColumn,
    )

    console = Console(stderr=True)
    columns = (
        TextColumn("{task.description}"),
        BarColumn(),
        MofNCompleteColumn(),
        TimeRemainingColumn(),
        TextColumn("{task.fields[failed]}"),
    )
    with Progress(
        *columns, console=console, transient=True, disable=not console.is_terminal
    ) as bar:
        line = bar.add_task(what, total=None, failed="")

        def show(done: int, total: int, failed: int = 0, *, what: str | None = None) -> None:
            text = f"{failed} failed" if failed else ""
            bar.update(line, completed=done, total=total, failed=text, description=what)

        yield show
