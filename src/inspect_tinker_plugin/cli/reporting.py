"""What commands print: progress and errors on stderr, conversations and tables of rewards."""

from __future__ import annotations

import errno
import functools
import json
import os
import re
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, redirect_stdout
from io import TextIOWrapper
from typing import TYPE_CHECKING, Any, Protocol, TextIO, TypeVar

import click
from rich import box
from rich.console import Console, Group, RenderableType
from rich.padding import Padding
from rich.panel import Panel
from rich.rule import Rule
from rich.syntax import Syntax
from rich.table import Table
from rich.text import Text

from inspect_tinker_plugin.contracts.wording import clean_text, counted, missing_package
from inspect_tinker_plugin.processes.workers import stopped_like_ctrl_c

if TYPE_CHECKING:
    from inspect_ai.model import ChatMessage
    from inspect_ai.tool import ToolCall

    from inspect_tinker_plugin.rl.rollouts import RolloutReport

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
        except (SystemExit, Exception) as end:
            interrupted = isinstance(end, SystemExit) and end.code == EXIT_INTERRUPTED
            if stopped.by is not None and (interrupted or _leave_closed_terminal()):
                sys.exit(128 + stopped.by)
            raise


def _leave_closed_terminal() -> bool:
    """Send what would go to a terminal that was closed nowhere; return whether one was."""
    closed = False
    for descriptor in (1, 2):
        try:
            os.write(descriptor, b"")
        except OSError as error:
            if error.errno == errno.EIO:
                os.dup2(os.open(os.devnull, os.O_WRONLY), descriptor)
                closed = True
    return closed


def _line(error: Exception) -> str:
    text = " ".join(str(error).split())
    if any(each.__module__.partition(".")[0] in OUR_PACKAGES for each in type(error).__mro__):
        return text
    if reason := missing_package(error):
        return reason
    if isinstance(error, OSError) and (error.filename or error.errno == errno.ENOSPC):
        return f"{error.strerror}: {error.filename or 'the output cannot be written'}"
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
    from rich import progress

    console = Console(stderr=True)
    columns = (
        progress.TextColumn("{task.description}"),
        progress.BarColumn(),
        progress.MofNCompleteColumn(),
        progress.TimeRemainingColumn(),
        progress.TextColumn("{task.fields[failed]}"),
    )
    hidden = not console.is_terminal
    with progress.Progress(*columns, console=console, transient=True, disable=hidden) as bar:
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


WIDTH = 100
"""Width of output that does not go to a terminal."""

STYLES = {"system": "magenta", "user": "cyan", "assistant": "green", "tool": "yellow"}
"""Colour of a message by its role."""

CODE_ARGUMENTS = {"command": "bash", "cmd": "bash", "code": "python"}
"""Tool arguments that are shown as source text, with their language."""

MAX_LINES = {"system": 4, "user": 14, "assistant": 14, "tool": 14}
"""Longer texts are shown with their middle left out, unless ``full`` is set."""

_BLANK = re.compile(r"\n\s*\n")


def table_console() -> Console:
    """Make the console for results: as wide as the terminal or ``COLUMNS``, else 100 columns."""
    console = Console()
    if console.is_terminal or os.environ.get("COLUMNS", "").isdigit():
        return console
    return Console(width=WIDTH)


def print_to(console: Console, what: RenderableType) -> None:
    """Print to a console; in a file or a pipe, lines have no trailing blanks."""
    if console.is_terminal:
        console.print(what)
        return
    with console.capture() as capture:
        console.print(what)
    console.file.write("".join(f"{line.rstrip()}\n" for line in capture.get().splitlines()))


def _plain(text: str, style: str = "") -> Text:
    return Text(clean_text(text), style)


def show_conversation(report: RolloutReport, *, full: bool = False) -> RenderableType:
    """Show one rollout from its first message to its reward."""
    title = Text.assemble((f"rollout {report.number}", "bold"), f" of sample {report.sample_id}")
    turns = 0
    panels: list[RenderableType] = [Rule(title, style="dim")]
    for message in report.messages:
        turns += message.role == "assistant"
        panels.append(_show_message(message, turns, full=full))
    return Group(*panels, _show_ending(report))


def _show_message(message: ChatMessage, turn: int, *, full: bool) -> RenderableType:
    style, about = STYLES[message.role], ""
    if message.role == "assistant":
        about = f" · turn {turn}"
    elif message.role == "tool":
        about = f" · {message.function or 'result'}"
    parts: list[RenderableType] = []
    if not isinstance(message.content, str):
        thoughts = [part.reasoning for part in message.content if part.type == "reasoning"]
        if reasoning := "\n".join(thoughts).strip():
            parts.append(_plain(_shorten(reasoning, full=full), "italic dim"))
    error = getattr(message, "error", None)
    text = _BLANK.sub("\n\n", message.text.strip("\n").rstrip())
    if text := text or (error.message if error is not None else ""):
        tone = "red" if error is not None else "dim" if message.role == "system" else ""
        parts.append(_plain(_shorten(text, full=full, lines=MAX_LINES[message.role]), tone))
    parts += [_show_call(call, full=full) for call in getattr(message, "tool_calls", None) or []]
    return Panel(
        Group(*parts) if parts else Text("(empty)", style="dim"),
        title=Text(f"{message.role}{about}", style=f"bold {style}"),
        title_align="left",
        border_style=style,
    )


def _show_call(call: ToolCall, *, full: bool) -> RenderableType:
    name = Text.assemble(("▶ ", "bold blue"), (clean_text(call.function), "bold blue"))
    if call.parse_error:
        return Group(name, _plain(call.parse_error).append(" (not parsed)", style="red"))
    key, value = next(iter(call.arguments.items()), ("", None))
    if len(call.arguments) == 1 and key in CODE_ARGUMENTS and isinstance(value, str):
        language, code = CODE_ARGUMENTS[key], _shorten(value, full=full)
    else:
        language, code = "json", json.dumps(call.arguments, ensure_ascii=False)
        if len(code) > 60:
            code = json.dumps(call.arguments, ensure_ascii=False, indent=2)
    source = Syntax(clean_text(code), language, background_color="default", word_wrap=True)
    return Group(name, Padding(source, (0, 0, 0, 2)))


def _show_ending(report: RolloutReport) -> RenderableType:
    title = Text(f"reward {_number(report.reward)}", style="bold")
    if report.error:
        if report.reward is not None:
            title.append(" (stated with --on-error)")
        title = Text.assemble("failed · ", title)
        return Panel(_plain(report.error), title=title, title_align="left", border_style="red")
    grid = Table.grid(padding=(0, 2))
    grid.add_column(style="dim")
    grid.add_column()
    for name, score in report.scores.items():
        grid.add_row(f"score {name}", Text(_value(score), style="bold"))
        if score.get("explanation"):
            grid.add_row("", _plain(_shorten(str(score["explanation"]), full=False, lines=3)))
    tokens = f"{report.input_tokens:,} read, {report.output_tokens:,} sampled"
    if (trained := report.metrics.get("tokens/trained")) is not None:
        sequences = counted(int(report.metrics["tokens/segments"]), "training sequence")
        tokens += f"; {trained:,.0f} in {sequences}"
    grid.add_row("advantage", f"{_number(report.advantage, signed=True)} in its group")
    grid.add_row("ended by", report.stop or "")
    grid.add_row("tokens", tokens)
    style = "green" if (report.reward or 0) > 0 else "red"
    return Panel(grid, title=title, title_align="left", border_style=style, box=box.HEAVY)


def show_group(reports: Sequence[RolloutReport], *, shown: int = 0) -> RenderableType:
    """Compare the rollouts of one group, one per line, and say why any of them failed."""
    table = Table(box=box.SIMPLE_HEAD, title_justify="left", pad_edge=False)
    table.title = Text(f"sample {reports[0].sample_id}: {counted(len(reports), 'rollout')}", "bold")
    for heading in ("rollout", "turns", "read", "sampled", "reward", "advantage"):
        table.add_column(heading, justify="right")
    table.add_column("scores", overflow="fold")
    table.add_column("ended by", overflow="fold")
    for report in reports:
        table.add_row(
            str(report.number),
            str(report.turns),
            f"{report.input_tokens:,}",
            f"{report.output_tokens:,}",
            _number(report.reward),
            _number(report.advantage, signed=True),
            _plain(", ".join(f"{name}={_value(s)}" for name, s in report.scores.items())),
            Text("failed", "bold red") if report.error else Text(report.stop or "", "dim"),
        )
    failures = [
        _plain(f"rollout {report.number} failed: {report.error}\n")
        for report in reports[shown:]
        if report.error
    ]
    return Padding(Group(table, *failures), (1, 0, 0, 0))


def _value(score: Mapping[str, Any]) -> str:
    value = score["value"]
    return f"{value:.3g}" if isinstance(value, float) else str(value)


def _shorten(text: str, *, full: bool, lines: int = MAX_LINES["assistant"]) -> str:
    rows = text.splitlines()
    if full or len(rows) <= lines:
        return text
    tail = lines // 4
    head = lines - tail
    missing_package = f"… {len(rows) - lines} lines more …"
    return "\n".join(
        [*rows[:head], missing_package, *rows[-tail:]] if tail else [*rows[:head], missing_package]
    )


def _number(value: float | None, *, signed: bool = False) -> str:
    """Format a number; absent is not zero."""
    if value is None:
        return "none"
    shown = round(value, 2) + 0.0  # no "-0.00"
    return f"{shown:+.2f}" if signed else f"{shown:.2f}"
