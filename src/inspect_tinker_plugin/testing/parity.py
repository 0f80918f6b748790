"""Holds an RL episode against `inspect_ai.eval` on the same script."""

from __future__ import annotations

import asyncio
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Literal, TypeAlias

from inspect_tinker_plugin.episode.types import EpisodeOptions
from inspect_tinker_plugin.testing.cases import ParityCase
from inspect_tinker_plugin.testing.compare import Difference, compare_traces
from inspect_tinker_plugin.testing.record import Trace
from inspect_tinker_plugin.testing.scripts import Script
from inspect_tinker_plugin.testing.sides import TaskSource, make_task, run_episode, run_eval

Side: TypeAlias = Literal["messages", "tokens"]
"""How an episode is played: with messages, or as a rollout through renderer and tokens."""


@dataclass(frozen=True, kw_only=True)
class ParityReport:
    """The outcome for one sample."""

    name: str
    """Id of the case, or of the sample."""
    differences: Sequence[Difference]
    """Where the sides disagree."""
    faults: Sequence[str] = ()
    """Why the run shows less than it should: a script that does not fit, an unmet expectation."""
    eval_side: Trace | None = None
    episode_side: Trace | None = None

    @property
    def agrees(self) -> bool:
        """Whether the sides agree on a run that did what it was meant to do."""
        return not self.differences and not self.faults


async def check_parity_async(
    task: TaskSource,
    *,
    script: Script,
    samples: int | Iterable[int] = 1,
    options: EpisodeOptions | None = None,
    ordered: bool = True,
    side: Side = "messages",
) -> list[ParityReport]:
    """Run samples of a task on both sides with the same scripted replies and compare.

    Args:
        task: A task, or a function that makes one (needed when the task keeps state).
        script: What the model says, see :mod:`inspect_tinker_plugin.testing.scripts`.
        samples: How many samples from the first, or positions in the dataset.
        options: How episodes are run; passed to ``eval`` as well.
        ordered: ``False`` for solvers that call the model from several coroutines at once.
        side: How the episode is played; ``tokens`` takes Qwen3's renderer over the shipped
            tokenizer.

    Returns:
        One report a sample.
    """
    count = len(make_task(task).dataset)
    positions = range(min(samples, count)) if isinstance(samples, int) else list(samples)
    reports = []
    for position in positions:
        expected = await run_eval(task, script, sample=position, options=options, ordered=ordered)
        found = await _play(side, task, script, position, options, ordered)
        reports.append(
            ParityReport(
                name=f"sample {expected.log.id if expected.log else position}",
                differences=compare_traces(expected, found, same_tokens=side == "messages"),
                faults=expected.script_faults,
                eval_side=expected,
                episode_side=found,
            )
        )
    return reports


def check_parity(
    task: TaskSource,
    *,
    script: Script,
    samples: int | Iterable[int] = 1,
    options: EpisodeOptions | None = None,
) -> list[ParityReport]:
    """As :func:`check_parity_async`, and fails when the sides disagree: for tests of a task.

    Raises:
        AssertionError: Lists the differences by sample.
    """
    reports = asyncio.run(check_parity_async(task, script=script, samples=samples, options=options))
    bad = [report for report in reports if not report.agrees]
    if bad:
        raise AssertionError("\n".join(line for report in bad for line in describe(report)))
    return reports


async def check_case(
    case: ParityCase, *, side: Side = "messages", expected: Trace | None = None
) -> ParityReport:
    """Run one case of a corpus on both sides.

    Args:
        case: The case.
        side: How the episode is played.
        expected: The case's trace under ``inspect_ai.eval``, when it is there already.
    """
    if expected is None:
        expected = await eval_trace(case)
    found = await _play(side, case.task, case.script, 0, case.options, case.ordered, case.renderer)
    return ParityReport(
        name=case.id,
        differences=compare_traces(expected, found, same_tokens=side == "messages"),
        faults=case.expect.faults(expected),
        eval_side=expected,
        episode_side=found,
    )


async def eval_trace(case: ParityCase) -> Trace:
    """The trace of a case under ``inspect_ai.eval``."""
    return await run_eval(case.task, case.script, options=case.options, ordered=case.ordered)


async def _play(
    side: Side,
    source: TaskSource,
    script: Script,
    position: int,
    options: EpisodeOptions | None,
    ordered: bool,
    renderer: str = "qwen3_instruct",
) -> Trace:
    if side == "messages":
        return await run_episode(source, script, sample=position, options=options, ordered=ordered)
    from inspect_tinker_plugin.testing.token_side import run_rollout_side
    from inspect_tinker_plugin.testing.tokenizer import load_renderer

    return await run_rollout_side(
        source,
        script,
        sample=position,
        options=options,
        ordered=ordered,
        renderer=load_renderer(renderer),
    )


def describe(report: ParityReport) -> list[str]:
    """The lines that say what is wrong with a report."""
    shown = [f"  {difference}" for difference in report.differences[:8]]
    hidden = len(report.differences) - len(shown)
    more = [f"  … and {hidden} more differences"] if hidden > 0 else []
    return [report.name, *[f"  {fault}" for fault in report.faults], *shown, *more]
