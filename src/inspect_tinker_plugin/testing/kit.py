"""What the tests of a plugin use: episodes and tool calls from a script, and a sampler's run."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence

from inspect_ai import Task
from inspect_ai.dataset import Sample
from inspect_ai.model import ChatMessageTool
from inspect_ai.solver import generate, use_tools
from inspect_ai.tool import Tool, ToolCall
from inspect_ai.util import SandboxEnvironmentType

from inspect_tinker_plugin.contracts.episodes import EpisodeResult
from inspect_tinker_plugin.contracts.hooks import GroupOutcome, SamplePool, Sampler, SamplerSpec
from inspect_tinker_plugin.contracts.tools import ToolScope
from inspect_tinker_plugin.options import EpisodeOptions
from inspect_tinker_plugin.samplers.state import choose_positions, resolve_sampler
from inspect_tinker_plugin.testing.replies import Player, Script, say
from inspect_tinker_plugin.testing.sides import (
    Conditions,
    TaskSource,
    bounded,
    make_runner,
    one_sample_task,
    play,
)
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
        return await bounded(play(runner, one.dataset[0], player), how.timeout, player)


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
        chosen.append(positions)
        for position in positions:
            earned = tuple(rewards(samples[position], step))
            outcome = GroupOutcome(position=position, rewards=earned, step=step)
            outcomes.append(outcome)
            running.learn(outcome)
    return chosen
