"""The report of an audit: as JSON, and as ``audit.html``, one page that needs no other file."""

from __future__ import annotations

import json
import os
from collections.abc import Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from html import escape
from pathlib import Path
from typing import Any
from urllib.parse import quote

from inspect_ai.log import read_eval_log_sample
from inspect_ai.model import ChatMessage

from inspect_rl_audit.contract import AuditContext
from inspect_rl_audit.findings import CODES, Finding, Severity
from inspect_rl_audit.records import EpisodeRecord
from inspect_tinker_plugin.plugins import counted
from inspect_tinker_plugin.train import plan_lines

PAGE = "audit.html"


DATA = "audit.json"


_TRANSCRIPTS = 40


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
        return {
            "task": self.task,
            "findings": [
                {
                    "code": each.code,
                    "severity": str(each.severity),
                    "sample": each.sample,
                    "message": each.message,
                    "evidence": dict(each.evidence),
                }
                for each in self.findings
            ],
            "summary": self.summary,
        }

    def worst(self) -> Severity | None:
        """Severity of the worst finding."""
        return min((each.severity for each in self.findings), key=lambda s: s.rank, default=None)


def summarise(found: Sequence[Finding], context: AuditContext, probes: list[str]) -> dict[str, Any]:
    records = context.stage.records
    reference = context.reference
    paid = [r.reward for r in reference.gold.values() if r.reward is not None]
    null = [r.reward for r in reference.null.values() if r.reward is not None]
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
            "unknowing": round(sum(null) / len(null), 4) if null else None,
            "gold": round(sum(paid) / len(paid), 4) if paid else None,
        },
        "gold_form": reference.form if reference.gold else None,
        "policies": _policies(context),
        "advice": {f.code: f.advice or _usual_advice(f.code) for f in found},
        "folder": str(context.folder),
        **{name: value for name, value in context.figures.items() if name != "unfinished"},
    }


def _policies(context: AuditContext) -> dict[str, dict[str, Any]]:
    """Return kind, episodes, mean reward and failures of every policy."""
    by_policy: dict[str, list[EpisodeRecord]] = {}
    for record in context.stage.records:
        by_policy.setdefault(record.policy, []).append(record)
    table: dict[str, dict[str, Any]] = {}
    for policy, records in by_policy.items():
        given = [record.reward for record in records if record.reward is not None]
        table[policy] = {
            "kind": records[0].kind,
            "episodes": len(records),
            "mean_reward": round(sum(given) / len(given), 4) if given else None,
            "failed": len(records) - len(given),
        }
    return table


def _usual_advice(code: str) -> str:
    return CODES[code].advice if code in CODES else ""


def write_report(report: AuditReport, out: Path) -> None:
    data = report.as_json()
    with ThreadPoolExecutor(1, thread_name_prefix="audit-log") as thread:
        transcripts = thread.submit(_transcripts, report, out).result()
    for name, text in (
        (DATA, json.dumps(data, indent=2, default=str, ensure_ascii=False) + "\n"),
        (PAGE, render(data, transcripts)),
    ):
        temporary = out / f".{name}.writing"
        temporary.write_text(text, encoding="utf-8")
        os.replace(temporary, out / name)


def _transcripts(report: AuditReport, out: Path) -> dict[str, Transcript]:
    """Return the messages of the episodes that the worst findings name."""
    found: dict[str, Transcript] = {}
    for each in report.findings:
        place = place_of(each.evidence)
        if place is None or place in found or len(found) >= _TRANSCRIPTS:
            continue
        path, id, epoch = out / str(each.evidence["log"]), each.evidence["sample"], each.evidence
        try:
            sample = read_eval_log_sample(str(path), id=id, epoch=int(epoch.get("epoch", 1)))
        except (OSError, IndexError, KeyError, ValueError):
            continue  # moved away: the page says where it was
        found[place] = [(message.role, _said(message)) for message in sample.messages[:30]]
    return found


def _said(message: ChatMessage) -> str:
    calls = getattr(message, "tool_calls", None) or []
    lines = [f"{call.function}({json.dumps(call.arguments)})" for call in calls]
    return "\n".join([message.text, *lines]).strip()


_PAGE = """<!doctype html>
<html lang="en"><head><meta charset="utf-8">
<meta name="viewport" content="width=device-width, initial-scale=1">
<title>{title}</title><style>{style}</style></head>
<body><main>{body}</main></body></html>
"""

_VERDICTS = {
    Severity.HIGH: "Not fit to train on yet",
    Severity.MEDIUM: "Fit to train on with care",
    Severity.LOW: "Fit to train on",
    Severity.INFO: "Fit to train on",
}

_BARS = {"right": "good", "reworded": "good", "unknowing": "plain"}
"""Colour of a reward by the kind of its policy; all others are for nothing."""

_CHARACTERS = 1500

Transcript = Sequence[tuple[str, str]]
"""Roles and texts of the messages of one episode."""


def render(report: Mapping[str, Any], transcripts: Mapping[str, Transcript] | None = None) -> str:
    """Return the page.

    Args:
        report: The report, as ``--json`` prints it.
        transcripts: Messages of the episodes that findings name, by `place_of` their evidence.
    """
    findings, summary = report["findings"], report["summary"]
    name = str(report["task"])
    parts = [
        f"<h1>{escape(name.rpartition('/')[2])}</h1>",
        f'<p class="sub">Audit of {escape(name)}</p>',
        _verdict(findings),
        _tiles(findings, summary),
        _findings(findings, summary.get("advice", {}), transcripts or {}),
        _policy_table(summary),
        _signal(summary.get("signal")),
        _cost(summary.get("cost")),
        _details(summary),
    ]
    style = Path(__file__).with_name("page.css").read_text(encoding="utf-8")
    return _PAGE.format(title=escape(f"{name}: audit"), style=style, body="\n".join(parts))


def place_of(evidence: Mapping[str, Any]) -> str | None:
    """Return the place of a finding's episode: log, sample and epoch; ``None`` if it has none."""
    if not evidence.get("log"):
        return None
    return json.dumps([evidence["log"], evidence.get("sample"), evidence.get("epoch", 1)])


def _verdict(findings: Sequence[Mapping[str, Any]]) -> str:
    worst = min((Severity(f["severity"]) for f in findings), key=lambda s: s.rank, default=None)
    text = _VERDICTS[worst] if worst is not None else "Nothing found"
    return f'<p class="verdict {worst or "info"}">{text}.</p>'


def _tiles(findings: Sequence[Mapping[str, Any]], summary: Mapping[str, Any]) -> str:
    means = summary.get("mean_reward") or {}
    tiles = [
        (str(summary["counts"][str(severity)]), str(severity), str(severity))
        for severity in Severity
    ]
    tiles += [
        (f"{summary['samples_tried']} / {summary['samples']}", "samples tried", ""),
        (str(summary["episodes"]), "episodes", ""),
        (_number(means.get("unknowing")), "reward for “I do not know.”", ""),
        (_number(means.get("gold")), "reward for the right answer", ""),
    ]
    cells = (
        f'<div class="tile {kind}"><b>{escape(value)}</b><span>{escape(label)}</span></div>'
        for value, label, kind in tiles
    )
    return f'<div class="tiles">{"".join(cells)}</div>'


def _findings(
    findings: Sequence[Mapping[str, Any]],
    advice: Mapping[str, str],
    transcripts: Mapping[str, Transcript],
) -> str:
    if not findings:
        return '<section class="card"><h2>Findings</h2><p class="none">None.</p></section>'
    items = [_finding(each, advice.get(each["code"], ""), transcripts) for each in findings]
    note = "The worst first. Open an episode's log with <code>inspect view</code> in this folder."
    return f'<section><h2>Findings</h2><p class="note">{note}</p>{"".join(items)}</section>'


def _finding(each: Mapping[str, Any], advice: str, transcripts: Mapping[str, Transcript]) -> str:
    severity, evidence = str(each["severity"]), each["evidence"]
    where = (
        ""
        if each["sample"] is None
        else f'<span class="where">sample {escape(str(each["sample"]))}</span>'
    )
    place = place_of(evidence)
    shown = transcripts.get(place or "", ())
    parts = [
        f'<article class="finding {severity}"><header><b class="badge">{severity}</b>'
        f"<code>{escape(each['code'])}</code>{where}</header>",
        f"<p>{escape(each['message'])}</p>",
    ]
    if advice:
        parts.append(f'<p class="advice">{escape(advice)}</p>')
    if evidence:
        parts.append(_evidence(evidence))
    if shown:
        parts.append(_transcript(shown))
    return "".join([*parts, "</article>"])


def _evidence(evidence: Mapping[str, Any]) -> str:
    rows = []
    for name, value in evidence.items():
        if name == "plan":
            continue
        text = value if isinstance(value, str) else json.dumps(value, default=str)
        cell = escape(text[:600])
        if name == "log":
            cell = f'<a href="{quote(text)}">{escape(text.rpartition("/")[2])}</a>'
        rows.append(f"<dt>{escape(name)}</dt><dd>{cell}</dd>")
    return f"<details><summary>Evidence</summary><dl>{''.join(rows)}</dl></details>" if rows else ""


def _transcript(messages: Transcript) -> str:
    rows = []
    for role, text in messages:
        cut = text if len(text) <= _CHARACTERS else f"{text[:_CHARACTERS]} …"
        rows.append(
            f'<div class="message {escape(role)}"><span>{escape(role)}</span>'
            f"<pre>{escape(cut) or '(nothing)'}</pre></div>"
        )
    return f"<details><summary>The episode</summary>{''.join(rows)}</details>"


def _policy_table(summary: Mapping[str, Any]) -> str:
    table = summary.get("policies") or {}
    if not table:
        return ""
    full = float(summary.get("full_reward") or 1.0)
    rows = []
    for policy, row in sorted(table.items(), key=lambda item: -(item[1]["mean_reward"] or -1e9)):
        mean = row["mean_reward"]
        width = 0.0 if mean is None else max(0.0, min(1.0, mean / full)) * 100
        kind = _BARS.get(row["kind"], "odd")
        bar = f'<i class="bar {kind}" style="width:{width:.0f}%"></i>'
        rows.append(
            f"<tr><td>{escape(policy)}</td><td>{row['episodes']}</td><td>{row['failed']}</td>"
            f'<td>{_number(mean)}</td><td class="bars">{bar}</td></tr>'
        )
    head = "<tr><th>policy</th><th>episodes</th><th>failed</th><th>mean reward</th><th></th></tr>"
    return (
        '<section class="card"><h2>What every policy earned</h2><p class="note">Right answers in '
        "green, “I do not know.” in grey; whatever else earns a reward earns it for nothing.</p>"
        f'<div class="scroll"><table><thead>{head}</thead><tbody>{"".join(rows)}</tbody></table>'
        "</div></section>"
    )


def _signal(signal: Mapping[str, Any] | None) -> str:
    if not signal:
        return ""
    lines = [
        ("attempts", f"{signal['attempts']} at {counted(signal['samples'], 'sample')}"),
        ("mean reward", _number(signal["mean_reward"])),
        ("pass@k", ", ".join(f"{k}: {v:.2f}" for k, v in signal["pass_at"].items())),
        ("groups without a difference", f"{signal['flat_groups']} of {signal['groups']}"),
        ("solved by all, by none", f"{signal['solved_by_all']}, {signal['solved_by_none']}"),
        ("turns", _spread(signal["turns"])),
        ("tokens sampled", _spread(signal["output_tokens"])),
        ("ended by", ", ".join(f"{k} ({v})" for k, v in signal["stop_reasons"].items())),
    ]
    if "recommendation" in signal:
        advice = ", ".join(f"{k} {v}" for k, v in signal["recommendation"].items())
        lines.append(("recommended", advice))
    rows = "".join(f"<dt>{escape(k)}</dt><dd>{escape(v)}</dd>" for k, v in lines)
    return f'<section class="card"><h2>Signal of a real model</h2><dl>{rows}</dl></section>'


def _spread(figures: Mapping[str, Any]) -> str:
    return (
        f"{figures['least']:,} to {figures['most']:,}, median {figures['median']:,}, "
        f"90 % below {figures['p90']:,}"
    )


def _cost(plan: Mapping[str, Any] | None) -> str:
    if not plan:
        return ""
    text = escape("\n".join(plan_lines(plan)))
    note = "One pass over the task; a real model's replies are longer than a script's."
    return (
        f'<section class="card"><h2>Cost</h2><p class="note">{note}</p>'
        f'<div class="scroll"><pre>{text}</pre></div></section>'
    )


def _details(summary: Mapping[str, Any]) -> str:
    kept = {k: v for k, v in summary.items() if k not in ("policies", "advice", "signal", "cost")}
    text = escape(json.dumps(kept, indent=2, default=str, ensure_ascii=False))
    return f'<details class="card"><summary>All figures</summary><pre>{text}</pre></details>'


def _number(value: float | None) -> str:
    return "none" if value is None else f"{value:.2f}"
