"""The stderr output of every command: its progress, and errors as one line with an exit code."""

from __future__ import annotations

import functools
import os
import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, redirect_stdout
from io import TextIOWrapper
from typing import Any, Protocol, TextIO, TypeVar

import click

from inspect_tinker_plugin.processes.workers import stopped_like_ctrl_c

OUR_PACKAGES = ("inspect_docker_pool", "inspect_rl_audit", "inspect_tinker_plugin", "tinker_local")
"""Packages whose errors are raised on purpose."""

EXIT_ERROR = 1
"""Nothing useful was produced; 2, wrong usage, is click's."""

EXIT_PARTIAL = 3
"""There is a result, but some samples are missing from it."""

EXIT_INTERRUPTED = 130
"""Stopped by Ctrl-C; by another signal, 128 and its number."""

SHOWN_FAILURES = 10
"""Failed samples that a command names."""

Command = TypeVar("Command", bound=Callable[..., Any])


def reported(command: Command) -> Command:
    """Report the errors of a command's function; adds the option ``--traceback``.

    SIGTERM and SIGHUP act as Ctrl-C, which removes sandboxes and shows what is finished.
    """

    @click.option(
        "--traceback",
        is_flag=True,
        default=False,
        help="Show the full traceback of an error.",
    )
    @functools.wraps(command)
    def wrapper(*args: Any, traceback: bool, **kwargs: Any) -> Any:
        if isinstance(sys.stdout, TextIOWrapper):  # no error for what its encoding lacks
            sys.stdout.reconfigure(errors="backslashreplace")
        with _signals_exit():
            try:
                return command(*args, **kwargs)
            except (click.ClickException, click.exceptions.Exit, click.Abort):
                raise
            except KeyboardInterrupt:
                click.echo("Interrupted.", err=True)
                sys.exit(EXIT_INTERRUPTED)
            except BrokenPipeError:
                raise  # click ends a command quietly whose reader has gone (`| head`)
            except Exception as error:
                if traceback:
                    raise
                raise click.ClickException(_line(error)) from error

    return wrapper  # type: ignore[return-value]  # same parameters but for --traceback


@contextmanager
def _signals_exit() -> Iterator[None]:
    """Make signals act as Ctrl-C, and the exit code of an interruption name the signal."""
    with stopped_like_ctrl_c() as stopped:
        try:
            yield
        except SystemExit as end:
            if end.code == EXIT_INTERRUPTED and stopped.by is not None:
                sys.exit(128 + stopped.by)
            raise


def _line(error: Exception) -> str:
    text = " ".join(str(error).split())
    if any(each.__module__.partition(".")[0] in OUR_PACKAGES for each in type(error).__mro__):
        return text
    if type(error).__module__.startswith("inspect_ai."):
        from inspect_tinker_plugin.inspect_internals import in_one_line

        text = in_one_line(error)
    return f"{type(error).__name__}: {text} (unexpected; --traceback shows where it comes from)"


def name_failures(failures: Sequence[str], where: str) -> None:
    """Name the first failures on stderr, one per line, and say where the others are."""
    for failure in failures[:SHOWN_FAILURES]:
        click.echo(failure, err=True)
    if (hidden := len(failures) - SHOWN_FAILURES) > 0:
        click.echo(f"… and {hidden:,} more, {where}", err=True)


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


@contextmanager
def quiet_stdout() -> Iterator[TextIO]:
    """Send the output of tasks, and of programs that they start (image builds), to stderr.

    Yields:
        The stdout of before, for the command's own results.
    """
    before = sys.stdout
    before.flush()
    kept = os.dup(1)
    results = before
    if _is_descriptor_1(before):
        results = os.fdopen(kept, "w", 1, before.encoding, before.errors, closefd=False)
    os.dup2(2, 1)
    try:
        with redirect_stdout(sys.stderr):
            yield results
    finally:
        results.flush()
        os.dup2(kept, 1)
        os.close(kept)


def _is_descriptor_1(stream: TextIO) -> bool:
    """Whether a stream writes to this process's stdout; in a notebook or a test it does not."""
    try:
        return stream.fileno() == 1
    except (OSError, ValueError):
        return False
