"""What tests use: episodes, tool calls and samplers from a script, and episodes beside evals."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Literal, TypeAlias

from inspect_ai import Task
from inspect_ai.dataset import Sample
from inspect_ai.model import ChatMessageTool
from inspect_ai.solver import generate, use_tools
from inspect_ai.tool import Tool, ToolCall
from inspect_ai.util import SandboxEnvironmentType

from inspect_tinker_plugin import inspect_internals as internals
from inspect_tinker_plugin.contracts.episodes import EpisodeResult
from inspect_tinker_plugin.contracts.hooks import (
    GroupOutcome,
    SamplePool,
    Sampler,
    SamplerSpec,
    ToolScope,
)
from inspect_tinker_plugin.contracts.wording import counted
from inspect_tinker_plugin.options import EpisodeOptions
from inspect_tinker_plugin.samplers import choose_positions, resolve_sampler
from inspect_tinker_plugin.testing.replies import Player, Script, say
from inspect_tinker_plugin.testing.sides import (
    PLAIN,
    Conditions,
    ParityError,
    TaskSource,
    make_runner,
    make_task,
    one_sample_task,
    play,
    run_episode,
    run_eval,
    run_rollout,
    wait_for_run,
)
from inspect_tinker_plugin.testing.traces import Difference, Trace, compare_traces
from inspect_tinker_plugin.tools import (
    ToolExecutorSpec,
    resolve_tool_executor,
    use_tool_executor,
)


async def play_episode(
    task: TaskSource,
    script: Script,
    *,
    sample: int | Sample = 0,
    options: EpisodeOptions | None = None,
    sandbox: SandboxEnvironmentType | Mapping[str, str] | None = None,
    tool_executor: ToolExecutorSpec | None = None,
    scope: ToolScope | None = None,
) -> EpisodeResult:
    """Play one sample of a task to its scored end; its failure is in the result's ``error``.

    Args:
        task: The task, or a function that makes one.
        script: What the policy says.
        sample: The sample, or its position in the dataset.
        options: How the episode is run.
        sandbox: Replaces the task's sandbox: a type that Inspect knows, or a plugin's provider.
        tool_executor: Carries out tool calls, as in ``as_rl_dataset``.
        scope: What executors remember, to be shared by several episodes.

    Raises:
        ParityError: The episode did not end within ten minutes.
    """
    how = Conditions(sample=sample, options=options or EpisodeOptions(), sandbox=sandbox)
    one = one_sample_task(task, how.sample)
    runner = make_runner(one, how, keep_log=True)
    scope = scope or ToolScope(task=one.name, sample_id=one.dataset[0].id)
    with use_tool_executor(resolve_tool_executor(tool_executor), scope):
        player = Player(script)
        return await wait_for_run(play(runner, one.dataset[0], player), how.timeout, player)


async def run_tool_calls(
    tool_executor: ToolExecutorSpec,
    tools: Sequence[Tool],
    *calls: ToolCall,
    scope: ToolScope | None = None,
) -> list[ChatMessageTool]:
    """Have an executor carry out calls, one per turn, and return what the model is shown.

    Args:
        tool_executor: An executor, its name, or an expression.
        tools: What may be called.
        calls: Made with :func:`call`.
        scope: What executors remember, to be shared by several runs.

    Raises:
        EpisodeError: The executor failed; a ``ToolError`` is shown to the model instead.
    """
    task = Task(
        dataset=[Sample(id=1, input="Call the tools.")], solver=[use_tools(*tools), generate()]
    )
    script = [*(say("", each) for each in calls), say("done")]
    result = await play_episode(task, script, tool_executor=tool_executor, scope=scope)
    if result.error is not None:
        raise result.error
    return [each for each in result.state.messages if isinstance(each, ChatMessageTool)]


def run_sampler(
    sampler: SamplerSpec,
    samples: Sequence[Sample],
    rewards: Callable[[Sample, int], Sequence[float]],
    *,
    steps: int = 10,
    batch_size: int = 4,
    group_size: int = 4,
    seed: int = 0,
) -> list[list[int]]:
    """Let a sampler choose batches, with invented rewards, and return the positions by step.

    At each step a new sampler, which is told the outcomes so far as a continued run tells them,
    has to choose the same.

    Args:
        sampler: A name, an expression, or a function that makes a new sampler.
        samples: The pool.
        rewards: Returns the rewards of a group, from its sample and the step.
        steps: Batches.
        batch_size: Groups per batch.
        group_size: Episodes per group, as the pool says.
        seed: The pool's seed.

    Raises:
        ConfigError: It chose something else than positions in the pool.
        AssertionError: A new sampler with the same outcomes chose differently.
    """
    make = resolve_sampler(sampler)
    pool = SamplePool(task="test", samples=samples, group_size=group_size, seed=seed)
    outcomes: list[GroupOutcome] = []

    def begin() -> Sampler:
        new = make()
        new.begin(pool)
        for outcome in outcomes:
            new.learn(outcome)
        return new

    running, chosen = begin(), []
    for step in range(steps):
        positions = choose_positions(running, step, batch_size, len(samples))
        again = choose_positions(begin(), step, batch_size, len(samples))
        if again != positions:
            raise AssertionError(
                f"step {step}: the sampler chose {positions}, but {again} in a continued run; it "
                "may depend on the pool, the outcomes and the step only"
            )
        dict(running.figures())  # as a training asks for them
        chosen.append(positions)
        for position in positions:
            earned = tuple(rewards(samples[position], step))
            outcome = GroupOutcome(position=position, rewards=earned, step=step)
            outcomes.append(outcome)
            running.learn(outcome)
    return chosen


Side: TypeAlias = Literal["messages", "tokens"]
"""How an episode is played: with messages, or as a rollout through renderer and tokens."""

RUN_SIDE = {"messages": run_episode, "tokens": run_rollout}

Verdict: TypeAlias = Literal["agrees", "differs", "both failed", "inconclusive"]
"""What a run showed. Sides that fail alike, or a script that does not fit, show little."""


@dataclass(frozen=True, kw_only=True)
class ParityReport:
    """The outcome for one sample."""

    task: str = ""
    """Name of the task."""
    sample_id: int | str | None = None
    """Id of the sample."""
    side: Side = "messages"
    """How the episode was played."""
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
    def name(self) -> str:
        """Name of the sample."""
        return f"sample {self.sample_id}"

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
    how: Conditions = PLAIN,
    side: Side = "messages",
    ignore: Sequence[str] = (),
) -> list[ParityReport]:
    """Run samples of a task on both sides with the same scripted replies and compare.

    Args:
        task: A task, or a function that makes one (needed when the task keeps state).
        script: What the model says, see :mod:`inspect_tinker_plugin.testing.replies`.
        samples: How many samples from the first, or samples and positions in the dataset.
        how: How each sample is run.
        side: How the episode is played; ``tokens`` takes Qwen3's renderer over the shipped
            tokenizer.
        ignore: Paths whose values are not compared, such as ``store.started``; ``*`` is anything.

    Returns:
        One report per sample.
    """
    first = make_task(task)
    reports = []
    for sample in range(min(samples, len(first.dataset))) if isinstance(samples, int) else samples:
        of_sample = replace(how, sample=sample)
        expected = await _attempt(run_eval(task, script, of_sample))
        found = await _attempt(RUN_SIDE[side](task, script, of_sample))
        if isinstance(expected, Trace) and isinstance(found, Trace):
            report = compare_runs(expected, found, side=side, ignore=ignore)
            report = replace(report, both_failed=_failed_alike(expected, found))
        else:
            report = _compare_outcomes(expected, found)
        sample_id = sample + 1 if isinstance(sample, int) else sample.id
        if isinstance(expected, Trace) and expected.log is not None:
            sample_id = expected.log.id
        reports.append(replace(report, task=first.name, sample_id=sample_id, side=side))
    return reports


async def _attempt(side: Awaitable[Trace]) -> Trace | Exception:
    """Run a side; an exception that keeps it from running or ending is part of the comparison."""
    try:
        return await side
    except Exception as error:
        return error


def compare_runs(
    expected: Trace, found: Trace, *, side: Side, ignore: Sequence[str] = ()
) -> ParityReport:
    """Compare an eval's run with an episode's, but for what paths leave out."""
    report = ParityReport(differences=[], eval_side=expected, episode_side=found)
    if found.grader is not None:
        return replace(report, missing_grader=found.grader)
    return replace(
        report,
        differences=compare_traces(expected, found, same_tokens=side == "messages", ignore=ignore),
        faults=expected.script_faults or (found.script_faults if found.ran_out else ()),
    )


def _compare_outcomes(expected: Trace | Exception, found: Trace | Exception) -> ParityReport:
    """Describe sides of which at least one did not run."""
    runs = {"eval": expected, "episode": found}
    outcomes = {side: _describe_outcome(run) for side, run in runs.items()}
    errors = {side: error for side, run in runs.items() if (error := _failure_to_run(run))}
    report = ParityReport(
        differences=[],
        eval_side=expected if isinstance(expected, Trace) else None,
        episode_side=found if isinstance(found, Trace) else None,
    )
    if any(isinstance(run, ParityError) for run in runs.values()):
        return replace(report, faults=[f"{side} {outcomes[side]}" for side in errors])
    if len(errors) < len(runs):
        return replace(report, differences=[Difference("run", *outcomes.values())])
    alike = len(set(errors.values())) == 1
    each = [error if alike else f"{side} {error}" for side, error in errors.items()]
    return replace(report, both_failed="; ".join(dict.fromkeys(each)))


def _failure_to_run(run: Trace | Exception) -> str | None:
    """Return why a run ended before its first turn, if it did."""
    if isinstance(run, Exception):
        return f"{type(run).__name__}: {internals.in_one_line(run)}"
    return None if run.error is None or run.requests else run.error["message"]


def _describe_outcome(run: Trace | Exception) -> str:
    if isinstance(run, ParityError):
        return f"did not run to its end: {run}"
    if isinstance(run, Exception):
        return f"cannot run: {type(run).__name__}: {internals.in_one_line(run)}"
    return f"ran, in {counted(len(run.requests), 'turn')}"


def _failed_alike(expected: Trace, found: Trace) -> str | None:
    if expected.error is None or found.error is None or expected.script_faults or found.ran_out:
        return None
    kind, message = expected.error["type"], expected.error["message"]
    # most exceptions are logged as Python shows them, which names the type again
    return message if message.startswith(f"{kind}(") else f"{kind}: {message}"


def check_parity(
    task: TaskSource,
    *,
    script: Script,
    samples: int | Iterable[int | Sample] = 1,
    options: EpisodeOptions | None = None,
) -> list[ParityReport]:
    """Run :func:`check_parity_async` and fail when the sides disagree: for tests of a task.

    Raises:
        AssertionError: Lists the differences by sample.
    """
    how = Conditions(options=options or EpisodeOptions())
    reports = asyncio.run(check_parity_async(task, script=script, samples=samples, how=how))
    bad = [report for report in reports if not report.agrees]
    if bad:
        raise AssertionError("\n".join(line for report in bad for line in describe(report)))
    return reports


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
