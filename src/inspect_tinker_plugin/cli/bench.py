"""``inspect rl bench``: what do episodes of a task cost, beside an eval of the same sample?"""

from __future__ import annotations

import asyncio
import json
import os
import statistics
import tempfile
import time
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from inspect_tinker_plugin.cli.options import parse_args, parse_sandbox
from inspect_tinker_plugin.cli.reporting import reported

if TYPE_CHECKING:
    from inspect_ai.dataset import Sample
    from tinker_cookbook.completers import TokenCompleter

    from inspect_tinker_plugin.cli.report import RolloutReport
    from inspect_tinker_plugin.episode.types import TurnRequest
    from inspect_tinker_plugin.rl.env import InspectEnv
    from inspect_tinker_plugin.rl.group import InspectGroupBuilder
    from inspect_tinker_plugin.tasks import ResolvedTask
    from inspect_tinker_plugin.testing import Script

TURNS = "inspect_rl_bench:turns"


@dataclass(frozen=True, kw_only=True)
class Cost:
    """What the episodes of one side cost."""

    side: str
    episodes: int
    cpu_s: float
    """CPU of this process and its threads; not that of containers or other servers."""
    wall_s: float
    turns: float | None = None
    """Mean model calls of an episode, where they are counted."""
    parts: Mapping[str, float] = field(default_factory=dict)
    """Means of the episodes' own figures: ``time/...`` and ``sandbox/...``."""


@click.command("bench")
@click.argument("task", metavar="TASK")
@click.option("-T", "task_args", multiple=True, metavar="KEY=VALUE", help="Task arguments.")
@click.option("--task-config", metavar="FILE", help="YAML or JSON file with task arguments.")
@click.option("--sample-id", metavar="ID", help="The sample to run; the first without it.")
@click.option("--episodes", type=click.IntRange(1), default=100, show_default=True)
@click.option(
    "--at-once", type=click.IntRange(1), default=8, show_default=True, help="Episodes in parallel."
)
@click.option("--sandbox", metavar="TYPE[:CONFIG]", help="Instead of the task's sandbox.")
@click.option(
    "--model-role", "model_roles", multiple=True, metavar="ROLE=MODEL", help="Model of a role."
)
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
    """Measure what episodes of TASK cost, beside `inspect eval` of the same sample.

    A scripted policy answers at once, so what is measured is the environment: solver, tools,
    sandbox, scorers, rendering and parsing. Both sides run the sample once before they are
    measured, then as often and as many at once as each other. The eval's own start, some
    tenths of a second, is spread over its episodes: take enough of them.
    """
    os.environ["INSPECT_DISPLAY"] = "none"  # of the eval; read once, when it is first asked for
    from inspect_ai.util import display_type

    display_type()
    costs = asyncio.run(_bench(choices))
    if choices["as_json"]:
        click.echo(json.dumps([asdict(cost) for cost in costs]))
    else:
        click.echo(as_text(costs))


def as_text(costs: list[Cost]) -> str:
    """A line for each side, and one for each part of an episode's time."""
    ours, other = costs
    turns = ours.turns or 0.0
    lines = [f"{ours.episodes} episodes, {turns:.1f} turns each, milliseconds", ""]
    lines.append(
        f"{'':<14}{'CPU/episode':>13}{'CPU/turn':>13}{'wall/episode':>14}{'wall/turn':>13}"
    )
    for cost in costs:
        cpu, wall = (1000 * s / cost.episodes for s in (cost.cpu_s, cost.wall_s))
        per_turn = [f"{value / turns:.2f}" if turns else "" for value in (cpu, wall)]
        lines.append(f"{cost.side:<14}{cpu:>13.2f}{per_turn[0]:>13}{wall:>14.2f}{per_turn[1]:>13}")
    lines.append(
        f"{'ratio':<14}{ours.cpu_s / other.cpu_s:>13.2f}{'':>13}{ours.wall_s / other.wall_s:>14.2f}"
    )
    lines += ["", "of an episode, on average, while others run beside it:"]
    for name, value in ours.parts.items():
        shown = f"{1000 * value:.2f} ms" if name.endswith("_s") else f"{value:.2f}"
        lines.append(f"  {name.removesuffix('_s'):<22}{shown:>14}")
    return "\n".join(lines)


async def _bench(choices: dict[str, Any]) -> list[Cost]:
    from inspect_tinker_plugin.cli.policies import read_script
    from inspect_tinker_plugin.export.selection import SelectedSamples, Selection
    from inspect_tinker_plugin.tasks import resolve_task
    from inspect_tinker_plugin.testing.default_script import default_script

    resolved = resolve_task(
        choices["task"], parse_args(choices["task_args"], choices["task_config"])
    )
    wanted = choices["sample_id"]
    selection = Selection(sample_ids=[wanted]) if wanted else Selection(limit=1)
    sample = SelectedSamples(resolved.task.dataset, selection)[0]
    script = read_script(choices["script"])[0] if choices["script"] else default_script(sample)
    same: dict[str, Any] = {
        "sandbox": parse_sandbox(choices["sandbox"]),
        "model_roles": parse_args(choices["model_roles"]) or None,
    }
    costs = []
    for side in (_episodes, _eval):
        await side(resolved, sample, script, episodes=1, at_once=1, **same)
        figures = {name: choices[name] for name in ("episodes", "at_once")}
        costs.append(await side(resolved, sample, script, **figures, **same))
    return costs


async def _episodes(
    resolved: ResolvedTask,
    sample: Sample,
    script: Script,
    *,
    episodes: int,
    at_once: int,
    **same: Any,
) -> Cost:
    from inspect_tinker_plugin.cli.group_rollout import roll_groups
    from inspect_tinker_plugin.cli.policies import scripted_policy
    from inspect_tinker_plugin.rl.dataset import as_rl_dataset
    from inspect_tinker_plugin.testing import load_renderer

    renderer = load_renderer()
    assert sample.id is not None

    def policy_for(env: InspectEnv, sample: Sample, position: int) -> TokenCompleter:
        def request() -> TurnRequest:
            assert env.request is not None
            return env.request

        return scripted_policy(renderer, script, max_tokens=1_000_000, request=request)

    dataset = as_rl_dataset(
        resolved.ref or resolved.task,
        renderer,
        sample_ids=[sample.id],
        epochs=episodes,
        **same,
    )
    builders = [builder for batch in range(episodes) for builder in dataset.get_batch(batch)]
    room = asyncio.Semaphore(at_once)

    async def roll(builder: InspectGroupBuilder) -> list[RolloutReport]:
        async with room:
            [reports] = await roll_groups([builder], policy_for, lambda: None)
            return reports

    cpu, wall = time.process_time(), time.perf_counter()
    rolled = await asyncio.gather(*(roll(builder) for builder in builders))
    cpu, wall = time.process_time() - cpu, time.perf_counter() - wall
    reports = [report for group in rolled for report in group]
    _require_no_failures([report.error for report in reports if report.error])
    return Cost(
        side="inspect rl",
        episodes=len(reports),
        cpu_s=cpu,
        wall_s=wall,
        turns=statistics.fmean(report.turns for report in reports),
        parts=_parts(reports),
    )


async def _eval(
    resolved: ResolvedTask,
    sample: Sample,
    script: Script,
    *,
    episodes: int,
    at_once: int,
    **same: Any,
) -> Cost:
    from inspect_ai import eval_async

    from inspect_tinker_plugin.testing import scripted_model

    task = resolved.ref.resolve() if resolved.ref else resolved.task
    model = scripted_model(_for_many(script), keep_requests=False)
    assert sample.id is not None
    with tempfile.TemporaryDirectory(prefix="bench-") as log_dir:
        cpu, wall = time.process_time(), time.perf_counter()
        [log] = await eval_async(
            task,
            model=model,
            sample_id=sample.id,
            epochs=episodes,
            max_samples=at_once,
            log_samples=False,
            log_realtime=False,
            log_dir=log_dir,
            **same,
        )
        cpu, wall = time.process_time() - cpu, time.perf_counter() - wall
    _require_no_failures([] if log.error is None else [log.error.message])
    return Cost(side="inspect eval", episodes=episodes, cpu_s=cpu, wall_s=wall)


def _for_many(script: Script) -> Script:
    """A script for a model that many samples ask at once: turns are counted in their stores."""
    from inspect_ai.util import store

    from inspect_tinker_plugin.testing.scripts import ScriptExhausted

    def reply(request: TurnRequest) -> Any:
        turn = store().get(TURNS, 0)
        store().set(TURNS, turn + 1)
        if callable(script):
            return script(replace(request, index=turn))
        if turn >= len(script):
            return ScriptExhausted(f"the script has {len(script)} replies, turn {turn} asked")
        return script[turn]

    return reply


def _parts(reports: list[RolloutReport]) -> dict[str, float]:
    names = {n for r in reports for n in r.metrics if n.startswith(("time/", "sandbox/"))}
    return {
        name: statistics.fmean(report.metrics.get(name, 0.0) for report in reports)
        for name in sorted(names, key=lambda name: (name.startswith("sandbox/"), name))
    }


def _require_no_failures(errors: list[str]) -> None:
    from inspect_tinker_plugin.errors import InspectRLError

    if errors:
        raise InspectRLError(f"{len(errors)} runs failed, so nothing was measured: {errors[0]}")
