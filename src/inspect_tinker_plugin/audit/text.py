"""Shows a report in a terminal."""

from __future__ import annotations

import re
import shlex
from typing import Any

from rich.console import Console
from rich.table import Table
from rich.text import Text

from inspect_tinker_plugin.audit.findings import Finding, Severity
from inspect_tinker_plugin.audit.plan import plan_lines
from inspect_tinker_plugin.audit.run import PAGE, AuditReport

_STYLES = {
    Severity.HIGH: "bold red",
    Severity.MEDIUM: "yellow",
    Severity.LOW: "cyan",
    Severity.INFO: "dim",
}
_CONTROL = re.compile(r"[\x00-\x08\x0b-\x1f\x7f-\x9f]")


def show_report(report: AuditReport, console: Console) -> None:
    """Print the findings as a table, then the advice, then figures."""
    summary = report.summary
    if report.findings:
        console.print(_table(report))
    else:
        console.print("Nothing found.")
    advice = summary.get("advice", {})
    told = [f for f in report.findings if f.severity.at_least(Severity.MEDIUM)]
    for code in dict.fromkeys(finding.code for finding in told):
        console.print(Text.assemble((f"{code}: ", "bold"), _clean(str(advice.get(code, "")))))
    if summary.get("signal"):
        console.print()
        for line in signal_lines(summary["signal"], str(summary["folder"])):
            console.print(Text(line), soft_wrap=True)
    if summary.get("cost"):
        console.print()
        for line in plan_lines(summary["cost"]):
            console.print(Text(line), soft_wrap=True)
    console.print()
    console.print(_closing(summary), soft_wrap=True)


def signal_lines(signal: dict[str, Any], folder: str) -> list[str]:
    """Return the figures of a real model's attempts, and options for a first run, as text."""
    chances = ", ".join(f"pass@{k} {chance:.2f}" for k, chance in signal["pass_at"].items())
    lines = [
        f"{signal['attempts']} attempts at {signal['samples']} samples: {chances}; "
        f"{signal['flat_groups']} of {signal['groups']} groups without a difference"
    ]
    advice = signal["recommendation"]
    options = f"--group-size {advice['group_size']} --max-tokens {advice['max_tokens']}"
    if "sample_ids_file" in advice:
        path = shlex.quote(f"{folder}/{advice['sample_ids_file']}")
        options += f" --sample-id @{path}  (leaves out {advice['drop']} samples)"
    return [*lines, f"for a first run: {options}"]


def _table(report: AuditReport) -> Table:
    table = Table(box=None, pad_edge=False, show_edge=False, padding=(0, 2, 0, 0))
    table.add_column("severity", no_wrap=True)
    table.add_column("code", no_wrap=True)
    table.add_column("sample", overflow="fold", max_width=18)
    table.add_column("finding", overflow="fold")
    for each in report.findings:
        table.add_row(
            Text(str(each.severity), style=_STYLES[each.severity]),
            each.code,
            Text("" if each.sample is None else _clean(str(each.sample))),
            _message(each),
        )
    return table


def _message(each: Finding) -> Text:
    text = Text(_clean(each.message))
    if each.evidence.get("log"):
        text.append(f" ({each.evidence['log'].rpartition('/')[2]})", style="dim")
    return text


def _closing(summary: dict[str, Any]) -> str:
    counts = ", ".join(f"{n} {severity}" for severity, n in summary["counts"].items() if n)
    return (
        f"{counts or 'no findings'}; {summary['episodes']} episodes on "
        f"{summary['samples_tried']} of {summary['samples']} samples. "
        f"Report: {summary['folder']}/{PAGE}"
    )


def _clean(text: str) -> str:
    return _CONTROL.sub("\N{REPLACEMENT CHARACTER}", text)
