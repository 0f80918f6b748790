"""The report of an audit: as JSON, and as ``audit.html``, one page that needs no other file."""

from __future__ import annotations

import json
import os
import shlex
from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from html import escape
from pathlib import Path
from statistics import fmean
from typing import Any
from urllib.parse import quote

from inspect_ai.log import read_eval_log_sample
from inspect_ai.model import ChatMessage

from inspect_rl_audit.contract import AuditContext
from inspect_rl_audit.records import CODES, EpisodeRecord, Finding, Severity
from inspect_tinker_plugin.plugins import counted
from inspect_tinker_plugin.train import plan_rows, plan_title

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
        **{name: value for name, value in context.figures.items() if name != "unfinished"},
    }


def _mean(records: Iterable[EpisodeRecord]) -> float | None:
    given = [record.reward for record in records if record.reward is not None]
    return round(fmean(given), 4) if given else None


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
        log, id, epoch = json.loads(place)
        try:
            sample = read_eval_log_sample(str(out / log), id=id, epoch=epoch)
        except (OSError, IndexError, KeyError, ValueError):
            continue  # moved away: the page says where it was
        found[place] = [(message.role, _text_of(message)) for message in sample.messages[:30]]
    return found


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
    lines = [
        f"{attempts} at {counted(signal['samples'], 'sample')}: {chances}; "
        f"{signal['flat_groups']} of {counted(signal['groups'], 'group')} without a difference",
        f"turns: {_spread(signal['turns'])}; tokens sampled: {_spread(signal['output_tokens'])}",
        f"ended by: {ended}",
    ]
    advice = signal["recommendation"]
    options = f"--group-size {advice['group_size']} --max-tokens {advice['max_tokens']}"
    if "sample_ids_file" in advice:
        path = shlex.quote(f"{folder}/{advice['sample_ids_file']}")
        options += f" --sample-id @{path}  (leaves out {counted(advice['drop'], 'sample')})"
    return [*lines, f"for a first run: {options}"]


def _spread(figures: Mapping[str, Any]) -> str:
    least, most, median = figures["least"], figures["most"], figures["median"]
    return f"{least:,} to {most:,}, median {median:,}, 90 % below {figures['p90']:,}"


# the page


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
    worst = min((Severity(f["severity"]) for f in findings), key=lambda s: s.rank, default=None)
    verdict = _VERDICTS[worst] if worst is not None else "Nothing found"
    advice = summary.get("advice", {})
    items = [_finding(f, advice.get(f["code"], ""), transcripts or {}) for f in findings]
    parts = [
        f"<h1>{escape(name.rpartition('/')[2])}</h1>",
        f'<p class="sub">Audit of {escape(name)}</p>',
        f'<p class="verdict {worst or "info"}">{verdict}.</p>',
        _tiles(summary),
        "<section><h2>Findings</h2>"
        '<p class="note">The worst first. Open an episode\'s log with <code>inspect view</code> in '
        f"this folder.</p>{''.join(items) or '<p>None.</p>'}</section>",
        _policy_table(summary),
    ]
    if signal := summary.get("signal"):
        lines = signal_lines(signal, str(summary["folder"]))
        parts.append(_card("Signal of a real model", "Its attempts at samples.", _pre(lines)))
    if plan := summary.get("cost"):
        parts.append(_cost_table(plan))
    style = Path(__file__).with_name("page.css").read_text(encoding="utf-8")
    return _PAGE.format(title=escape(f"{name}: audit"), style=style, body="\n".join(parts))


def place_of(evidence: Mapping[str, Any]) -> str | None:
    """Return the place of a finding's episode: log, sample and epoch; ``None`` if it has none."""
    if not evidence.get("log"):
        return None
    return json.dumps([evidence["log"], evidence.get("sample"), evidence.get("epoch", 1)])


def _card(title: str, note: str, body: str) -> str:
    return (
        f'<section class="card"><h2>{title}</h2><p class="note">{note}</p>'
        f'<div class="scroll">{body}</div></section>'
    )


def _pre(lines: Sequence[str]) -> str:
    return f"<pre>{escape(chr(10).join(lines))}</pre>"


def _tiles(summary: Mapping[str, Any]) -> str:
    means = summary.get("mean_reward") or {}
    tiles = [(str(n), severity, severity) for severity, n in summary["counts"].items()]
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


def _finding(each: Mapping[str, Any], advice: str, transcripts: Mapping[str, Transcript]) -> str:
    severity, sample = str(each["severity"]), each["sample"]
    where = "" if sample is None else f'<span class="where">sample {escape(str(sample))}</span>'
    parts = [
        f'<article class="finding {severity}"><header><b class="badge">{severity}</b>'
        f"<code>{escape(each['code'])}</code>{where}</header>",
        f"<p>{escape(each['message'])}</p>",
        f'<p class="advice">{escape(advice)}</p>' if advice else "",
    ]
    rows = []
    for name, value in each["evidence"].items():
        text = value if isinstance(value, str) else json.dumps(value, default=str)
        cell = escape(text[:600])
        if name == "log":
            cell = f'<a href="{quote(text)}">{escape(text.rpartition("/")[2])}</a>'
        if name != "plan":
            rows.append(f"<dt>{escape(name)}</dt><dd>{cell}</dd>")
    messages = [
        f'<div class="message {escape(role)}"><span>{escape(role)}</span>'
        f"<pre>{escape(text[:_CHARACTERS]) or '(nothing)'}"
        f"{' …' if len(text) > _CHARACTERS else ''}</pre></div>"
        for role, text in transcripts.get(place_of(each["evidence"]) or "", ())
    ]
    if rows:
        parts.append(f"<details><summary>Evidence</summary><dl>{''.join(rows)}</dl></details>")
    if messages:
        parts.append(f"<details><summary>The episode</summary>{''.join(messages)}</details>")
    return "".join([*parts, "</article>"])


def _policy_table(summary: Mapping[str, Any]) -> str:
    table = summary.get("policies") or {}
    full = float(summary.get("full_reward") or 1.0)
    rows = []
    for policy, row in sorted(table.items(), key=lambda item: -(item[1]["mean_reward"] or -1e9)):
        mean = row["mean_reward"]
        width = max(0.0, min(1.0, (mean or 0.0) / full)) * 100
        kind = _BARS.get(row["kind"], "odd")
        bar = f'<i class="bar {kind}" style="width:{width:.0f}%"></i>'
        rows.append(
            f"<tr><td>{escape(policy)}</td><td>{row['episodes']}</td><td>{row['failed']}</td>"
            f'<td>{_number(mean)}</td><td class="bars">{bar}</td></tr>'
        )
    note = (
        "Right answers in green, “I do not know.” in grey; whatever else earns a reward earns it "
        "for nothing."
    )
    head = "<tr><th>policy</th><th>episodes</th><th>failed</th><th>mean reward</th><th></th></tr>"
    return _card("What every policy earned", note, _table(head, rows))


def _cost_table(plan: Mapping[str, Any]) -> str:
    note = (
        f"One pass over the task: {plan_title(plan)}. A real model's replies are longer than a "
        "script's."
    )
    rows = [
        f"<tr><td>{escape(label)}</td><td>{one}</td><td>{whole}</td></tr>"
        for label, one, whole in plan_rows(plan)
    ]
    head = "<tr><th></th><th>per episode</th><th>in all</th></tr>"
    return _card("Cost", note, _table(head, rows, kind="cost"))


def _table(head: str, rows: Sequence[str], *, kind: str = "") -> str:
    start = f'<table class="{kind}">' if kind else "<table>"
    return f"{start}<thead>{head}</thead><tbody>{''.join(rows)}</tbody></table>"


def _number(value: float | None) -> str:
    return "none" if value is None else f"{value:.2f}"
