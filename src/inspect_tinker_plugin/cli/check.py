"""``inspect rl check``: compares RL episodes of a task with evals of it."""

from __future__ import annotations

import asyncio
import json
import sys
from collections.abc import AsyncIterator, Callable, Iterator
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, TextIO

import click

from inspect_tinker_plugin.cli.options import (
    dataset_choices,
    dataset_options,
    load_task,
    solver_maker,
    task_options,
)
from inspect_tinker_plugin.cli.reporting import EXIT_ERROR, EXIT_INTERRUPTED, quiet_stdout, reported
from inspect_tinker_plugin.contracts.wording import counted

if TYPE_CHECKING:
    from inspect_ai import Task
    from inspect_ai.dataset import Sample

    from inspect_tinker_plugin.testing import ParityReport, Script

SIDES = ("messages", "tokens")
SAMPLES = 3
"""Number of samples that are checked by default."""


@click.command("check")
@task_options
@click.option(
    "--side",
    type=click.Choice(SIDES),
    multiple=True,
    default=SIDES,
    show_default=True,
    help="How the policy answers: with messages, or through renderer and tokens.",
)
@click.option(
    "--script",
    type=click.Path(path_type=Path),
    metavar="FILE",
    help="JSON lines of replies, as for `inspect rl rollout`. Without one the policy thinks, "
    "then answers with the sample's target, and calls no tool but submit.",
)
@dataset_options("check")
@click.option(
    "--timeout",
    type=click.IntRange(1),
    default=600,
    show_default=True,
    help="Seconds that one run of a sample may take before it is given up.",
)
@click.option(
    "--ignore",
    multiple=True,
    metavar="PATH",
    help="A place that is not compared, as a difference names it (store.seconds; * is anything).",
)
@click.option("--json", "as_json", is_flag=True, help="Print one JSON object per run instead.")
@reported
def check(**choices: Any) -> None:
    """Run samples of TASK under `inspect eval` and as RL episodes, and compare them.

    Both sides get the same scripted replies, and one epoch of the same sample; the first three
    unless --limit or --sample-id says otherwise. The comparison covers what the model saw and which
    tools it was offered at every turn, tool results, final messages, scores, the limit, the
    error, the store; not times of the clock, nor the policy's name. Exit codes: 0 they agree; 1
    they differ, or a run shows nothing because both sides failed, the script ran out, the solver
    did not end or the policy would be the grader; 2 wrong usage.
    """
    runs: list[Run] = []
    interrupted = False
    try:
        with quiet_stdout() as results:
            asyncio.run(_print_runs(choices, runs, results))
    except KeyboardInterrupt:
        interrupted = True
    agreed = sum(run.report.agrees for run in runs)
    if not choices["as_json"]:
        click.echo(f"{counted(len(runs), 'run')}, {agreed} agree")
    if interrupted:
        sys.exit(EXIT_INTERRUPTED)
    if agreed < len(runs):
        sys.exit(EXIT_ERROR)


@dataclass(frozen=True)
class Run:
    """One sample on one side, compared with its eval."""

    task: str
    sample_id: int | str | None
    side: str
    report: ParityReport


async def _print_runs(choices: dict[str, Any], runs: list[Run], results: TextIO) -> None:
    """Print each run as soon as it has ended, and add it to ``runs``."""
    async for run in _check(choices):
        runs.append(run)
        for line in _lines(run, as_json=choices["as_json"]):
            click.echo(line, file=results)


async def _check(choices: dict[str, Any]) -> AsyncIterator[Run]:
    from inspect_tinker_plugin.options import DatasetOptions
    from inspect_tinker_plugin.tasks.samples import select_samples
    from inspect_tinker_plugin.tasks.sandboxes import choose_sandbox
    from inspect_tinker_plugin.testing import check_parity_async
    from inspect_tinker_plugin.testing.sides import Overrides

    make_solver = solver_maker(choices)
    chosen = dataset_choices("check", choices)
    if chosen["sample_id"] is None and chosen["limit"] is None:
        chosen["limit"] = SAMPLES
    options = DatasetOptions(**chosen)
    choose_sandbox(options.sandbox)  # raises for an unknown name
    resolved = load_task(choices)
    # a new task for each run, if a task can be made: tasks may keep state
    source: Task | Callable[[], Task] = resolved.ref.resolve if resolved.ref else resolved.task
    for position, sample in enumerate(select_samples(resolved.task, options.selection)):
        script = _script(choices["script"], sample, position)
        for side in choices["side"]:
            [report] = await check_parity_async(
                source,
                script=script,
                samples=[sample],
                options=options,
                side=side,
                overrides=Overrides(solver=make_solver, sandbox=options.sandbox),
                timeout=choices["timeout"],
                ignore=choices["ignore"],
            )
            yield Run(resolved.task.name, sample.id, side, report)


def _script(path: Path | None, sample: Sample, position: int) -> Script:
    if path is None:
        from inspect_tinker_plugin.testing.replies import default_script

        return default_script(sample)
    from inspect_tinker_plugin.testing.replies import read_script

    episodes = read_script(path)
    return episodes[position % len(episodes)]


def _lines(run: Run, *, as_json: bool) -> Iterator[str]:
    from inspect_tinker_plugin.testing.parity import describe

    report = run.report
    if as_json:
        yield json.dumps(_as_json(run), ensure_ascii=False)
        return
    turns = counted(report.turns, "turn")
    failed = "" if report.both_failed is None else f": {report.both_failed}"
    if report.missing_grader is not None:
        yield (
            f"{report.name}, {run.side}: cannot be compared: the policy would be the grader; "
            f"--model-role {report.missing_grader}=PROVIDER/MODEL"
        )
        return
    yield f"{report.name}, {run.side}: {report.verdict}{failed} ({turns})"
    yield from describe(report, failure=False)[1:]
    if report.uncalled_tools:
        names = ", ".join(report.uncalled_tools)
        yield f"  tools never called, so not compared: {names} (--script FILE can call them)"


def _as_json(run: Run) -> dict[str, Any]:
    from inspect_tinker_plugin.testing.traces import ABSENT

    report = run.report
    return {
        "task": run.task,
        "sample_id": run.sample_id,
        "side": run.side,
        "verdict": report.verdict,
        "agrees": report.agrees,
        "turns": report.turns,
        "both_failed": report.both_failed,
        "missing_grader": report.missing_grader,
        "faults": list(report.faults),
        # ABSENT is a value that one side does not have; null is a value
        "differences": [
            {name: value for name, value in asdict(each).items() if value is not ABSENT}
            for each in report.differences
        ],
        "uncalled_tools": report.uncalled_tools,
    }
