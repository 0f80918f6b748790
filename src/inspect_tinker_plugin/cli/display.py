"""Shows results in a terminal: conversations with rewards, tables of groups."""

from __future__ import annotations

import json
import os
import re
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

from rich import box
from rich.console import Console, Group, RenderableType
from rich.padding import Padding
from rich.panel import Panel
from rich.rule import Rule
from rich.syntax import Syntax
from rich.table import Table
from rich.text import Text

from inspect_tinker_plugin.contracts.wording import counted

if TYPE_CHECKING:
    from inspect_ai.model import ChatMessage
    from inspect_ai.tool import ToolCall

    from inspect_tinker_plugin.cli.group_rollout import RolloutReport

WIDTH = 100
"""Width of output that does not go to a terminal."""

STYLES = {"system": "magenta", "user": "cyan", "assistant": "green", "tool": "yellow"}
"""Colour of a message by its role."""

CODE_ARGUMENTS = {"command": "bash", "cmd": "bash", "code": "python"}
"""Tool arguments that are shown as source text, with their language."""

MAX_LINES = {"system": 4, "user": 14, "assistant": 14, "tool": 14}
"""Longer texts are shown with their middle left out, unless ``full`` is set."""

_BLANK = re.compile(r"\n\s*\n")
# A terminal would obey these if a model or a tool wrote them; tab and newline are harmless.
_CONTROL = re.compile(r"[\x00-\x08\x0b-\x1f\x7f-\x9f]")


def show_conversation(report: RolloutReport, *, full: bool = False) -> RenderableType:
    """One rollout from its first message to its reward.

    Args:
        report: The rollout.
        full: Show long texts whole.
    """
    title = Text.assemble(
        ("rollout ", "bold"), (f"{report.number}", "bold"), f" of sample {report.sample_id}"
    )
    turns = 0
    panels: list[RenderableType] = [Rule(title, style="dim")]
    for message in report.messages:
        turns += message.role == "assistant"
        panels.append(_message_panel(message, turns, full=full))
    return Group(*panels, _verdict(report))


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


def show_group(
    reports: Sequence[RolloutReport], *, width: int = WIDTH, shown: int = 0
) -> RenderableType:
    """Compare the rollouts of one group, one per line, and say why any of them failed.

    Args:
        reports: The rollouts.
        width: Available columns; a list replaces a table that does not fit.
        shown: Number of rollouts that were shown before, with their errors.
    """
    table = _group_table(reports)
    fits = Console(width=1_000).measure(table).maximum <= width
    failures = [
        _plain(f"rollout {report.number} failed: {report.error}").append("\n")
        for report in reports[shown:]
        if report.error
    ]
    return Padding(Group(table if fits else _group_list(reports), *failures), (1, 0, 0, 0))


def _title(reports: Sequence[RolloutReport]) -> Text:
    return Text(f"sample {reports[0].sample_id}: {counted(len(reports), 'rollout')}", "bold")


def _group_list(reports: Sequence[RolloutReport]) -> RenderableType:
    lines = [_title(reports)]
    for report in reports:
        scores = ", ".join(f"{name}={_value(score)}" for name, score in report.scores.items())
        line = Text(f"{report.number}. ", "bold")
        line.append(f"reward {_number(report.reward)} ({_number(report.advantage, signed=True)})")
        line.append(f", {counted(report.turns, 'turn')}", "not bold")
        line.append(
            f", {counted(report.input_tokens, 'token')} read, {report.output_tokens:,} sampled"
        )
        line.append(f"; {clean_text(scores)}" if scores else "")
        line.append("; failed" if report.error else f"; {report.stop or ''}")
        lines.append(line)
    return Group(*lines, Text(""))


def _group_table(reports: Sequence[RolloutReport]) -> Table:
    table = Table(box=box.SIMPLE_HEAD, title_justify="left", pad_edge=False)
    table.title = _title(reports)
    for heading in ("rollout", "turns", "prompt tokens", "sampled", "reward", "advantage"):
        table.add_column(heading, justify="right")
    table.add_column("scores")
    table.add_column("ended by")
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
    return table


def _message_panel(message: ChatMessage, turn: int, *, full: bool) -> RenderableType:
    style = STYLES[message.role]
    parts: list[RenderableType] = []
    name: str = message.role
    if message.role == "assistant":
        name = f"assistant · turn {turn}"
    elif message.role == "tool":
        name = f"tool · {message.function or 'result'}"
    reasoning = _reasoning(message)
    if reasoning:
        parts.append(Text(_shorten(reasoning, full=full), style="italic dim"))
    error = getattr(message, "error", None)
    text = _BLANK.sub("\n\n", message.text.strip("\n").rstrip())
    text = text or (error.message if error is not None else "")
    if text:
        body = _plain(_shorten(text, full=full, lines=MAX_LINES[message.role]))
        body.stylize("red" if error is not None else "dim" if message.role == "system" else "")
        parts.append(body)
    parts += [_tool_call(call, full=full) for call in getattr(message, "tool_calls", None) or []]
    return Panel(
        Group(*parts) if parts else Text("(empty)", style="dim"),
        title=Text(name, style=f"bold {style}"),
        title_align="left",
        border_style=style,
        box=box.ROUNDED,
    )


def _tool_call(call: ToolCall, *, full: bool) -> RenderableType:
    name = Text.assemble(("▶ ", "bold blue"), (clean_text(call.function), "bold blue"))
    if call.parse_error:
        return Group(name, _plain(call.parse_error).append(" (not parsed)", style="red"))
    (key, value), *more = list(call.arguments.items()) or [("", None)]
    language = CODE_ARGUMENTS.get(key)
    if language and isinstance(value, str) and not more:
        code = _shorten(value, full=full)
    elif not call.arguments:
        return name.append("()")
    else:
        language, code = "json", json.dumps(call.arguments, ensure_ascii=False, indent=2)
        if len(call.arguments) == 1 and "\n" not in str(value) and len(str(value)) < 60:
            code = json.dumps(call.arguments, ensure_ascii=False)
    source = Syntax(clean_text(code), language, background_color="default", word_wrap=True)
    return Group(name, Padding(source, (0, 0, 0, 2)))


def _verdict(report: RolloutReport) -> RenderableType:
    if report.error:
        title = Text("failed", style="bold")
        if report.reward is not None:
            title.append(f" · reward {_number(report.reward)} (stated with --on-error)")
        return Panel(_plain(report.error), title=title, title_align="left", border_style="red")
    grid = Table.grid(padding=(0, 2))
    grid.add_column(style="dim")
    grid.add_column()
    for name, score in report.scores.items():
        grid.add_row(f"score {name}", Text(_value(score), style="bold"))
        if score.get("explanation"):
            why = _shorten(str(score["explanation"]), full=False, lines=3)
            grid.add_row("", _plain(why))
    grid.add_row("reward", Text(_number(report.reward), style="bold"))
    grid.add_row("advantage", f"{_number(report.advantage, signed=True)} in its group")
    grid.add_row("ended by", report.stop or "")
    grid.add_row("tokens", _tokens(report))
    good = report.reward is not None and report.reward > 0
    title = Text(f"reward {_number(report.reward)}", style="bold")
    style = "green" if good else "red"
    return Panel(grid, title=title, title_align="left", border_style=style, box=box.HEAVY)


def _tokens(report: RolloutReport) -> str:
    text = f"{report.input_tokens:,} read, {report.output_tokens:,} sampled"
    trained, sequences = report.metrics.get("tokens/trained"), report.metrics.get("tokens/segments")
    if trained is None or sequences is None:
        return text
    return f"{text}; {trained:,.0f} in {counted(int(sequences), 'training sequence')}"


def _value(score: Mapping[str, Any]) -> str:
    value = score["value"]
    return f"{value:.3g}" if isinstance(value, float) else str(value)


def _reasoning(message: ChatMessage) -> str:
    if isinstance(message.content, str):
        return ""
    parts: list[Any] = [part for part in message.content if part.type == "reasoning"]
    return "\n".join(part.reasoning for part in parts).strip()


def _shorten(text: str, *, full: bool, lines: int = MAX_LINES["assistant"]) -> str:
    rows = text.splitlines()
    if full or len(rows) <= lines:
        return text
    tail = lines // 4
    left_out = len(rows) - (lines - tail)
    return "\n".join([*rows[: lines - tail], f"… {left_out - tail} lines more …", *rows[-tail:]])


def clean_text(text: str) -> str:
    """Replace what a terminal would obey."""
    return _CONTROL.sub("\N{REPLACEMENT CHARACTER}", text)


def _plain(text: str) -> Text:
    return Text(clean_text(text))


def _number(value: float | None, *, signed: bool = False) -> str:
    """Format a number; absent is not zero."""
    if value is None:
        return "none"
    shown = round(value, 2) + 0.0  # no "-0.00"
    return f"{shown:+.2f}" if signed else f"{shown:.2f}"
