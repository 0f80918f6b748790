"""``inspect rl export``: write a task's prompts and answers as a dataset."""

from __future__ import annotations

import asyncio
import json
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from inspect_tinker_plugin.cli.options import (
    dataset_choices,
    dataset_options,
    load_task,
    parse_args,
    task_options,
)
from inspect_tinker_plugin.cli.reporting import (
    EXIT_INTERRUPTED,
    EXIT_PARTIAL,
    progress_bar,
    reported,
)
from inspect_tinker_plugin.wording import counted

if TYPE_CHECKING:
    from inspect_tinker_plugin.export.pipeline import ExportOptions, ExportReport

SHOWN_FAILURES = 10


@click.command("export")
@task_options
@click.option(
    "--output",
    "-o",
    metavar="DIR",
    required=True,
    type=click.Path(path_type=Path),
    help="Folder to write to; created if missing.",
)
@click.option(
    "--format",
    type=click.Choice(["parquet", "jsonl", "arrow"]),
    default="parquet",
    show_default=True,
    help="File format.",
)
@click.option(
    "--overwrite",
    is_flag=True,
    help="Start again and replace the export that the folder holds, finished or not.",
)
@click.option(
    "--max-samples",
    type=click.IntRange(min=1),
    default=16,
    show_default=True,
    help="Maximum number of samples to prepare in parallel.",
)
@dataset_options("export", hints={"time_limit": "until its first model call"})
@reported
def export_command(output: Path, **choices: Any) -> None:
    """Write the prompts and answers of TASK as a dataset.

    TASK is a registered name (package/task) or a file (file.py@task), as for `inspect eval`.
    Each prompt is what the task's own solver would send to the model first. The columns are
    id, prompt, answer, info, task and tools; `datasets.load_dataset(DIR)` reads them.

    An export that was interrupted continues when the same command is run again. Exit codes:
    0 all samples written, 1 nothing written, 2 wrong usage, 3 some samples could not be
    written (they are listed, and in DIR/export.json).
    """
    from inspect_tinker_plugin.export.folder import check_target
    from inspect_tinker_plugin.export.pipeline import export_task

    check_target(output, overwrite=choices["overwrite"])
    resolved = load_task(choices)
    options = _options(choices)
    try:
        with progress_bar(resolved.task.display_name) as show:
            report = asyncio.run(
                export_task(
                    resolved,
                    output,
                    options,
                    on_progress=lambda now: show(now.done, now.total, now.failed),
                )
            )
    except KeyboardInterrupt:
        click.echo("Interrupted; run the same command again to continue.", err=True)
        sys.exit(EXIT_INTERRUPTED)
    _tell(report, resolved.task.name, options.format)
    if report.failures:
        sys.exit(EXIT_PARTIAL)


def _options(choices: dict[str, Any]) -> ExportOptions:
    from inspect_tinker_plugin.export.pipeline import ExportOptions
    from inspect_tinker_plugin.options import DatasetOptions

    solver_name, solver_args = choices["solver"], parse_args(choices["solver_args"])
    options = DatasetOptions(**dataset_choices("export", choices))
    return ExportOptions(
        format=choices["format"],
        selection=options.selection,
        solver=options.solver,
        solver_name=f"{solver_name} {json.dumps(solver_args)}" if solver_name else None,
        sandbox=options.sandbox,
        episode=options,
        max_samples=choices["max_samples"],
        overwrite=choices["overwrite"],
    )


def _tell(report: ExportReport, task: str, format: str) -> None:
    for failure in report.failures[:SHOWN_FAILURES]:
        click.echo(f"sample {failure.id}: {failure.reason}", err=True)
    hidden = len(report.failures) - SHOWN_FAILURES
    if hidden > 0:
        click.echo(f"… and {hidden:,} more, in {report.path / 'export.json'}", err=True)
    count = counted(report.written, "sample")
    files = counted(len(report.files), f"{format} file")
    earlier = f" ({report.continued:,} of them by an earlier run)" if report.continued else ""
    missing = f"; {len(report.failures):,} could not be exported" if report.failures else ""
    click.echo(f"Wrote {count} of {task} to {report.path}: {files}{earlier}{missing}.")
    click.echo(f'Read them with datasets.load_dataset("{report.path}", split="train").')
