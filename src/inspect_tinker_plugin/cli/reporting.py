"""The error boundary of every command: an error becomes one line on stderr and an exit code."""

from __future__ import annotations

import functools
import sys
from collections.abc import Callable
from typing import Any, TypeVar

import click

EXIT_ERROR = 1
"""Nothing useful was produced."""

EXIT_USAGE = 2
"""The command line is wrong (set by click)."""

EXIT_PARTIAL = 3
"""There is a result, but some samples are missing from it."""

EXIT_INTERRUPTED = 130
"""Stopped by Ctrl-C."""

Command = TypeVar("Command", bound=Callable[..., Any])


def reported(command: Command) -> Command:
    """Report the errors of a command's function; adds the option ``--traceback``."""

    @click.option(
        "--traceback",
        is_flag=True,
        default=False,
        help="Show the full traceback of an error.",
    )
    @functools.wraps(command)
    def wrapper(*args: Any, traceback: bool, **kwargs: Any) -> Any:
        try:
            return command(*args, **kwargs)
        except (click.ClickException, click.exceptions.Exit, click.Abort):
            raise
        except KeyboardInterrupt:
            click.echo("Interrupted.", err=True)
            sys.exit(EXIT_INTERRUPTED)
        except Exception as error:
            if traceback:
                raise
            raise click.ClickException(_line(error)) from error

    return wrapper  # type: ignore[return-value]  # same parameters but for --traceback


def _line(error: Exception) -> str:
    from inspect_tinker_plugin.errors import InspectRLError

    text = " ".join(str(error).split())
    if isinstance(error, InspectRLError):
        return text
    return f"{type(error).__name__}: {text} (unexpected; --traceback shows where it comes from)"
