"""``inspect rl export`` and ``rescore``: write datasets, and logs with new rewards."""

from __future__ import annotations

import json
import sys
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click
from click.core import ParameterSource

from inspect_tinker_plugin.cli.options import (
    Number,
    dataset_choices,
    dataset_options,
    field_options,
    load_task,
    output_option,
    parse_args,
    parse_roles,
    task_arguments,
)
from inspect_tinker_plugin.cli.reporting import (
    EXIT_INTERRUPTED,
    EXIT_PARTIAL,
    ShowProgress,
    name_failures,
    progress_bar,
    quiet_stdout,
    reported,
)
from inspect_tinker_plugin.contracts.wording import counted
from inspect_tinker_plugin.export.options import (
    FORMATS,
    FORMS,
    KEEPS,
    LAYOUTS,
    Choice,
    ExportOptions,
    LogExportOptions,
)
from inspect_tinker_plugin.options import declared_options
from inspect_tinker_plugin.processes import local_path
from inspect_tinker_plugin.processes.workers import run_in_loop

if TYPE_CHECKING:
    from inspect_tinker_plugin.export.pipeline import ExportReport
    from inspect_tinker_plugin.logs.rescoring import Rescored

_OF_TASKS = {"task_args", "task_config", "max_samples", "solver_args", "workers"}
"""Options that go without --from-logs only, beside those of a dataset."""


def _parse_split(
    ctx: click.Context, param: click.Parameter, text: str | None
) -> tuple[str, str] | None:
    if text is None:
        return None
    name, equals, share = text.partition("=")
    if not equals:
        raise click.BadParameter(f"expected NAME=SHARE such as test=10%, not {text!r}.")
    return name, share


_OF_LOGS: dict[str, dict[str, Any]] = {
    "form": {"flag": "--as", "type": click.Choice(FORMS)},
    "score": {"metavar": "NAME[.KEY]"},
    "min_score": {"type": float},
    "max_score": {"type": float},
    "errors": {"type": click.Choice(KEEPS)},
    "limits": {"type": click.Choice(KEEPS)},
    "max_length": {"metavar": "TOKENS"},
    "best": {"metavar": "K"},
    "threshold": {"type": float},
    "margin": {"type": Number(0), "show_default": True},
    "pairs": {"metavar": "K"},
    "split": {"metavar": "NAME=SHARE", "callback": _parse_split},
    "split_seed": {"type": int, "show_default": True},
}
"""How the options that go with --from-logs only are written."""


class _Layouts(click.Choice):  # type: ignore[type-arg]  # click 8.1 has no Choice[str]
    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> Any:
        if value == "harbor":
            self.fail(
                "a task cannot become a Harbor package: those are scored by a script in the "
                "container, and Inspect's scorers run outside of it. `inspect rl serve` gives "
                "Harbor's clients its episodes."
            )
        return super().convert(value, param, ctx)


@click.command("export")
@click.argument("sources", metavar="TASK | LOGS...", nargs=-1, required=True)
@task_arguments
@click.option("--from-logs", is_flag=True, help="Export the conversations of .eval logs.")
@output_option("Folder to write to; created if missing.")
@click.option(
    "--format",
    type=click.Choice(FORMATS),
    help="File format (default: jsonl for the layout tinker, otherwise parquet).",
)
@click.option(
    "--layout",
    type=_Layouts(LAYOUTS),
    default="chat",
    show_default=True,
    help="Columns: this project's own, or those that a trainer reads.",
)
@click.option(
    "--push-to-hub",
    metavar="REPO",
    help="Upload the finished export to a private dataset repository of the Hugging Face Hub.",
)
@click.option(
    "--overwrite",
    is_flag=True,
    help="Start again and replace the export that the folder holds, finished or not.",
)
@field_options(ExportOptions, written={"workers": {"metavar": "N"}})
@dataset_options("export", hints={"time_limit": "until its first model call"})
@field_options(Choice, written=_OF_LOGS)
@field_options(LogExportOptions, written=_OF_LOGS)
@click.option("--json", "as_json", is_flag=True, help="Print the result as one JSON object.")
@click.pass_context
@reported
def export_command(ctx: click.Context, /, output: Path, **choices: Any) -> None:
    """Write the prompts and answers of TASK, or the conversations of LOGS, as a dataset.

    TASK is a registered name (package/task) or a file (file.py@task), as for `inspect eval`.
    Each prompt is what the task's own solver would send to the model first. The columns are
    id, prompt, answer, info, task and tools; `datasets.load_dataset(DIR)` reads them.

    With --from-logs, LOGS are .eval logs of any model, and folders of them. A row is one branch
    of what the model saw and said; --as says what for. The options from --as on are for logs.

    An export that was interrupted continues when the same command is run again. Exit codes:
    0 all samples written, 1 nothing written, 2 wrong usage, 3 some samples could not be
    written (they are listed, and in DIR/export.json).
    """
    from inspect_tinker_plugin.export.folder import check_target

    from_logs = choices.pop("from_logs")
    _refuse_options_without_effect(ctx, from_logs=from_logs)
    sources = choices.pop("sources")
    repository = choices.pop("push_to_hub")
    if choices["format"] is None:
        choices["format"] = "jsonl" if choices["layout"] == "tinker" else "parquet"
    output = local_path(output)
    check_target(output, overwrite=choices["overwrite"])
    as_json = choices.pop("as_json")
    with quiet_stdout():
        if from_logs:
            report, lines = _export_logs(sources, output, choices)
        elif len(sources) != 1:
            raise click.UsageError("one TASK, or --from-logs LOGS...")
        else:
            report, lines = _export_task(output, {**choices, "task": sources[0]})
    failures = [f"sample {failure.id}: {failure.reason}" for failure in report.failures]
    name_failures(failures, f"in {report.path / 'export.json'}")
    click.echo(json.dumps(asdict(report), default=str) if as_json else "\n".join(lines))
    if repository is not None:
        from inspect_tinker_plugin.export.folder import push_to_hub

        push_to_hub(output, repository)
        click.echo(f"Uploaded as the dataset {repository}.", err=as_json)
    if report.failures:
        sys.exit(EXIT_PARTIAL)


def _refuse_options_without_effect(ctx: click.Context, *, from_logs: bool) -> None:
    """Refuse options that would do nothing: those of logs for a task, or the other way round."""
    of_tasks = {each.name for each in declared_options() if "export" in each.commands} | _OF_TASKS
    of_the_other = of_tasks if from_logs else _OF_LOGS.keys()
    for each in ctx.command.params:
        name = each.name or ""
        if ctx.get_parameter_source(name) is not ParameterSource.COMMANDLINE:
            continue
        if name in of_the_other:
            goes = "does not go with" if from_logs else "goes only with"
            raise click.UsageError(f"{each.opts[0]} {goes} --from-logs.")


def _export_task(output: Path, choices: dict[str, Any]) -> tuple[ExportReport, list[str]]:
    """Export a task; returns the result, also as lines for a reader."""
    from inspect_tinker_plugin.export.pipeline import export_task
    from inspect_tinker_plugin.processes.workers import freeze_memory_once

    resolved = load_task(choices, choices["model_roles"])
    options = _task_export(choices)
    freeze_memory_once()
    with _progress(resolved.task.display_name) as show:
        report = run_in_loop(export_task(resolved, output, options, on_progress=show))
    earlier = f" ({report.continued:,} of them by an earlier run)" if report.continued else ""
    return report, [
        f"Wrote {counted(report.written, 'sample')} of {resolved.task.name} to {report.path}: "
        f"{_files(report, options.format)}{earlier}{_missing(report)}.",
        f'Read them with datasets.load_dataset("{report.path}", split="train").',
    ]


def _export_logs(
    sources: Sequence[str], output: Path, choices: dict[str, Any]
) -> tuple[ExportReport, list[str]]:
    """Export logs; returns the result, also as lines for a reader."""
    from inspect_tinker_plugin.export.from_logs import export_logs

    of_export = ("layout", "format", "split", "split_seed", "overwrite")
    options = LogExportOptions(
        choice=Choice(**{name: choices[name] for name in Choice.__dataclass_fields__}),
        **{name: choices[name] for name in of_export},
    )
    with _progress(f"logs as {options.choice.form}") as show:
        report = run_in_loop(export_logs(sources, output, options, on_progress=show))
    rows = ", ".join(f"{count:,} in {split}" for split, count in report.rows.items())
    lines = [
        f"Wrote {counted(report.written, 'row')} ({rows}) to {report.path}: "
        f"{_files(report, options.format)}{_missing(report)}."
    ]
    if report.left_out:
        reasons = ", ".join(f"{count:,} {reason}" for reason, count in report.left_out.items())
        lines.append(f"Left out: {reasons}.")
    return report, lines


@contextmanager
def _progress(what: str) -> Iterator[ShowProgress]:
    """Draw the progress of what the same command continues, and exit when it is interrupted."""
    try:
        with progress_bar(what) as show:
            yield show
    except KeyboardInterrupt:
        click.echo("Interrupted; run the same command again to continue.", err=True)
        sys.exit(EXIT_INTERRUPTED)


def _task_export(choices: dict[str, Any]) -> ExportOptions:
    from inspect_tinker_plugin.options import DatasetOptions

    solver_name, solver_args = choices["solver"], parse_args(choices["solver_args"])
    of_export = ("format", "layout", "max_samples", "workers", "overwrite")
    return ExportOptions(
        dataset=DatasetOptions(**dataset_choices("export", choices)),
        solver_name=f"{solver_name} {json.dumps(solver_args)}" if solver_name else None,
        **{name: choices[name] for name in of_export},
    )


def _files(report: ExportReport, format: str) -> str:
    return counted(len(report.files), f"{format} file")


def _missing(report: ExportReport) -> str:
    return f"; {len(report.failures):,} could not be exported" if report.failures else ""


@click.command("rescore")
@click.argument("logs", metavar="LOGS...", nargs=-1, required=True)
@output_option("Folder of the new logs; created if missing.")
@click.option("--reward", metavar="EXPR", help="Reward expression (default: each log's own).")
@click.option(
    "--group-reward", metavar="EXPR", help="Group reward expression (default: each log's own)."
)
@click.option("--no-group-reward", is_flag=True, help="Use no group reward.")
@click.option(
    "--failed", is_flag=True, help="Compute only rewards that could not be computed before."
)
@click.option(
    "--model-role",
    "roles",
    multiple=True,
    callback=parse_roles,
    metavar="ROLE=MODEL",
    help="Judge of scorers that are run again (default: the log's own).",
)
@click.option(
    "--overwrite", is_flag=True, help="Replace logs of the same names that the folder holds."
)
@reported
def rescore_command(logs: tuple[str, ...], output: Path, **choices: Any) -> None:
    """Compute the rewards of logged rollouts again, into new logs.

    LOGS are .eval logs of `inspect rl rollout` and `inspect rl train`, and folders of them; they
    are not changed. Rewards are computed of the logged scores, group rewards over the groups as
    logged. Scorers are run again only for rollouts whose logged scores are not enough: a scorer or
    its judge had failed, or gave no number. A reward that fails again is an error of its sample,
    and a number only if the training's on_error states a price.

    Interrupted, the same command continues. Exit codes: 0 all rewards computed, 1 nothing
    written, 2 wrong usage, 3 some rewards could not be computed (they are listed).
    """
    from inspect_tinker_plugin.logs.index import find_logs
    from inspect_tinker_plugin.logs.rescoring import Rescoring, rescore

    if choices["group_reward"] is not None and choices["no_group_reward"]:
        raise click.UsageError("--group-reward and --no-group-reward exclude each other.")
    how = Rescoring(output=local_path(output), **choices)
    with _progress("rewards") as show:
        done = run_in_loop(rescore(find_logs(logs), how, on_progress=show))
    _report_rescored(done, how.output)
    if done.failures:
        sys.exit(EXIT_PARTIAL)


def _report_rescored(done: Rescored, output: Path) -> None:
    lines = [
        f"{failed.log}, sample {failed.id}, epoch {failed.epoch}: {failed.reason}"
        for failed in done.failures
    ]
    name_failures(lines, "as errors of their samples in the new logs")
    earlier = f" ({done.earlier:,} of them by an earlier run)" if done.earlier else ""
    again = f", scorers of {counted(done.scored, 'rollout')} run again" if done.scored else ""
    missing = f"; {len(done.failures):,} failed" if done.failures else ""
    click.echo(
        f"Wrote {counted(len(done.logs), 'log')} to {output}{earlier}: "
        f"{counted(done.computed, 'reward')} computed{again}{missing}."
    )
