"""``inspect rl check`` and ``bench``: episodes of a task beside an eval of the same samples.

The first compares what happens in them, the second what they cost.
"""

from __future__ import annotations

import asyncio
import json
import math
import os
import statistics
import sys
import tempfile
import time
from collections.abc import Awaitable, Callable, Iterable, Iterator, Mapping
from dataclasses import asdict, dataclass, field, replace
from functools import partial
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
from inspect_tinker_plugin.cli.rollout import roll_groups, scripted_policy
from inspect_tinker_plugin.contracts.errors import InspectRLError
from inspect_tinker_plugin.contracts.wording import counted, write_json
from inspect_tinker_plugin.processes.workers import run_in_loop

if TYPE_CHECKING:
    from inspect_ai import Task
    from inspect_ai.dataset import Sample
    from inspect_ai.model import ModelOutput
    from tinker_cookbook.completers import TokenCompleter

    from inspect_tinker_plugin.contracts.episodes import TurnRequest
    from inspect_tinker_plugin.options import DatasetOptions
    from inspect_tinker_plugin.rl.env import InspectEnv
    from inspect_tinker_plugin.rl.group import InspectGroupBuilder
    from inspect_tinker_plugin.rl.rollouts import RolloutReport
    from inspect_tinker_plugin.tasks.reference import ResolvedTask
    from inspect_tinker_plugin.tasks.samples import SelectedSamples
    from inspect_tinker_plugin.testing import ParityReport, Script
    from inspect_tinker_plugin.testing.kit import Side

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
    os.environ.setdefault("INSPECT_DISPLAY", "none")  # of the evals; read when first asked for
    reports: list[ParityReport] = []
    interrupted = False
    try:
        with quiet_stdout() as results:
            # The task is loaded before the loop starts: in a loop, Ctrl-C waits for the next step.
            run_in_loop(_print_runs(_plan_runs(choices), reports, results, choices["as_json"]))
    except KeyboardInterrupt:
        interrupted = True
    agreed = sum(report.agrees for report in reports)
    if not choices["as_json"]:
        click.echo(f"{counted(len(reports), 'run')}, {agreed} agree")
    if interrupted:
        sys.exit(EXIT_INTERRUPTED)
    if agreed < len(reports):
        sys.exit(EXIT_ERROR)


async def _print_runs(
    planned: Iterable[Callable[[], Awaitable[ParityReport]]],
    reports: list[ParityReport],
    results: TextIO,
    as_json: bool,
) -> None:
    """Print the report of each run as soon as it has ended, and add it to ``reports``."""
    for run in planned:
        report = await run()
        reports.append(report)
        lines = [write_json(_as_json(report)).decode()] if as_json else _describe(report)
        for line in lines:
            click.echo(line, file=results)


def _plan_runs(choices: dict[str, Any]) -> list[Callable[[], Awaitable[ParityReport]]]:
    """Load the task, and return what runs one sample on one side, in order."""
    from inspect_tinker_plugin.options import DatasetOptions
    from inspect_tinker_plugin.tasks.samples import select_samples
    from inspect_tinker_plugin.testing import check_parity_async
    from inspect_tinker_plugin.testing.replies import default_script, read_script
    from inspect_tinker_plugin.testing.sides import Conditions, make_runner

    make_solver = solver_maker(choices)
    options = DatasetOptions(**dataset_choices("check", choices, limit=SAMPLES))
    how = Conditions(
        options=options, solver=make_solver, sandbox=options.sandbox, timeout=choices["timeout"]
    )
    episodes = read_script(choices["script"]) if choices["script"] else []
    resolved = load_task(choices, options.model_roles)
    make_runner(resolved.task, how, keep_log=False)  # raises for what no run could have
    source = partial(_make_again, resolved, options.model_roles)

    async def run(sample: Sample, script: Script, side: Side) -> ParityReport:
        [report] = await check_parity_async(
            source, script=script, samples=[sample], how=how, side=side, ignore=choices["ignore"]
        )
        return report

    return [
        partial(run, sample, script, side)
        for i, sample in enumerate(select_samples(resolved.task, options.selection))
        for script in [episodes[i % len(episodes)] if episodes else default_script(sample)]
        for side in choices["side"]
    ]


def _make_again(resolved: ResolvedTask, roles: Mapping[str, Any]) -> Task:
    """Make a new task for each run, if a task can be made: tasks may keep state."""
    return resolved.task if resolved.ref is None else resolved.ref.resolve(roles)


def _describe(report: ParityReport) -> Iterator[str]:
    from inspect_tinker_plugin.testing.kit import describe

    if report.missing_grader is not None:
        yield (
            f"{report.name}, {report.side}: cannot be compared: the policy would be the grader; "
            f"--model-role {report.missing_grader}=PROVIDER/MODEL"
        )
        return
    failed = "" if report.both_failed is None else f": {report.both_failed}"
    turns = counted(report.turns, "turn")
    yield f"{report.name}, {report.side}: {report.verdict}{failed} ({turns})"
    yield from describe(report, failure=False)[1:]
    if report.uncalled_tools:
        names = ", ".join(report.uncalled_tools)
        yield f"  tools never called, so not compared: {names} (--script FILE can call them)"


def _as_json(report: ParityReport) -> dict[str, Any]:
    from inspect_tinker_plugin.testing.traces import ABSENT

    return {
        "task": report.task,
        "sample_id": report.sample_id,
        "side": report.side,
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


TURNS = "inspect_rl_bench:turns"


@dataclass(frozen=True, kw_only=True)
class SideCost:
    """The cost of one side's episodes."""

    side: str
    episodes: int
    cpu_s: float
    """CPU of this process and its threads, without containers or other servers."""
    wall_s: float
    turns: float | None = None
    """Mean model calls per episode, if they are counted."""
    parts: Mapping[str, float] = field(default_factory=dict)
    """Means of the episodes' own metrics: ``time/...`` and ``sandbox/...``."""


@click.command("bench")
@task_options
@click.option(
    "--episodes",
    type=click.IntRange(1, 1_000_000),
    default=100,
    show_default=True,
    help="Episodes per side, spread over the samples.",
)
@click.option(
    "--at-once", type=click.IntRange(1), default=8, show_default=True, help="Episodes in parallel."
)
@dataset_options("bench")
@click.option(
    "--script",
    type=click.Path(path_type=Path),
    metavar="FILE",
    help="JSON lines of replies, as for `inspect rl rollout`; its first episode is played. "
    "Without one the policy thinks, then answers with the sample's target.",
)
@click.option("--json", "as_json", is_flag=True, help="Print JSON for other programs.")
@reported
def bench(**choices: Any) -> None:
    """Measure what episodes of TASK cost, beside `inspect eval` of the same samples.

    One sample is run, the first, unless --limit or --sample-id says otherwise.
    A scripted policy answers at once, so the environment is measured: solver, tools,
    sandbox, scorers, rendering and parsing. Both sides run the sample once before they are
    measured, then equally often and with equally many at once. The eval's own start, some
    tenths of a second, is spread over its episodes: take enough of them.
    """
    os.environ["INSPECT_DISPLAY"] = "none"  # of the eval; read only when it is first asked for
    from inspect_ai.util import display_type

    display_type()
    costs: list[SideCost] = []
    interrupted = False
    try:
        with quiet_stdout():
            run_in_loop(_bench(_plan(choices), costs))
    except KeyboardInterrupt:
        interrupted = True
    if choices["as_json"]:
        click.echo(json.dumps([asdict(cost) for cost in costs]))
    elif costs:
        click.echo(as_text(costs))
    if interrupted:
        click.echo(f"Interrupted after {len(costs)} of 2 sides.", err=True)
        sys.exit(EXIT_INTERRUPTED)


def as_text(costs: list[SideCost]) -> str:
    """Return a line for each side, and one for each part of an episode's time; 60 columns."""
    ours = costs[0]
    turns = ours.turns or 0.0
    each = counted(round(turns, 1), "turn")
    lines = [f"{counted(ours.episodes, 'episode')}, {each} each, milliseconds", ""]
    lines.append(
        f"{'':<12}{'CPU/episode':>12}{'CPU/turn':>10}{'wall/episode':>14}{'wall/turn':>11}"
    )
    for cost in costs:
        cpu, wall = (1000 * s / cost.episodes for s in (cost.cpu_s, cost.wall_s))
        per_turn = [f"{value / turns:.2f}" if turns else "" for value in (cpu, wall)]
        lines.append(f"{cost.side:<12}{cpu:>12.2f}{per_turn[0]:>10}{wall:>14.2f}{per_turn[1]:>11}")
    if len(costs) == 2:
        other = costs[1]
        cpu_ratio, wall_ratio = ours.cpu_s / other.cpu_s, ours.wall_s / other.wall_s
        lines.append(f"{'ratio':<12}{cpu_ratio:>12.2f}{'':>10}{wall_ratio:>14.2f}")
    lines += ["", "of an episode, on average, while others run beside it:"]
    for name, value in ours.parts.items():
        shown = f"{1000 * value:.2f} ms" if name.endswith("_s") else f"{value:.2f}"
        lines.append(f"  {name.removesuffix('_s'):<22}{shown:>14}")
    return "\n".join(line.rstrip() for line in lines)


def _plan(choices: dict[str, Any]) -> _Plan:
    from inspect_tinker_plugin.options import DatasetOptions
    from inspect_tinker_plugin.tasks.samples import select_samples
    from inspect_tinker_plugin.testing.replies import default_script, read_script

    options = DatasetOptions(**dataset_choices("bench", choices, limit=1))
    resolved = load_task(choices, options.model_roles)
    samples = select_samples(resolved.task, options.selection)
    script = read_script(choices["script"])[0] if choices["script"] else None
    return _Plan(
        resolved=resolved,
        options=options,
        samples=samples,
        scripts={sample.id: script or default_script(sample) for sample in samples},
        passes=math.ceil(choices["episodes"] / len(samples)),
        at_once=choices["at_once"],
    )


async def _bench(plan: _Plan, costs: list[SideCost]) -> None:
    """Measure one side after the other; each result is in ``costs`` immediately."""
    for side in (_episodes, _eval):
        await side(replace(plan, passes=1, at_once=1))
        costs.append(await side(plan))


@dataclass(frozen=True, kw_only=True)
class _Plan:
    """What both sides run."""

    resolved: ResolvedTask
    options: DatasetOptions
    samples: SelectedSamples
    scripts: Mapping[int | str | None, Script]
    """The replies by sample."""
    passes: int
    """Passes over the samples."""
    at_once: int


async def _episodes(plan: _Plan) -> SideCost:
    from inspect_tinker_plugin.processes.workers import freeze_memory_once
    from inspect_tinker_plugin.rl.dataset import build_dataset
    from inspect_tinker_plugin.testing import load_renderer

    renderer = load_renderer()

    def policy_for(env: InspectEnv, sample: Sample, position: int) -> TokenCompleter:
        return scripted_policy(env, renderer, plan.scripts[sample.id], max_tokens=1_000_000)

    dataset = build_dataset(
        plan.resolved.ref or plan.resolved.task,
        renderer,
        replace(plan.options, epochs=plan.passes),
        samples=plan.samples,
    )
    builders = [builder for batch in range(len(dataset)) for builder in dataset.get_batch(batch)]
    freeze_memory_once()
    room = asyncio.Semaphore(plan.at_once)

    async def roll(builder: InspectGroupBuilder) -> list[RolloutReport]:
        async with room:
            [reports] = await roll_groups([builder], policy_for, lambda failed: None)
            return reports

    cpu, wall = time.process_time(), time.perf_counter()
    rolled = await asyncio.gather(*(roll(builder) for builder in builders))
    cpu, wall = time.process_time() - cpu, time.perf_counter() - wall
    reports = [report for group in rolled for report in group]
    _require_no_failures([report.error for report in reports if report.error])
    return SideCost(
        side="inspect rl",
        episodes=len(reports),
        cpu_s=cpu,
        wall_s=wall,
        turns=statistics.fmean(report.turns for report in reports),
        parts=_parts(reports),
    )


async def _eval(plan: _Plan) -> SideCost:
    from inspect_ai import Epochs, eval_async

    from inspect_tinker_plugin.tasks.samples import with_samples
    from inspect_tinker_plugin.testing import scripted_model
    from inspect_tinker_plugin.testing.sides import eval_arguments, replace_sandbox

    options = plan.options
    task = _make_again(plan.resolved, options.model_roles)
    task, sandbox = replace_sandbox(with_samples(task, plan.samples), options.sandbox)
    model = scripted_model(_play_many(plan.scripts), keep_requests=False)
    with tempfile.TemporaryDirectory(prefix="bench-") as log_dir:
        cpu, wall = time.process_time(), time.perf_counter()
        [log] = await eval_async(
            task,
            model=model,
            solver=options.solver,  # type: ignore[arg-type]  # agents and sequences are fine, too
            sandbox=sandbox,
            epochs=Epochs(plan.passes, "mean"),  # the task's own reducer may need more
            max_samples=plan.at_once,
            **eval_arguments(options),
            log_samples=False,
            log_realtime=False,
            log_dir=log_dir,
        )
        cpu, wall = time.process_time() - cpu, time.perf_counter() - wall
    _require_no_failures([] if log.error is None else [log.error.message])
    episodes = plan.passes * len(plan.samples)
    return SideCost(side="inspect eval", episodes=episodes, cpu_s=cpu, wall_s=wall)


def _play_many(scripts: Mapping[int | str | None, Script]) -> Script:
    """Return a script for a model that many samples ask at once; stores count the turns."""
    from inspect_ai.event import SampleInitEvent
    from inspect_ai.log import transcript
    from inspect_ai.util import store

    from inspect_tinker_plugin.testing.replies import resolve_reply

    async def reply(request: TurnRequest) -> ModelOutput:
        started = (event for event in transcript().events if isinstance(event, SampleInitEvent))
        turn = store().get(TURNS, 0)
        store().set(TURNS, turn + 1)
        script = scripts[next(started).sample.id]
        return await resolve_reply(script, turn, lambda: replace(request, index=turn))

    return reply


def _parts(reports: list[RolloutReport]) -> dict[str, float]:
    names = {n for r in reports for n in r.metrics if n.startswith(("time/", "sandbox/"))}
    return {
        name: statistics.fmean(report.metrics.get(name, 0.0) for report in reports)
        for name in sorted(names, key=lambda name: (name.startswith("sandbox/"), name))
    }


def _require_no_failures(errors: list[str]) -> None:
    if errors:
        raise InspectRLError(
            f"{counted(len(errors), 'run')} failed, so nothing was measured: {errors[0]}"
        )
