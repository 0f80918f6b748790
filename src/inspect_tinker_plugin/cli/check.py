"""``inspect rl check``: does an episode of a task do what an eval of it does?"""

from __future__ import annotations

import asyncio
import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from inspect_tinker_plugin.cli.options import parse_args
from inspect_tinker_plugin.cli.reporting import EXIT_ERROR, reported

if TYPE_CHECKING:
    from inspect_ai import Task
    from inspect_ai.dataset import Sample

    from inspect_tinker_plugin.testing import ParityReport, Script

SIDES = ("messages", "tokens")


@click.command("check")
@click.argument("task", metavar="TASK")
@click.option("-T", "task_args", multiple=True, metavar="KEY=VALUE", help="Task arguments.")
@click.option("--task-config", metavar="FILE", help="YAML or JSON file with task arguments.")
@click.option(
    "--limit", type=click.IntRange(1), default=3, show_default=True, help="Samples to check."
)
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
    "then answers with the sample's target.",
)
@click.option(
    "--model-role", "model_roles", multiple=True, metavar="ROLE=MODEL", help="Model of a role."
)
@reported
def check(**choices: Any) -> None:
    """Run samples of TASK under `inspect eval` and as RL episodes, and compare them.

    Both sides get the same scripted replies. What is compared: what the model saw and which
    tools it was offered at every turn, tool results, final messages, scores, the limit, the
    error, the store. Exit codes: 0 they agree, 1 they do not, 2 wrong usage.
    """
    reports = asyncio.run(_check(choices))
    agree = sum(report.agrees for _, report in reports)
    for side, report in reports:
        _show(side, report)
    click.echo(f"{len(reports)} runs, {agree} agree")
    if agree < len(reports):
        sys.exit(EXIT_ERROR)


async def _check(choices: dict[str, Any]) -> list[tuple[str, ParityReport]]:
    from inspect_tinker_plugin.episode.types import EpisodeOptions
    from inspect_tinker_plugin.errors import TaskError
    from inspect_tinker_plugin.tasks import resolve_task
    from inspect_tinker_plugin.testing import check_parity_async

    resolved = resolve_task(
        choices["task"], parse_args(choices["task_args"], choices["task_config"])
    )
    # a new task for each run, where there is a way to make one: tasks may keep state
    source: Task | Callable[[], Task] = resolved.ref.resolve if resolved.ref else resolved.task
    samples = resolved.task.dataset
    if len(samples) == 0:
        raise TaskError(f"task {resolved.task.name!r} has no samples")
    options = EpisodeOptions(model_roles=parse_args(choices["model_roles"]))
    reports = []
    for position in range(min(choices["limit"], len(samples))):
        script = _script(choices["script"], samples[position], position)
        for side in choices["side"]:
            [report] = await check_parity_async(
                source, script=script, samples=[position], options=options, side=side
            )
            reports.append((side, report))
    return reports


def _script(path: Path | None, sample: Sample, position: int) -> Script:
    if path is None:
        from inspect_tinker_plugin.testing.default_script import default_script

        return default_script(sample)
    from inspect_tinker_plugin.cli.policies import read_script

    episodes = read_script(path)
    return episodes[position % len(episodes)]


def _show(side: str, report: ParityReport) -> None:
    from inspect_tinker_plugin.testing.parity import describe

    turns = len(report.eval_side.requests) if report.eval_side else 0
    verdict = "agrees" if report.agrees else "differs" if report.differences else "inconclusive"
    click.echo(f"{report.name}, {side}: {verdict} ({turns} turn{'' if turns == 1 else 's'})")
    if not report.agrees:
        _echo_all(describe(report)[1:])


def _echo_all(lines: Sequence[str]) -> None:
    for line in lines:
        click.echo(line)
