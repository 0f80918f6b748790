"""A group rolled out as the cookbook does, its rollouts described as plain data."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from typing import Any

from inspect_ai.dataset import Sample
from inspect_ai.model import ChatMessage
from tinker_cookbook.completers import TokenCompleter
from tinker_cookbook.rl.rollout_runner import run_rollout
from tinker_cookbook.rl.types import Metrics, Trajectory

from inspect_tinker_plugin.rl.env import InspectEnv
from inspect_tinker_plugin.rl.group import InspectGroupBuilder

PolicyFor = Callable[[InspectEnv, Sample, int], TokenCompleter]
"""Makes the policy of one rollout, from its env, its sample and its position in the group."""


@dataclass
class MemberRollout:
    """One rollout of a group: its env, and what the trainer got or which exception."""

    env: InspectEnv
    number: int
    """Number of the rollout in its group, from 1."""

    result: Trajectory | Exception
    of_group: tuple[float, Metrics] = (0.0, {})
    """The group's part of the reward, beside that of the steps, with its metrics."""


async def roll_group(
    builder: InspectGroupBuilder,
    policy_for: PolicyFor,
    members: list[MemberRollout],
    *,
    done: Callable[[bool], object] = lambda failed: None,
) -> None:
    """Roll out a group; when one of its rollouts fails, the others continue.

    Args:
        builder: The group.
        policy_for: Makes the policy of each rollout.
        members: Receives the rollouts, in the order of the group, also if this is interrupted.
        done: Called after each rollout with whether it failed.

    Raises:
        EpisodeError: The group's reward failed, and ``on_error`` says to raise.
    """
    envs: Sequence[Any] = await builder.make_envs()
    results: dict[int, Trajectory | Exception] = {}
    rewards: dict[int, tuple[float, Metrics]] = {}

    async def roll(position: int, policy: TokenCompleter) -> None:
        try:
            results[position] = await run_rollout(policy, envs[position])
            await envs[position].settle()
        except Exception as error:
            # The boundary of one rollout: its failure is reported beside the others.
            results[position] = error
            await envs[position].close()
        done(isinstance(results[position], Exception))

    try:
        policies = [policy_for(env, builder.sample, i) for i, env in enumerate(envs)]
        await asyncio.gather(*(roll(i, policy) for i, policy in enumerate(policies)))
        finished = {i: r for i, r in sorted(results.items()) if not isinstance(r, Exception)}
        paid = await builder.compute_group_rewards(
            list(finished.values()), [envs[i] for i in finished]
        )
        rewards = dict(zip(finished, paid, strict=True))
    finally:
        members += [
            MemberRollout(envs[i], i + 1, result, rewards.get(i, (0.0, {})))
            for i, result in sorted(results.items())
        ]
        await builder.cleanup()


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
    """Every metric of the rollout, those of its group included."""

    error: str | None = None
    """The error, if the rollout failed."""

    def as_json(self) -> dict[str, Any]:
        """Return everything as JSON-serialisable data."""
        messages = [m.model_dump(mode="json", exclude_none=True) for m in self.messages]
        return {**asdict(replace(self, messages=())), "messages": messages}


def report_rollout(member: MemberRollout) -> RolloutReport:
    """Describe how an episode ended, with the cookbook's view of it."""
    env, result = member.env, member.result
    report = RolloutReport(
        task=env.episode.prepared.name,
        sample_id=env.episode.sample.id,
        number=member.number,
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
    if isinstance(result, Exception):
        return replace(report, error=report.error or f"{type(result).__name__}: {result}")
    of_group, group_metrics = member.of_group
    metrics: Metrics = {}
    for transition in result.transitions:
        for name, value in transition.metrics.items():
            metrics[name] = metrics.get(name, 0) + value
    stops = [name.removeprefix("stop/") for name in metrics if name.startswith("stop/")]
    stop = result.stop_reason or (stops[-1] if stops else None)
    return replace(
        report,
        reward=sum(transition.reward for transition in result.transitions) + of_group,
        metrics=metrics | group_metrics,
        stop=stop and str(stop),
    )
