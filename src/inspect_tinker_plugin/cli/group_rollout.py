"""Rolls out groups as the cookbook does, and continues when one of the rollouts fails.

A finished rollout is plain data: for display, and for ``--json``.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

from inspect_ai.model import ChatMessage

if TYPE_CHECKING:
    from inspect_ai.dataset import Sample
    from tinker_cookbook.completers import TokenCompleter
    from tinker_cookbook.rl.types import Trajectory

    from inspect_tinker_plugin.rl.env import InspectEnv
    from inspect_tinker_plugin.rl.group import InspectGroupBuilder

STOP = "stop/"


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
        fields = {name: getattr(self, name) for name in self.__dataclass_fields__}
        fields["messages"] = [m.model_dump(mode="json", exclude_none=True) for m in self.messages]
        return fields


def report_rollout(
    env: InspectEnv, number: int, *, task: str, sample_id: int | str | None
) -> RolloutReport:
    """Describe how an env's episode ended, before the group's rewards are known."""
    report = RolloutReport(
        task=task,
        sample_id=sample_id,
        number=number,
        scores={},
        metrics={},
        turns=len(env.turns),
        input_tokens=sum(turn.length for turn in env.turns),
        output_tokens=sum(len(turn.sampled) for turn in env.turns),
    )
    if env.ending is None:
        return report
    result = env.ending.result
    return replace(
        report,
        messages=list(result.state.messages),
        scores={name: _score(score.score) for name, score in result.scores.items()},
        turns=result.turns,
        input_tokens=result.usage.input_tokens,
        output_tokens=result.usage.output_tokens,
        error=str(env.ending.error) if env.ending.error is not None else None,
    )


def with_trajectory(
    report: RolloutReport, trajectory: Trajectory, group_reward: float
) -> RolloutReport:
    """Add the cookbook's view of a rollout: its total reward, metrics and stop reason."""
    metrics: dict[str, float | int] = {}
    for transition in trajectory.transitions:
        for name, value in transition.metrics.items():
            metrics[name] = metrics.get(name, 0) + value
    reward = sum(transition.reward for transition in trajectory.transitions) + group_reward
    stops = [name.removeprefix(STOP) for name in metrics if name.startswith(STOP)]
    stop = trajectory.stop_reason or (stops[-1] if stops else None)
    return replace(report, reward=reward, metrics=metrics, stop=stop and str(stop))


def with_advantages(reports: Sequence[RolloutReport]) -> list[RolloutReport]:
    """Subtract the mean reward of the group, as group-relative training does."""
    rewards = [report.reward for report in reports if report.reward is not None]
    if not rewards:
        return list(reports)
    mean = sum(rewards) / len(rewards)
    return [
        report if report.reward is None else replace(report, advantage=report.reward - mean)
        for report in reports
    ]


def _score(score: Any) -> dict[str, Any]:
    return {"value": score.value, "answer": score.answer, "explanation": score.explanation}


PolicyFor = Callable[["InspectEnv", "Sample", int], "TokenCompleter"]
"""Makes the policy of one rollout, from its env, its sample and its position in the group."""


async def roll_groups(
    builders: Sequence[InspectGroupBuilder],
    policy_for: PolicyFor,
    done: Callable[[bool], object],
    groups: list[list[RolloutReport]] | None = None,
) -> list[list[RolloutReport]]:
    """Roll out groups one after the other; the rollouts of a group run together.

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
    envs: Sequence[Any] = await builder.make_envs()
    results: dict[int, Trajectory | Exception] = {}
    group_rewards: dict[int, float] = {}
    try:
        policies = [policy_for(env, builder.sample, i) for i, env in enumerate(envs)]
        await asyncio.gather(
            *(
                _roll(env, policy, i, results, done)
                for i, (env, policy) in enumerate(zip(envs, policies, strict=True))
            )
        )
        finished = {i: r for i, r in sorted(results.items()) if not isinstance(r, Exception)}
        rewards = await builder.compute_group_rewards(
            list(finished.values()), [envs[i] for i in finished]
        )
        group_rewards = dict(zip(finished, (reward for reward, _ in rewards), strict=True))
    finally:
        reports = []
        for i, result in sorted(results.items()):
            report = report_rollout(
                envs[i], i + 1, task=builder.handle.name, sample_id=builder.sample.id
            )
            if isinstance(result, Exception):
                why = report.error or f"{type(result).__name__}: {result}"
                reports.append(replace(report, error=why))
            else:
                reports.append(with_trajectory(report, result, group_rewards.get(i, 0.0)))
        if reports:
            groups.append(with_advantages(reports))
        await builder.cleanup()


async def _roll(
    env: InspectEnv,
    policy: TokenCompleter,
    position: int,
    results: dict[int, Trajectory | Exception],
    done: Callable[[bool], object],
) -> None:
    """Roll out one env; its result goes into ``results``, unless it is cancelled."""
    from tinker_cookbook.rl.rollout_runner import run_rollout

    try:
        results[position] = await run_rollout(policy, env)
    except Exception as error:
        # The boundary of one rollout: its failure is reported beside the others.
        results[position] = error
    done(isinstance(results[position], Exception))
