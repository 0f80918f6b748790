"""``inspect rl export``: write a task's prompts and answers as a dataset."""

from __future__ import annotations

import asyncio
import json
import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from inspect_tinker_plugin.cli.options import (
    parse_args,
    parse_sandbox,
    sample_options,
    task_options,
)
from inspect_tinker_plugin.cli.reporting import EXIT_INTERRUPTED, EXIT_PARTIAL, reported

if TYPE_CHECKING:
    from inspect_tinker_plugin.export.pipeline import ExportOptions, ExportReport, Progress
    from inspect_tinker_plugin.tasks import ResolvedTask

SHOWN_FAILURES = 10


@click.command("export")
@task_options
@sample_options
@click.option(
    "--output",
    "-o",
    metavar="DIR",
    required=True,
    type=click.Path(path_type=Path),
    help="Folder to write to; made when it is not there.",
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
    help="Start anew and replace the export that the folder holds, finished or not.",
)
@click.option(
    "--max-samples",
    type=click.IntRange(min=1),
    default=16,
    show_default=True,
    help="Maximum number of samples to prepare in parallel.",
)
@click.option(
    "--max-sandboxes",
    type=click.IntRange(min=1),
    help="Maximum number of sandboxes (per provider) to run in parallel.",
)
@click.option(
    "--time-limit",
    type=click.IntRange(min=1),
    help="Seconds that a sample may take until its first model call.",
)
@reported
def export_command(
    task: str,
    task_args: Sequence[str],
    task_config: str | None,
    output: Path,
    **choices: Any,
) -> None:
    """Write the prompts and answers of TASK as a dataset.

    TASK is a registered name (package/task) or a file (file.py@task), as for `inspect eval`.
    Each prompt is what the task's own solver would send to the model first. The columns are
    id, prompt, answer, info, task and tools; `datasets.load_dataset(DIR)` reads them.

    An export that was interrupted goes on when the same command is run again. Exit codes:
    0 all samples written, 1 nothing written, 2 wrong usage, 3 some samples could not be
    written (they are listed, and in DIR/export.json).
    """
    from inspect_tinker_plugin.export.folder import check_target
    from inspect_tinker_plugin.export.pipeline import export_task
    from inspect_tinker_plugin.tasks import resolve_task

    args = parse_args(task_args, task_config)
    check_target(output, overwrite=choices["overwrite"])
    resolved = resolve_task(task, args)
    options = _options(choices)
    try:
        with _progress_bar(resolved) as on_progress:
            report = asyncio.run(export_task(resolved, output, options, on_progress=on_progress))
    except KeyboardInterrupt:
        click.echo("Interrupted; run the same command again to continue.", err=True)
        sys.exit(EXIT_INTERRUPTED)
    _tell(report, resolved.task.name, options.format)
    if report.failures:
        sys.exit(EXIT_PARTIAL)


def _options(choices: dict[str, Any]) -> ExportOptions:
    from inspect_tinker_plugin.episode.types import EpisodeOptions
    from inspect_tinker_plugin.export.pipeline import ExportOptions
    from inspect_tinker_plugin.export.selection import Selection
    from inspect_tinker_plugin.task_loading import create_solver

    shuffle = choices["sample_shuffle"]
    solver, solver_args = choices["solver"], parse_args(choices["solver_args"])
    if solver_args and solver is None:
        raise click.UsageError("-S needs --solver.")
    return ExportOptions(
        format=choices["format"],
        selection=Selection(
            limit=choices["limit"],
            sample_ids=choices["sample_id"],
            shuffle=shuffle is not None,
            seed=None if shuffle is True else shuffle,
        ),
        solver=create_solver(solver, solver_args) if solver else None,
        solver_name=f"{solver} {json.dumps(solver_args)}" if solver else None,
        sandbox=parse_sandbox(choices["sandbox"]),
        episode=EpisodeOptions(
            time_limit=choices["time_limit"],
            max_sandboxes=choices["max_sandboxes"],
            model_roles=parse_args(choices["model_roles"]),
        ),
        max_samples=choices["max_samples"],
        overwrite=choices["overwrite"],
    )


@contextmanager
def _progress_bar(resolved: ResolvedTask) -> Iterator[Callable[[Progress], None]]:
    """Draw a bar on stderr, when that is a terminal."""
    from rich.console import Console
    from rich.progress import BarColumn, MofNCompleteColumn, TextColumn, TimeRemainingColumn
    from rich.progress import Progress as Bar

    console = Console(stderr=True)
    columns = (
        TextColumn("{task.description}"),
        BarColumn(),
        MofNCompleteColumn(),
        TimeRemainingColumn(),
        TextColumn("{task.fields[failed]}"),
    )
    with Bar(*columns, console=console, transient=True, disable=not console.is_terminal) as bar:
        line = bar.add_task(resolved.task.display_name, total=None, failed="")

        def show(progress: Progress) -> None:
            failed = f"{progress.failed} failed" if progress.failed else ""
            bar.update(line, completed=progress.done, total=progress.total, failed=failed)

        yield show


def _tell(report: ExportReport, task: str, format: str) -> None:
    for failure in report.failures[:SHOWN_FAILURES]:
        click.echo(f"sample {failure.id}: {failure.reason}", err=True)
    hidden = len(report.failures) - SHOWN_FAILURES
    if hidden > 0:
        click.echo(f"… and {hidden:,} more, in {report.path / 'export.json'}", err=True)
    count = f"{report.written:,} sample{'s' if report.written != 1 else ''}"
    files = f"{len(report.files)} {format} file{'s' if len(report.files) != 1 else ''}"
    earlier = f" ({report.continued:,} of them by an earlier run)" if report.continued else ""
    missing = f"; {len(report.failures):,} could not be exported" if report.failures else ""
    click.echo(f"Wrote {count} of {task} to {report.path}: {files}{earlier}{missing}.")
    click.echo(f'Read them with datasets.load_dataset("{report.path}", split="train").')
