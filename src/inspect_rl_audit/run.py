"""Runs an audit: the honest policies first, then every probe; then writes the findings."""

from __future__ import annotations

import asyncio
import hashlib
import os
from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager
from dataclasses import replace
from pathlib import Path
from typing import Any

from inspect_ai import Task

from inspect_rl_audit.contract import AuditContext, AuditOptions, Gold, Probe
from inspect_rl_audit.probes.gold import learn_reference
from inspect_rl_audit.records import AuditJournal, Finding, finding, name_value
from inspect_rl_audit.report import AuditReport, summarise, write_report
from inspect_rl_audit.stage import Stage, read_budget, spread
from inspect_tinker_plugin import ConfigError, __version__
from inspect_tinker_plugin.plugins import (
    PluginError,
    build,
    counted,
    default_plugins,
    first_error,
    place_in_code,
)
from inspect_tinker_plugin.processes import alone_in, local_path
from inspect_tinker_plugin.rewards import resolve_reward
from inspect_tinker_plugin.rl import with_plugin_scorers
from inspect_tinker_plugin.tasks import select_samples, task_digest

HOOK = "inspect_rl_audit_probes"

_WIDE, _WIDE_IN_SANDBOX = 200, 40
"""Samples that are examined with one or two episodes each, without and with a sandbox."""


async def run_audit(
    task: Task,
    options: AuditOptions,
    *,
    name: str | None = None,
    progress: Callable[..., object] = lambda done, planned, *, what: None,
) -> AuditReport:
    """Audit a task, and leave ``audit.html``, ``audit.json`` and logs in the output folder.

    The same call on the same folder continues where an earlier one stopped.

    Args:
        task: The task.
        options: What to do.
        name: The task's name in the report and the journal; its own name if not given.
        progress: Called with the episodes that are done and planned, and ``what=`` the probe.

    Raises:
        ConfigError: An option cannot be used, another audit is writing to the folder, or it holds
            another audit.
    """
    with alone_in_folder(options.out):
        return await audit_in_folder(task, options, name=name, progress=progress)


def alone_in_folder(out: Path) -> AbstractContextManager[None]:
    """Keep other audits out of a folder."""
    taken = "is being written by another `inspect rl audit`; choose another --out"
    return alone_in(local_path(out), ".audit.lock", taken=taken, keep=False)


async def audit_in_folder(
    task: Task, options: AuditOptions, *, name: str | None, progress: Callable[..., object]
) -> AuditReport:
    """Audit a task in a folder that no other audit writes to, as :func:`run_audit`."""
    probes = resolve_probes(options.probes)
    task = with_plugin_scorers(task)
    empty = task.sample_source is None and len(task.dataset) == 0  # a finding, not an error
    samples = [] if empty else list(select_samples(task, options.dataset.selection))
    gold = Gold(options.gold)
    gold.check(samples)
    out = local_path(options.out).absolute()
    stage = Stage(
        task=task,
        dataset=options.dataset,
        reward=resolve_reward(options.dataset.reward),
        budget=read_budget(options.budget),
        journal=AuditJournal(out, _identity(task, name, options)),
        folder=out,
        parallel=options.parallel,
        progress=progress,
    )
    chosen = spread(samples, options.samples)
    boxed = any([await stage.sandbox_of(sample) for sample in chosen])
    if gold.script and not boxed:
        raise ConfigError(f"the solution script {gold.source} (--gold) needs a sandbox to run in")
    most = options.wide or max(options.samples, _WIDE_IN_SANDBOX if boxed else _WIDE)
    wide = spread(samples, most)
    wide += [sample for sample in chosen if sample.id not in {s.id for s in wide}]
    context = AuditContext(
        task=task,
        samples=samples,
        chosen=chosen,
        boxed=boxed,
        wide=wide,
        stage=stage,
        reference=await learn_reference(stage, chosen, wide, gold),
        gold=gold,
        folder=out,
        options=options,
    )
    found: list[Finding] = []
    unfinished = []
    for current, probe in probes.items():
        stage.probe = current
        refused = stage.budget.refused
        found += await _run_probe(current, probe, context)
        if stage.budget.refused > refused:
            unfinished.append(current)
    if refused := stage.budget.refused:
        where = ", ".join(unfinished) or "the honest policies"
        message = f"Not run for lack of budget: {counted(refused, 'episode')} ({where})."
        found.append(finding("budget-spent", message))
    report = AuditReport(
        task=name or task.name,
        findings=sorted(found, key=lambda f: (f.severity.rank, f.code, str(f.sample or ""))),
        summary=summarise(found, context, list(probes)),
    )
    write_report(report, out)
    if not stage.budget.refused:
        stage.journal.finish()
    return report


async def _run_probe(name: str, probe: Probe, context: AuditContext) -> list[Finding]:
    """Run a probe; one that fails is a finding, and named in the summary. The others still run."""
    try:
        found: Any = await probe(context)
        if not isinstance(found, Sequence) or isinstance(found, str):
            raise TypeError(f"it gave {found!r:.80}, not a sequence of Finding")
        for each in found:
            if not isinstance(each, Finding):
                raise TypeError(f"it gave {each!r:.80} among its findings, not a Finding")
    except (Exception, SystemExit, asyncio.CancelledError) as error:
        task = asyncio.current_task()
        if isinstance(error, asyncio.CancelledError) and task is not None and task.cancelling():
            raise  # it is the audit that is cancelled, and not something of the probe
        named = name.split("(")[0]
        givers = [p for p in default_plugins().plugins if named in p.hooks.get(HOOK, ())]
        origin = "".join(f" of plugin {each.name!r} ({each.label})" for each in givers)
        if isinstance(error, Exception):
            error = first_error(error)
        message = f"probe {name!r}{origin} raised {type(error).__name__}: {error}"[:600]
        message += place_in_code(error, skipping=("/asyncio/", "/inspect_rl_audit/"))
        context.figures.setdefault("failed_probes", {})[name] = message
        return [finding("probe-failed", f"The {message}", probe=name)]
    return [_name_log_from(context.folder, each) for each in found]


def _name_log_from(folder: Path, each: Finding) -> Finding:
    """Name a finding's log from the audit's folder, so that both can be moved together."""
    log = str(each.evidence.get("log") or "")
    if not os.path.isabs(log):
        return each
    return replace(each, evidence={**each.evidence, "log": os.path.relpath(log, folder)})


_FREE: Mapping[str, Any] = {"solver": None, "max_sandboxes": None, "max_subprocesses": None}
"""Options of the dataset that may differ when an audit is continued; the solver has a name."""


def _identity(task: Task, name: str | None, options: AuditOptions) -> dict[str, Any]:
    """Return what must be unchanged for an audit to be continued."""
    return {
        "task": name or task.name,
        "samples": len(task.dataset),
        "source": task_digest(task),
        "--samples": options.samples,
        "options": name_value(replace(options.dataset, **_FREE)),
        "solver": name_value(options.dataset.solver),
        "gold": options.gold if (script := Gold(options.gold).script) is None else _digest(script),
        "version": __version__,
    }


def _digest(script: Path) -> str:
    return f"{script.name} {hashlib.sha256(script.read_bytes()).hexdigest()}"


def resolve_probes(names: Sequence[str | Probe] = ()) -> Mapping[str, Probe]:
    """Make probes.

    Args:
        names: Probes, or expressions such as ``baselines`` or ``spelling(language='en')``; every
            probe that is installed, made without arguments, when there are none.

    Raises:
        ConfigError: An unknown name, a malformed expression, or an object that is no probe.
    """
    catalogue = default_plugins().catalogue(HOOK)
    probes: dict[str, Probe] = {}
    for each in names or list(catalogue.entries):
        name = each if isinstance(each, str) else type(each).__name__
        built = build(each, catalogue).value if isinstance(each, str) else each
        if not callable(built) or isinstance(built, type):
            raise PluginError(f"probe {name!r} is {built!r:.80}, which cannot be called")
        probes[name] = built
    return probes
