"""The plugin: the command ``inspect rl audit``, and the built-in probes."""

from __future__ import annotations

import json
import shutil
import sys
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import click
from click.core import ParameterSource
from inspect_ai.dataset import Sample
from rich.table import Table
from rich.text import Text

from inspect_rl_audit.attempts import ATTEMPTS, read_attempts, roll_out
from inspect_rl_audit.contract import DEFAULT_BUDGET, AuditOptions, Probe
from inspect_rl_audit.probes.answers import check_answers
from inspect_rl_audit.probes.baselines import play_baselines
from inspect_rl_audit.probes.cheats import cheat_by_reply, cheat_in_sandbox
from inspect_rl_audit.probes.gold import check_gold
from inspect_rl_audit.probes.samples import check_samples
from inspect_rl_audit.probes.scorer import check_scorer
from inspect_rl_audit.probes.signal import examine_signal, report_cost
from inspect_rl_audit.records import JOURNAL, ModelAttempt, Severity
from inspect_rl_audit.report import PAGE, AuditReport, signal_lines
from inspect_rl_audit.run import alone_in_folder, audit_in_folder
from inspect_tinker_plugin.cli import (
    EXIT_ERROR,
    EXIT_INTERRUPTED,
    EXIT_PARTIAL,
    clean_text,
    dataset_choices,
    dataset_options,
    load_task,
    parse_args,
    price_option,
    print_to,
    progress_bar,
    quiet_stdout,
    renderer_options,
    reported,
    run_in_loop,
    table_console,
    task_options,
    test_task_options,
)
from inspect_tinker_plugin.options import DatasetOptions
from inspect_tinker_plugin.plugins import counted, hookimpl, part_of
from inspect_tinker_plugin.processes import local_path
from inspect_tinker_plugin.tasks import ResolvedTask, resolve_task, select_samples
from inspect_tinker_plugin.train import plan_lines, read_prices

_STYLES = {"high": "bold red", "medium": "yellow", "low": "cyan", "info": "dim"}
"""Style of a finding by its severity."""
_COUNT = click.IntRange(1)


@click.command("audit")
@task_options
@dataset_options("audit")
@click.option(
    "--gold",
    metavar="FIELD|FILE.sh",
    help="The right answer: a field of the samples' metadata, or a shell script that solves a "
    "sample in its sandbox. By default, the target.",
)
@click.option(
    "--probe",
    "probes",
    multiple=True,
    metavar="NAME",
    help="Run only this probe, as often as needed; `inspect rl plugins` lists them.",
)
@click.option(
    "--samples",
    type=_COUNT,
    default=8,
    show_default=True,
    help="Samples that every policy plays, spread over the dataset. All samples are read, and "
    "up to 200 (40 with a sandbox) are played once with and once without the answer.",
)
@click.option(
    "--budget",
    multiple=True,
    metavar="EPISODES|TIME",
    help="Stop after this many episodes (200) or this much time (90s, 10m); may be given twice. "
    "Default: 1500 episodes and 20m. The same command continues later.",
)
@click.option("--parallel", type=_COUNT, default=4, show_default=True, help="Episodes at once.")
@test_task_options("Look for samples that this task has, too.")
@click.option("--prompt-tokens", type=_COUNT, help="Report prompts that are longer.")
@click.option(
    "--logs",
    multiple=True,
    metavar="PATH",
    help="Look at the attempts of a real model in these .eval logs or folders of them.",
)
@click.option(
    "--model", metavar="NAME", help="Sample attempts from this model (or tinker:// weights)."
)
@click.option("--local", is_flag=True, help="Sample attempts from a model on this machine.")
@click.option("--base-url", metavar="URL", help="Tinker API server, if not the hosted one.")
@renderer_options
@click.option(
    "--episodes",
    type=_COUNT,
    default=4,
    show_default=True,
    help="Attempts of the model at each sample.",
)
@click.option(
    "--max-tokens", type=_COUNT, default=1024, show_default=True, help="Tokens per reply."
)
@click.option(
    "--group-size", type=_COUNT, default=8, show_default=True, help="Group size in the cost plan."
)
@price_option(
    "YAML or JSON with prices: prefill, cached, sample and train per million tokens, sandbox_hour."
)
@click.option(
    "--out",
    type=click.Path(path_type=Path),
    metavar="DIR",
    help="Folder of the report and the logs; by default ./audits/TASK.",
)
@click.option("--overwrite", is_flag=True, help="Start again in a folder with another audit.")
@click.option(
    "--fail-on",
    type=click.Choice([*_STYLES, "never"]),
    default="high",
    show_default=True,
    help="Exit with 1 when there is a finding of this severity, or a worse one.",
)
@click.option("--json", "as_json", is_flag=True, help="Print the report as JSON instead.")
@reported
def audit(**choices: Any) -> None:
    """Look for what makes TASK unfit to train on: rewards for nothing, and none for answers.

    Scripted policies play real episodes: some do not try, some know the answer, some cheat.
    The scorer is given answers that are right, wrong and neither, the samples are compared
    with each other, and attempts of a real model (--logs, --model, --local) show whether
    there is anything to learn. No key is needed without --model.

    Every episode is in an .eval log, and the report is audit.html, in the folder given with
    --out. Exit codes: 0 nothing as severe as --fail-on, 1 something is, 2 wrong usage,
    3 a probe failed, so its checks are missing.
    """
    with quiet_stdout():
        try:
            report = _audit(choices)
        except KeyboardInterrupt:
            click.echo("interrupted; the same command continues", err=True)
            sys.exit(EXIT_INTERRUPTED)
    if choices["as_json"]:
        click.echo(json.dumps(report.as_json(), indent=2, default=str, ensure_ascii=False))
    else:
        show_report(report)
    if failed := report.summary.get("failed_probes"):
        click.echo("\n".join(failed.values()), err=True)
        sys.exit(EXIT_PARTIAL)
    worst, bar = report.worst(), choices["fail_on"]
    if worst is not None and bar != "never" and worst.at_least(Severity(bar)):
        sys.exit(EXIT_ERROR)


def _audit(choices: dict[str, Any]) -> AuditReport:
    _check_model(choices)
    dataset = DatasetOptions(**dataset_choices("audit", choices))
    resolved = load_task(choices, dataset.model_roles)
    name = resolved.task.name
    out = local_path(choices["out"] or Path("audits") / name.rpartition("/")[2])
    with alone_in_folder(out):
        if choices["overwrite"]:  # logs of scripted episodes stay
            (out / JOURNAL).unlink(missing_ok=True)
            shutil.rmtree(out / ATTEMPTS, ignore_errors=True)
        options = AuditOptions(
            out=out,
            dataset=dataset,
            budget=choices["budget"] or DEFAULT_BUDGET,
            prices=read_prices(choices["price"]) if choices["price"] else None,
            attempts=_attempts(choices, dataset, resolved, out),
            test_samples=_test_samples(choices),
            **{name: choices[name] for name in _AS_THEY_ARE},
        )
        with progress_bar("episodes") as show:
            audited = audit_in_folder(resolved.task, options, name=name, progress=show)
            return run_in_loop(audited)


_AS_THEY_ARE = ("probes", "samples", "gold", "parallel", "prompt_tokens", "group_size")
"""Options of the command that are options of the audit."""


def _check_model(choices: dict[str, Any]) -> None:
    """Refuse options of a model's attempts that contradict each other or would have no effect."""
    sampling = choices["model"] or choices["local"]
    if sampling and choices["logs"]:
        raise click.UsageError("--logs does not go with --model or --local.")
    if choices["local"] and choices["base_url"]:
        raise click.UsageError("--local starts its own server; leave --base-url out.")
    if sampling:
        return
    given = click.get_current_context().get_parameter_source
    for name in ("episodes", "max_tokens", "base_url", "tokenizer", "renderer"):
        if given(name) is ParameterSource.COMMANDLINE:
            raise click.UsageError(f"--{name.replace('_', '-')} needs --model or --local.")


def _test_samples(choices: dict[str, Any]) -> Sequence[Sample]:
    args = parse_args(choices["test_args"])
    if choices["test_task"] is None:
        if args:
            raise click.UsageError("--test-arg needs --test-task.")
        return ()
    return select_samples(resolve_task(choices["test_task"], args).task)


def _attempts(
    choices: dict[str, Any], dataset: DatasetOptions, resolved: ResolvedTask, out: Path
) -> Sequence[ModelAttempt]:
    """Return attempts of a real model: from logs, or sampled now."""
    task = resolved.task.name
    if choices["model"] or choices["local"]:
        own = roll_out(choices, dataset, resolved, out / ATTEMPTS)
        # one that could not be sampled to its end is made again, and says nothing
        return [each for each in read_attempts([own], task) if not each.cut]
    return read_attempts(choices["logs"], task) if choices["logs"] else ()


# the report in a terminal


def show_report(report: AuditReport) -> None:
    """Print the findings of an audit as a table, then the advice, then figures."""
    console, summary = table_console(), report.summary
    print_to(console, _findings(report) if report.findings else "Nothing found.")
    grave = [f.code for f in report.findings if f.severity.at_least(Severity.MEDIUM)]
    for code in dict.fromkeys(grave):
        advice = clean_text(str(summary.get("advice", {}).get(code, "")))
        print_to(console, Text.assemble((f"{code}: ", "bold"), advice))
    figures = []
    if summary.get("signal"):
        figures += ["", *signal_lines(summary["signal"], str(summary["folder"]))]
    if summary.get("cost"):
        figures += ["", *plan_lines(summary["cost"])]
    counts = ", ".join(f"{n} {severity}" for severity, n in summary["counts"].items() if n)
    tried = part_of(summary["samples_tried"], summary["samples"], "sample")
    closing = f"{counts or 'no findings'}; {counted(summary['episodes'], 'episode')} on {tried}. "
    for line in [*figures, "", f"{closing}Report: {summary['folder']}/{PAGE}"]:
        console.print(Text(line), soft_wrap=True)


def _findings(report: AuditReport) -> Table:
    table = Table(box=None, pad_edge=False, show_edge=False, padding=(0, 2, 0, 0))
    table.add_column("severity", no_wrap=True)
    table.add_column("code", no_wrap=True)
    table.add_column("sample", overflow="fold", max_width=18)
    table.add_column("finding", overflow="fold")
    for each in report.findings:
        message = Text(clean_text(each.message))
        if log := each.evidence.get("log"):
            message.append(f" ({log.rpartition('/')[2]})", style="dim")
        table.add_row(
            Text(str(each.severity), style=_STYLES[str(each.severity)]),
            each.code,
            Text("" if each.sample is None else clean_text(str(each.sample))),
            message,
        )
    return table


# the hooks


@hookimpl
def inspect_rl_commands() -> Mapping[str, click.Command]:
    """Return ``audit``."""
    return {"audit": audit}


@hookimpl
def inspect_rl_audit_probes() -> Mapping[str, Callable[..., Probe]]:
    """Return the built-in probes, in the order in which they run."""
    return {
        "samples": lambda: check_samples,
        "baselines": lambda: play_baselines,
        "gold": lambda: check_gold,
        "replies": lambda: cheat_by_reply,
        "sandbox": lambda: cheat_in_sandbox,
        "answers": lambda: check_answers,
        "scorer": lambda: check_scorer,
        "signal": lambda: examine_signal,
        "cost": lambda: report_cost,
    }
