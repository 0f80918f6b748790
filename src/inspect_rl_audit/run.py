"""Runs an audit: the honest policies first, then every probe; then writes the findings."""

from __future__ import annotations

import hashlib
import json
import os
import re
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field, replace
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any, TypeVar

from inspect_ai import Task
from inspect_ai.dataset import Sample
from inspect_ai.log import read_eval_log_sample
from inspect_ai.model import ChatMessage
from inspect_ai.util import registry_info

from inspect_rl_audit.codes import CODES
from inspect_rl_audit.contract import AuditContext, Probe, finding
from inspect_rl_audit.findings import Finding, Severity, ordered
from inspect_rl_audit.options import (
    WIDE,
    WIDE_IN_SANDBOX,
    AuditOptions,
    read_budget,
)
from inspect_rl_audit.page import Transcript, place_of, render
from inspect_rl_audit.records import AuditJournal
from inspect_rl_audit.reference import Gold, learn_reference
from inspect_rl_audit.resolve import resolve_probes
from inspect_rl_audit.stage import Stage
from inspect_tinker_plugin import inspect_internals as internals
from inspect_tinker_plugin.contracts.errors import ConfigError
from inspect_tinker_plugin.contracts.wording import counted
from inspect_tinker_plugin.options import EpisodeOptions
from inspect_tinker_plugin.plugins.manager import Plugins
from inspect_tinker_plugin.rewards import resolve_reward
from inspect_tinker_plugin.rl.hooks import with_plugin_scorers
from inspect_tinker_plugin.tasks.samples import select_samples

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


T = TypeVar("T")

Progress = Callable[[str, int | None], object]
"""Called with the current probe, and a number of planned episodes or ``None`` after each one."""


async def run_audit(
    task: Task,
    options: AuditOptions,
    *,
    name: str | None = None,
    plugins: Plugins | None = None,
    progress: Progress = lambda probe, planned: None,
) -> AuditReport:
    """Audit a task, and leave ``audit.html``, ``audit.json`` and logs in the output folder.

    The same call on the same folder continues where an earlier one stopped.

    Args:
        task: The task.
        options: What to do.
        name: The task's name in the report and the journal; its own name if not given.
        plugins: Where probes and hooks are looked up; the installed plugins when not given.
        progress: Shows how far the audit is.

    Raises:
        ConfigError: An option cannot be used, or the folder holds another audit.
    """
    probes = resolve_probes(options.probes, plugins=plugins)
    task = with_plugin_scorers(task, plugins=plugins)
    empty = task.sample_source is None and len(task.dataset) == 0  # a finding, not an error
    samples = [] if empty else list(select_samples(task, options.selection, plugins=plugins))
    gold = Gold(options.gold)
    gold.check(samples)
    out = options.out.expanduser().absolute()
    reward = resolve_reward(options.reward, plugins=plugins)
    budget = read_budget(options.budget)
    journal = AuditJournal(out, _identity(task, name, options))
    current = "honest policies"

    def told(planned: int | None) -> None:
        progress(current, planned)

    stage = Stage(
        task,
        runner_options=dict(options.runner_options),
        options=EpisodeOptions(**options.episode_options),
        reward=reward,
        journal=journal,
        folder=out,
        budget=budget,
        parallel=options.parallel,
        progress=told,
    )
    chosen = spread(samples, options.samples)
    wide = spread(samples, await _wide(stage, chosen, options))
    wide += [sample for sample in chosen if sample.id not in {s.id for s in wide}]
    if gold.script and not any([await stage.sandbox_of(sample) for sample in chosen]):
        raise ConfigError(f"the solution script {gold.source} (--gold) needs a sandbox to run in")
    context = AuditContext(
        task=task,
        samples=samples,
        chosen=chosen,
        wide=wide,
        stage=stage,
        reference=await learn_reference(stage, chosen, wide, gold),
        folder=out,
        options=options,
    )
    found: list[Finding] = []
    for current, probe in probes.items():
        refused = stage.budget.refused
        found += await _run_probe(current, probe, context)
        if stage.budget.refused > refused:
            context.figures.setdefault("unfinished", []).append(current)
    found += _budget(stage, context)
    report = AuditReport(
        task=name or task.name,
        findings=ordered(found),
        summary=_summary(found, context, list(probes)),
    )
    _write(report, out)
    if not stage.budget.refused:
        journal.finish()
    return report


async def _run_probe(name: str, probe: Probe, context: AuditContext) -> list[Finding]:
    try:
        found = list(await probe(context))
        for each in found:
            if not isinstance(each, Finding):
                raise TypeError(f"it gave {each!r:.80}, not a Finding")
        return [_log_named_from(context.folder, each) for each in found]
    except Exception as error:
        # the boundary of one probe: the others must still run
        message = f"The probe {name!r} raised {type(error).__name__}: {error}"
        return [finding("probe-failed", message[:600], evidence={"probe": name})]


def _log_named_from(folder: Path, each: Finding) -> Finding:
    """Name a finding's log from the audit's folder, so that both can be moved together."""
    log = each.evidence.get("log")
    if not log or not os.path.isabs(str(log)):
        return each
    evidence = {**each.evidence, "log": os.path.relpath(log, folder)}
    return replace(each, evidence=evidence)


async def _wide(stage: Stage, chosen: Sequence[Sample], options: AuditOptions) -> int:
    if options.wide is not None:
        return options.wide
    boxed = [await stage.sandbox_of(sample) for sample in chosen[:3]]
    return max(options.samples, WIDE_IN_SANDBOX if any(boxed) else WIDE)


def spread(samples: Sequence[T], count: int) -> list[T]:
    """Return this many samples, spread evenly over the dataset, including the first."""
    if len(samples) <= count:
        return list(samples)
    return [samples[n * len(samples) // count] for n in range(count)]


def _identity(task: Task, name: str | None, options: AuditOptions) -> dict[str, Any]:
    """Return what must be unchanged for an audit to be continued."""
    return {
        "task": name or task.name,
        "samples": len(task.dataset),
        "source": source_digest(task),
        "chosen": options.samples,
        "selection": str(options.selection),
        "reward": str(options.reward),
        "gold": options.gold,
        "runner": {key: named(value) for key, value in options.runner_options.items()},
        "roles": named(options.episode_options.get("model_roles")),
        "version": _version(),
    }


def named(value: object) -> str:
    """Return a text for an option's value that is the same in the next process."""
    try:
        text = f"{registry_info(value).name}({internals.registry_params(value)})"
    except ValueError:
        text = str(value)
    return re.sub(r" at 0x[0-9a-f]+", "", text)


def source_digest(task: Task) -> str:
    """Return a digest of the task's file and samples: after a change, the audit starts again."""
    digest = hashlib.sha256()
    file = internals.task_file(task)
    if file is not None and Path(file).is_file():
        digest.update(Path(file).read_bytes())
    for sample in task.dataset:
        try:
            held = sample.model_dump_json(exclude={"id"}, fallback=str).encode()
        except ValueError:  # half a surrogate pair
            held = repr(sample.model_dump(exclude={"id"})).encode(errors="surrogatepass")
        digest.update(held)
    return digest.hexdigest()[:16]


def _version() -> str:
    try:
        return version("inspect-tinker-plugin")
    except PackageNotFoundError:
        return "0"


def _budget(stage: Stage, context: AuditContext) -> list[Finding]:
    if not stage.budget.refused:
        return []
    probes = ", ".join(context.figures.get("unfinished", [])) or "the honest policies"
    message = f"Not run for lack of budget: {counted(stage.budget.refused, 'episode')} ({probes})."
    return [finding("budget-spent", message)]


def _summary(found: Sequence[Finding], context: AuditContext, probes: list[str]) -> dict[str, Any]:
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


def _policies(context: AuditContext) -> dict[str, dict[str, float | int | None]]:
    """Return episodes, mean reward and failures of every policy."""
    by_policy: dict[str, list[float | None]] = {}
    for record in context.stage.records:
        by_policy.setdefault(record.policy, []).append(record.reward)
    table: dict[str, dict[str, float | int | None]] = {}
    for policy, rewards in by_policy.items():
        given = [reward for reward in rewards if reward is not None]
        table[policy] = {
            "episodes": len(rewards),
            "mean_reward": round(sum(given) / len(given), 4) if given else None,
            "failed": len(rewards) - len(given),
        }
    return table


def _usual_advice(code: str) -> str:
    return CODES[code].advice if code in CODES else ""


def _write(report: AuditReport, out: Path) -> None:
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
