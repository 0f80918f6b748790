"""Rolls out groups as the cookbook does, and continues when one of the rollouts fails.

A finished rollout is plain data: for display, and for ``--json``.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from typing import TYPE_CHECKING, Any, cast

if TYPE_CHECKING:
    from inspect_ai.dataset import Sample
    from inspect_ai.model import ChatMessage
    from tinker_cookbook.completers import TokenCompleter
    from tinker_cookbook.renderers import Renderer
    from tinker_cookbook.rl.types import Trajectory

    from inspect_tinker_plugin.contracts.episodes import TurnRequest
    from inspect_tinker_plugin.rl.env import InspectEnv
    from inspect_tinker_plugin.rl.group import InspectGroupBuilder
    from inspect_tinker_plugin.testing import Script


@dataclass(frozen=True, kw_only=True)
class RolloutReport:
    """The result of one rollout of a group."""

    task: str
    """Name of the task."""

    sample_id: int | str | None
    """The sample that the whole group shares."""

    number: int
    """Number of the rollout in its group, from 1."""

    messages: Sequence[ChatMessage] = ()
    """The conversation as the task left it."""

    scores: Mapping[str, Mapping[str, Any]]
    """Value, answer and explanation of each score, by scorer."""

    reward: float | None = None
    """The reward for the trainer; ``None`` when the rollout failed."""

    advantage: float | None = None
    """The reward minus the mean of the group."""

    turns: int = 0
    """Model calls that the policy answered."""

    input_tokens: int = 0
    """Prompt tokens, summed over turns."""

    output_tokens: int = 0
    """Tokens that the policy sampled."""

    stop: str | None = None
    """Why it ended, in the cookbook's words: ``completed``, ``max_turns`` …"""

    metrics: Mapping[str, float | int]
    """Every metric of the rollout."""

    error: str | None = None
    """The error, if the rollout failed."""

    def as_json(self) -> dict[str, Any]:
        """Return everything as JSON-serialisable data."""
        messages = [m.model_dump(mode="json", exclude_none=True) for m in self.messages]
        return {**asdict(replace(self, messages=())), "messages": messages}


def report_rollout(
    env: InspectEnv,
    number: int,
    *,
    task: str,
    sample_id: int | str | None,
    result: Trajectory | Exception | None = None,
    group_reward: float = 0.0,
) -> RolloutReport:
    """Describe how an env's episode ended, with the cookbook's view of it."""
    report = RolloutReport(
        task=task,
        sample_id=sample_id,
        number=number,
        scores={},
        metrics={},
        turns=len(env.tokens.turns),
        input_tokens=sum(turn.length for turn in env.tokens.turns),
        output_tokens=sum(len(turn.sampled) for turn in env.tokens.turns),
    )
    if (ending := env.ending) is not None:
        ended = ending.result
        report = replace(
            report,
            messages=list(ended.state.messages),
            scores={
                name: each.score.model_dump(include={"value", "answer", "explanation"})
                for name, each in ended.scores.items()
            },
            turns=ended.turns,
            input_tokens=ended.usage.input_tokens,
            output_tokens=ended.usage.output_tokens,
            error=str(ending.error) if ending.error is not None else None,
        )
    if result is None:
        return report
    if isinstance(result, Exception):
        return replace(report, error=report.error or f"{type(result).__name__}: {result}")
    metrics: dict[str, float | int] = {}
    for transition in result.transitions:
        for name, value in transition.metrics.items():
            metrics[name] = metrics.get(name, 0) + value
    stops = [name.removeprefix("stop/") for name in metrics if name.startswith("stop/")]
    stop = result.stop_reason or (stops[-1] if stops else None)
    return replace(
        report,
        reward=sum(transition.reward for transition in result.transitions) + group_reward,
        metrics=metrics,
        stop=stop and str(stop),
    )


PolicyFor = Callable[["InspectEnv", "Sample", int], "TokenCompleter"]
"""Makes the policy of one rollout, from its env, its sample and its position in the group."""


async def roll_groups(
    builders: Sequence[InspectGroupBuilder],
    policy_for: PolicyFor,
    done: Callable[[bool], object],
    groups: list[list[RolloutReport]] | None = None,
) -> list[list[RolloutReport]]:
    """Roll out groups one after the other; the rollouts of a group run together.

    They are rolled out as the cookbook does, but for a rollout that fails: the others continue.

    Args:
        builders: The groups.
        policy_for: Makes the policy of each rollout.
        done: Called after each rollout with whether it failed.
        groups: Receives the reports of each group as soon as they are there, so that a caller
            that is interrupted has them, including the finished ones of the last group.

    Returns:
        The reports of each group, in the order of the builders.
    """
    groups = [] if groups is None else groups
    for builder in builders:
        await _roll_group(builder, policy_for, done, groups)
    return groups


async def _roll_group(
    builder: InspectGroupBuilder,
    policy_for: PolicyFor,
    done: Callable[[bool], object],
    groups: list[list[RolloutReport]],
) -> None:
    from tinker_cookbook.rl.rollout_runner import run_rollout

    envs: Sequence[Any] = await builder.make_envs()
    results: dict[int, Trajectory | Exception] = {}
    group_rewards: dict[int, float] = {}

    async def roll(position: int, policy: TokenCompleter) -> None:
        try:
            results[position] = await run_rollout(policy, envs[position])
        except Exception as error:
            # The boundary of one rollout: its failure is reported beside the others.
            results[position] = error
        done(isinstance(results[position], Exception))

    try:
        policies = [policy_for(env, builder.sample, i) for i, env in enumerate(envs)]
        await asyncio.gather(*(roll(i, policy) for i, policy in enumerate(policies)))
        finished = {i: r for i, r in sorted(results.items()) if not isinstance(r, Exception)}
        rewards = await builder.compute_group_rewards(
            list(finished.values()), [envs[i] for i in finished]
        )
        group_rewards = dict(zip(finished, (reward for reward, _ in rewards), strict=True))
    finally:
        reports = [
            report_rollout(
                envs[i],
                i + 1,
                task=builder.handle.name,
                sample_id=builder.sample.id,
                result=result,
                group_reward=group_rewards.get(i, 0.0),
            )
            for i, result in sorted(results.items())
        ]
        if reports:
            groups.append(_with_advantages(reports))
        await builder.cleanup()


def _with_advantages(reports: Sequence[RolloutReport]) -> list[RolloutReport]:
    """Subtract the mean reward of the group, as group-relative training does."""
    rewards = [report.reward for report in reports if report.reward is not None]
    return [
        report
        if report.reward is None
        else replace(report, advantage=report.reward - sum(rewards) / len(rewards))
        for report in reports
    ]


def scripted_policy(
    env: InspectEnv, renderer: Renderer, script: Script, *, max_tokens: int | None = None
) -> TokenCompleter:
    """Make the policy that follows a script in one env's episode."""
    from inspect_tinker_plugin.testing import ScriptedPolicy

    def request() -> TurnRequest:
        assert env.request is not None
        return env.request

    # Only called, its class is never checked: a subclass would import the cookbook there.
    policy = ScriptedPolicy(renderer, script, request=request, max_tokens=max_tokens)
    return cast("TokenCompleter", policy)
