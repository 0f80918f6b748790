"""Runs an audit: the honest policies first, then every probe; then writes the findings."""

from __future__ import annotations

import asyncio
import os
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from inspect_ai import Task
from inspect_ai.dataset import Sample

from inspect_rl_audit.contract import WIDE, WIDE_IN_SANDBOX, AuditContext, AuditOptions, Gold, Probe
from inspect_rl_audit.probes.gold import learn_reference
from inspect_rl_audit.records import AuditJournal, Finding, finding, in_order, name_value
from inspect_rl_audit.report import AuditReport, summarise, write_report
from inspect_rl_audit.stage import Stage, read_budget, spread
from inspect_tinker_plugin import ConfigError, __version__
from inspect_tinker_plugin.options import EpisodeOptions
from inspect_tinker_plugin.plugins import (
    PluginError,
    Plugins,
    build,
    counted,
    default_plugins,
)
from inspect_tinker_plugin.rewards import resolve_reward
from inspect_tinker_plugin.rl import with_plugin_scorers
from inspect_tinker_plugin.tasks import select_samples, task_digest

Progress = Callable[[str, int | None], object]
"""Called with the current probe, and a number of planned episodes or ``None`` after each one."""


async def run_audit(
    task: Task,
    options: AuditOptions,
    *,
    name: str | None = None,
    progress: Progress = lambda probe, planned: None,
) -> AuditReport:
    """Audit a task, and leave ``audit.html``, ``audit.json`` and logs in the output folder.

    The same call on the same folder continues where an earlier one stopped.

    Args:
        task: The task.
        options: What to do.
        name: The task's name in the report and the journal; its own name if not given.
        progress: Shows how far the audit is.

    Raises:
        ConfigError: An option cannot be used, or the folder holds another audit.
    """
    probes = resolve_probes(options.probes)
    task = with_plugin_scorers(task)
    empty = task.sample_source is None and len(task.dataset) == 0  # a finding, not an error
    samples = [] if empty else list(select_samples(task, options.selection))
    Gold(options.gold).check(samples)
    out = options.out.expanduser().absolute()
    current = "honest policies"
    stage = Stage(
        task,
        runner_options=dict(options.runner_options),
        options=EpisodeOptions(**options.episode_options),
        reward=resolve_reward(options.reward),
        budget=read_budget(options.budget),
        journal=AuditJournal(out, _identity(task, name, options)),
        folder=out,
        parallel=options.parallel,
        progress=lambda planned: progress(current, planned),
    )
    context = await _context(stage, task, samples, options, out)
    found: list[Finding] = []
    for current, probe in probes.items():
        refused = stage.budget.refused
        found += await _run_probe(current, probe, context, default_plugins())
        if stage.budget.refused > refused:
            context.figures.setdefault("unfinished", []).append(current)
    if refused := stage.budget.refused:
        unfinished = ", ".join(context.figures.get("unfinished", [])) or "the honest policies"
        message = f"Not run for lack of budget: {counted(refused, 'episode')} ({unfinished})."
        found.append(finding("budget-spent", message))
    report = AuditReport(
        task=name or task.name,
        findings=in_order(found),
        summary=summarise(found, context, list(probes)),
    )
    write_report(report, out)
    if not stage.budget.refused:
        stage.journal.finish()
    return report


async def _context(
    stage: Stage, task: Task, samples: list[Sample], options: AuditOptions, out: Path
) -> AuditContext:
    """Choose samples, and play the honest policies."""
    gold = Gold(options.gold)
    chosen = spread(samples, options.samples)
    boxed = any([await stage.sandbox_of(sample) for sample in chosen])
    if gold.script and not boxed:
        raise ConfigError(f"the solution script {gold.source} (--gold) needs a sandbox to run in")
    most = options.wide or max(options.samples, WIDE_IN_SANDBOX if boxed else WIDE)
    wide = spread(samples, most)
    wide += [sample for sample in chosen if sample.id not in {s.id for s in wide}]
    reference = await learn_reference(stage, chosen, wide, gold)
    return AuditContext(
        task=task,
        samples=samples,
        chosen=chosen,
        boxed=boxed,
        wide=wide,
        stage=stage,
        reference=reference,
        folder=out,
        options=options,
    )


async def _run_probe(
    name: str, probe: Probe, context: AuditContext, plugins: Plugins
) -> list[Finding]:
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
        givers = [p for p in plugins.plugins if name.split("(")[0] in p.hooks.get(HOOK, ())]
        origin = "".join(f" of plugin {each.name!r} ({each.label})" for each in givers)
        message = f"probe {name!r}{origin} raised {type(error).__name__}: {error}"[:600]
        context.figures.setdefault("failed_probes", {})[name] = message
        return [finding("probe-failed", f"The {message}", probe=name)]
    return [_name_log_from(context.folder, each) for each in found]


def _name_log_from(folder: Path, each: Finding) -> Finding:
    """Name a finding's log from the audit's folder, so that both can be moved together."""
    log = str(each.evidence.get("log") or "")
    if not os.path.isabs(log):
        return each
    return replace(each, evidence={**each.evidence, "log": os.path.relpath(log, folder)})


def _identity(task: Task, name: str | None, options: AuditOptions) -> dict[str, Any]:
    """Return what must be unchanged for an audit to be continued."""
    return {
        "task": name or task.name,
        "samples": len(task.dataset),
        "source": task_digest(task),
        "chosen": options.samples,
        "selection": str(options.selection),
        "reward": str(options.reward),
        "gold": options.gold,
        "runner": {key: name_value(value) for key, value in options.runner_options.items()},
        "roles": name_value(options.episode_options.get("model_roles")),
        "scored_in": [options.episode_options.get(k) for k in ("score_sandbox", "score_files")],
        "version": __version__,
    }


HOOK = "inspect_rl_audit_probes"


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
