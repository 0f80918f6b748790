"""The report of an audit: as JSON, and as ``audit.html``, one page that needs no other file."""

from __future__ import annotations

import json
import shlex
from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from pathlib import Path
from statistics import fmean
from typing import Any

from inspect_ai.log import read_eval_log_sample
from inspect_ai.model import ChatMessage

from inspect_rl_audit.contract import AuditContext
from inspect_rl_audit.records import CODES, EpisodeRecord, Finding, Severity
from inspect_tinker_plugin.plugins import counted
from inspect_tinker_plugin.processes import is_remote, write_whole
from inspect_tinker_plugin.train import plan_rows, plan_title

PAGE = "audit.html"

_TRANSCRIPTS = 40
"""Episodes whose messages are on the page."""

Transcript = Sequence[tuple[str, str]]
"""Roles and texts of the messages of one episode."""


@dataclass(frozen=True, kw_only=True)
class AuditReport:
    """The result of an audit."""

    task: str
    """Name of the task."""

    findings: Sequence[Finding]
    """The worst first."""

    summary: dict[str, Any] = field(default_factory=dict)
    """Counts and figures, as JSON."""

    def as_json(self) -> dict[str, Any]:
        """Return the report as ``--json`` prints it."""
        names = ("code", "severity", "sample", "message")
        findings = [
            {name: getattr(each, name) for name in names} | {"evidence": dict(each.evidence)}
            for each in self.findings
        ]
        return {"task": self.task, "findings": findings, "summary": self.summary}

    def worst(self) -> Severity | None:
        """Severity of the worst finding."""
        return self.findings[0].severity if self.findings else None


def summarise(found: Sequence[Finding], context: AuditContext, probes: list[str]) -> dict[str, Any]:
    records, reference = context.stage.records, context.reference
    by_policy: dict[str, list[EpisodeRecord]] = defaultdict(list)
    for record in records:
        by_policy[record.policy].append(record)
    return {
        "counts": {str(s): sum(f.severity is s for f in found) for s in Severity},
        "samples": len(context.samples),
        "samples_tried": len(reference.null),
        "episodes": len(records),
        "episodes_this_run": context.stage.budget.used,
        "seconds": round(sum(r.seconds for r in records), 1),
        "probes": probes,
        "full_reward": reference.full,
        "mean_reward": {
            "unknowing": _mean(reference.null.values()),
            "gold": _mean(reference.gold.values()),
        },
        "gold_form": reference.form if reference.gold else None,
        "policies": {
            policy: {
                "kind": own[0].kind,
                "episodes": len(own),
                "mean_reward": _mean(own),
                "failed": sum(record.reward is None for record in own),
            }
            for policy, own in by_policy.items()
        },
        "advice": {
            f.code: f.advice or (CODES[f.code].advice if f.code in CODES else "") for f in found
        },
        "folder": str(context.folder),
        **context.figures,
    }


def _mean(records: Iterable[EpisodeRecord]) -> float | None:
    given = [record.reward for record in records if record.reward is not None]
    return round(fmean(given), 4) if given else None


def write_report(report: AuditReport, out: Path) -> None:
    data = report.as_json()
    with ThreadPoolExecutor(1, thread_name_prefix="audit-log") as thread:
        transcripts = thread.submit(_transcripts, report, out).result()
    text = json.dumps(data, indent=2, default=str, ensure_ascii=False)
    write_whole(out / "audit.json", f"{text}\n")
    write_whole(out / PAGE, render(data, transcripts))


def _transcripts(report: AuditReport, out: Path) -> list[Transcript]:
    """Return the messages of the episodes that show the worst findings, in their order."""
    read: dict[str, Transcript] = {}
    found: list[Transcript] = []
    for each in report.findings:
        evidence = each.evidence
        place = str([evidence.get(name) for name in ("log", "sample", "epoch")])
        if evidence.get("log") and place not in read and len(read) < _TRANSCRIPTS:
            read[place] = _transcript(evidence, out)
        found.append(read.get(place, ()))
    return found


def _transcript(evidence: Mapping[str, Any], out: Path) -> Transcript:
    try:
        log, id = str(evidence["log"]), evidence["sample"]
        log = log if is_remote(log) else str(out / log)
        sample = read_eval_log_sample(log, id=id, epoch=evidence.get("epoch", 1))
    except (OSError, LookupError, TypeError, ValueError):
        return ()  # moved away: the page says where it was
    return [(message.role, _text_of(message)) for message in sample.messages[:30]]


def _text_of(message: ChatMessage) -> str:
    calls = getattr(message, "tool_calls", None) or []
    lines = [f"{call.function}({json.dumps(call.arguments)})" for call in calls]
    return "\n".join([message.text, *lines]).strip()


def signal_lines(signal: Mapping[str, Any], folder: str) -> list[str]:
    """Return the figures of a real model's attempts, and options for a first run, as text."""
    attempts = counted(signal["attempts"], "attempt")
    if "recommendation" not in signal:
        return [f"{attempts}: none ended with a reward"]
    chances = ", ".join(f"pass@{k} {chance:.2f}" for k, chance in signal["pass_at"].items())
    ended = ", ".join(f"{stop} ({n})" for stop, n in signal["stop_reasons"].items())
    advice = signal["recommendation"]
    options = f"--group-size {advice['group_size']} --max-tokens {advice['max_tokens']}"
    if "sample_ids_file" in advice:
        path = shlex.quote(f"{folder}/{advice['sample_ids_file']}")
        options += f" --sample-id @{path}  (leaves out {counted(advice['drop'], 'sample')})"
    return [
        f"{attempts} at {counted(signal['samples'], 'sample')}: {chances}; "
        f"{signal['flat_groups']} of {counted(signal['groups'], 'group')} without a difference",
        f"turns: {_spread(signal['turns'])}; tokens sampled: {_spread(signal['output_tokens'])}",
        f"ended by: {ended}",
        f"for a first run: {options}",
    ]


def _spread(figures: Mapping[str, Any]) -> str:
    shown = "{least:,} to {most:,}, median {median:,}, 90 % below {p90:,}"
    return shown.format_map(figures)


# the page

_VERDICTS = {
    "high": "Not fit to train on yet",
    "medium": "Fit to train on with care",
    "low": "Fit to train on",
    "info": "Fit to train on",
    None: "Nothing found",
}

_BARS = {"right": "good", "reworded": "good", "unknowing": "plain"}
"""Colour of a reward by the kind of its policy; all others are for nothing."""


def render(report: Mapping[str, Any], transcripts: Sequence[Transcript] = ()) -> str:
    """Return the page of a report, with the messages of the episodes that show its findings."""
    import jinja2

    folder = jinja2.FileSystemLoader(Path(__file__).parent)
    pages = jinja2.Environment(loader=folder, autoescape=True, trim_blocks=True, lstrip_blocks=True)
    summary = report["summary"]
    worst = next((each["severity"] for each in report["findings"]), None)
    signal, plan = summary.get("signal"), summary.get("cost")
    return pages.get_template("page.html").render(
        report=report,
        summary=summary,
        worst=worst,
        verdict=_VERDICTS[worst],
        advice=summary.get("advice", {}),
        means=summary.get("mean_reward") or {},
        transcripts=transcripts,
        policies=_rows_of_policies(summary),
        signal=signal and signal_lines(signal, str(summary["folder"])),
        cost=plan and plan_rows(plan),
        cost_title=plan and plan_title(plan),
    )


def _rows_of_policies(summary: Mapping[str, Any]) -> list[tuple[str, dict[str, Any]]]:
    """Return the policies, those that earned most first, with colour and width of their bars."""
    full = float(summary.get("full_reward") or 1.0)
    rows = []
    for policy, row in summary["policies"].items():
        width = round(100 * max(0.0, min(1.0, (row["mean_reward"] or 0.0) / full)))
        rows.append((policy, {**row, "bar": _BARS.get(row["kind"], "odd"), "width": width}))
    return sorted(rows, key=lambda each: -(each[1]["mean_reward"] or -1e9))
