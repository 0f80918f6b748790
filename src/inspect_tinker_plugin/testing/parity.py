"""Compares an RL episode with an eval of the same sample, on the same script."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Iterable, Sequence
from dataclasses import dataclass
from typing import Any, Literal, TypeAlias

from inspect_ai.dataset import Sample

from inspect_tinker_plugin import inspect_internals as internals
from inspect_tinker_plugin.contracts.wording import counted
from inspect_tinker_plugin.options import EpisodeOptions
from inspect_tinker_plugin.testing.cases import ParityCase
from inspect_tinker_plugin.testing.replies import Script
from inspect_tinker_plugin.testing.sides import (
    NO_OVERRIDES,
    TIMEOUT,
    Overrides,
    ParityError,
    StuckError,
    TaskSource,
    make_task,
    run_episode,
    run_eval,
)
from inspect_tinker_plugin.testing.traces import Difference, Trace, compare_traces

Side: TypeAlias = Literal["messages", "tokens"]
"""How an episode is played: with messages, or as a rollout through renderer and tokens."""

Verdict: TypeAlias = Literal["agrees", "differs", "both failed", "inconclusive"]
"""What a run showed. Sides that fail alike, or a script that does not fit, show little."""


@dataclass(frozen=True, kw_only=True)
class ParityReport:
    """The outcome for one sample."""

    name: str
    """Id of the case, or of the sample."""
    differences: Sequence[Difference]
    """Where the sides disagree."""
    faults: Sequence[str] = ()
    """Why the run shows less than it should: a script that does not fit, an unmet expectation."""
    both_failed: str | None = None
    """The error that both sides failed with, if it was not expected: type and message."""
    missing_grader: str | None = None
    """A model role that has to be set first: the policy would have been the grader."""
    eval_side: Trace | None = None
    episode_side: Trace | None = None

    @property
    def agrees(self) -> bool:
        """Whether the sides agree on a run that served its purpose."""
        return self.verdict == "agrees"

    @property
    def verdict(self) -> Verdict:
        """What the run showed."""
        if self.missing_grader is not None:
            return "inconclusive"
        if self.differences:
            return "differs"
        if self.both_failed is not None:
            return "both failed"
        return "inconclusive" if self.faults else "agrees"

    @property
    def turns(self) -> int:
        """Model calls of the eval."""
        return 0 if self.eval_side is None else len(self.eval_side.requests)

    @property
    def uncalled_tools(self) -> list[str]:
        """Tools that were offered but that no reply called, except ``submit``.

        Their effects were not compared; a script that calls them compares them.
        """
        if self.eval_side is None:
            return []
        offered = {
            tool["name"]: None for request in self.eval_side.requests for tool in request["tools"]
        }
        called = {"submit", *(event["function"] for event in self.eval_side.tool_events)}
        return [name for name in offered if name not in called]


async def check_parity_async(
    task: TaskSource,
    *,
    script: Script,
    samples: int | Iterable[int | Sample] = 1,
    options: EpisodeOptions | None = None,
    ordered: bool = True,
    side: Side = "messages",
    overrides: Overrides = NO_OVERRIDES,
    allow_errors: bool = False,
    timeout: float | None = TIMEOUT,
    ignore: Sequence[str] = (),
) -> list[ParityReport]:
    """Run samples of a task on both sides with the same scripted replies and compare.

    Args:
        task: A task, or a function that makes one (needed when the task keeps state).
        script: What the model says, see :mod:`inspect_tinker_plugin.testing.replies`.
        samples: How many samples from the first, or samples and positions in the dataset.
        options: How episodes are run; passed to ``eval`` as well.
        ordered: ``False`` for solvers that call the model from several coroutines at once.
        side: How the episode is played; ``tokens`` takes Qwen3's renderer over the shipped
            tokenizer.
        overrides: Replacements for parts of the task, on both sides.
        allow_errors: Let samples agree that fail in the same way on both sides.
        timeout: Seconds that one run of a sample may take.
        ignore: Paths whose values are not compared, such as ``store.started``; ``*`` is anything.

    Returns:
        One report per sample.

    Raises:
        StuckError: A run did not end when it was cancelled.
    """
    count = len(make_task(task).dataset)
    chosen = range(min(samples, count)) if isinstance(samples, int) else list(samples)
    reports = []
    for sample in chosen:
        common: dict[str, Any] = {
            "sample": sample,
            "options": options,
            "ordered": ordered,
            "overrides": overrides,
            "timeout": timeout,
        }
        expected = await _attempt(run_eval(task, script, **common))
        found = await _attempt(_play(side, task, script, **common))
        reports.append(
            _report(
                f"sample {_id_of(sample, expected)}",
                expected,
                found,
                same_tokens=side == "messages",
                allow_errors=allow_errors,
                ignore=ignore,
            )
        )
    return reports


def _id_of(sample: int | Sample, run: Trace | Exception) -> int | str | None:
    if isinstance(run, Trace) and run.log is not None:
        return run.log.id
    return sample + 1 if isinstance(sample, int) else sample.id


async def _attempt(side: Awaitable[Trace]) -> Trace | Exception:
    """Run a side; an exception that keeps it from running or ending is part of the comparison."""
    try:
        return await side
    except StuckError:
        raise
    except Exception as error:
        return error


def _report(
    name: str,
    expected: Trace | Exception,
    found: Trace | Exception,
    *,
    same_tokens: bool,
    allow_errors: bool,
    ignore: Sequence[str],
) -> ParityReport:
    if isinstance(found, Trace) and found.grader is not None:
        return ParityReport(
            name=name,
            differences=[],
            missing_grader=found.grader,
            eval_side=expected if isinstance(expected, Trace) else None,
            episode_side=found,
        )
    if isinstance(expected, Trace) and isinstance(found, Trace):
        failed = None if allow_errors else _failed_alike(expected, found)
        return ParityReport(
            name=name,
            differences=compare_traces(expected, found, same_tokens=same_tokens, ignore=ignore),
            faults=expected.script_faults or (found.script_faults if found.ran_out else ()),
            both_failed=failed,
            eval_side=expected,
            episode_side=found,
        )
    outcomes = {"eval": _outcome(expected), "episode": _outcome(found)}
    faults = [
        f"{side} {outcome}"
        for (side, outcome), run in zip(outcomes.items(), (expected, found), strict=True)
        if isinstance(run, ParityError)
    ]
    both = isinstance(expected, Exception) and isinstance(found, Exception)
    differ = not faults and not both
    return ParityReport(
        name=name,
        differences=[Difference("run", *outcomes.values())] if differ else [],
        faults=[] if differ else faults,
        both_failed=_said_once(expected, found) if both and not faults else None,
        eval_side=expected if isinstance(expected, Trace) else None,
        episode_side=found if isinstance(found, Trace) else None,
    )


def _outcome(run: Trace | Exception) -> str:
    if isinstance(run, ParityError):
        return f"did not run to its end: {run}"
    if isinstance(run, Exception):
        return f"cannot run: {_in_words(run)}"
    return f"ran, in {counted(len(run.requests), 'turn')}"


def _failed_alike(expected: Trace, found: Trace) -> str | None:
    if expected.error is None or found.error is None or expected.script_faults or found.ran_out:
        return None
    kind, message = expected.error["type"], expected.error["message"]
    # most exceptions are logged as Python shows them, which names the type again
    return message if message.startswith(f"{kind}(") else f"{kind}: {message}"


def _said_once(expected: Trace | Exception, found: Trace | Exception) -> str:
    texts = [_in_words(run) for run in (expected, found) if isinstance(run, Exception)]
    return texts[0] if texts[0] == texts[-1] else f"eval {texts[0]}; episode {texts[-1]}"


def _in_words(error: Exception) -> str:
    return f"{type(error).__name__}: {internals.in_one_line(error)}"


def check_parity(
    task: TaskSource,
    *,
    script: Script,
    samples: int | Iterable[int | Sample] = 1,
    options: EpisodeOptions | None = None,
    allow_errors: bool = False,
) -> list[ParityReport]:
    """Run :func:`check_parity_async` and fail when the sides disagree: for tests of a task.

    Raises:
        AssertionError: Lists the differences by sample.
    """
    reports = asyncio.run(
        check_parity_async(
            task, script=script, samples=samples, options=options, allow_errors=allow_errors
        )
    )
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
        expected: The case's trace under ``inspect_ai.eval``, if already known.
    """
    if expected is None:
        expected = await eval_trace(case)
    found = await _play(
        side,
        case.task,
        case.script,
        options=case.options,
        ordered=case.ordered,
        renderer=case.renderer,
    )
    return ParityReport(
        name=case.id,
        differences=compare_traces(expected, found, same_tokens=side == "messages"),
        faults=case.expect.faults(expected),
        eval_side=expected,
        episode_side=found,
    )


async def eval_trace(case: ParityCase) -> Trace:
    """Return the trace of a case under ``inspect_ai.eval``."""
    return await run_eval(case.task, case.script, options=case.options, ordered=case.ordered)


async def _play(
    side: Side,
    source: TaskSource,
    script: Script,
    *,
    renderer: str = "qwen3_instruct",
    **common: Any,
) -> Trace:
    if side == "messages":
        return await run_episode(source, script, **common)
    from inspect_tinker_plugin.testing.policy import load_renderer
    from inspect_tinker_plugin.testing.sides import run_rollout_side

    return await run_rollout_side(source, script, renderer=load_renderer(renderer), **common)


def describe(report: ParityReport, *, failure: bool = True) -> list[str]:
    """Return the lines that describe a report; with ``failure``, also why both sides failed."""
    shown = [f"  {difference}" for difference in report.differences[:8]]
    hidden = len(report.differences) - len(shown)
    more = [f"  … and {hidden} more differences"] if hidden > 0 else []
    said = failure and report.both_failed is not None
    failed = [f"  both failed: {report.both_failed}"] if said else []
    faults = [f"  {fault}" for fault in report.faults]
    if report.missing_grader is not None:
        faults.append(f"  the policy would be the grader; set the role {report.missing_grader!r}")
    return [report.name, *failed, *faults, *shown, *more]
