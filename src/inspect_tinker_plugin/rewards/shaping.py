"""Shaping: aggregators that subtract penalties from a reward (length, turns, format, tool errors).

A penalty never hides a failure: when the inner reward cannot be computed, neither can this one.
"""

from __future__ import annotations

import re
from dataclasses import dataclass, field

from inspect_ai.model import ChatMessageTool

from inspect_tinker_plugin.episode.types import EpisodeResult
from inspect_tinker_plugin.errors import RewardError
from inspect_tinker_plugin.rewards.combining import Mean, part_reward, require_number, require_parts
from inspect_tinker_plugin.rewards.contract import Reward, RewardAggregator


@dataclass(frozen=True)
class LengthPenalty:
    """Subtracts up to ``weight`` for tokens sampled beyond ``target``.

    Nothing up to the target, all of ``weight`` from twice the target on, linear between.
    """

    reward: RewardAggregator = field(default_factory=Mean)
    """The reward to shape."""

    target: float = field(kw_only=True)
    """Tokens that the policy may sample in an episode at no cost."""

    weight: float = field(default=1.0, kw_only=True)
    """The maximum penalty."""

    def __post_init__(self) -> None:
        require_parts(self.reward)
        require_number("target", self.target, above=0)
        require_number("weight", self.weight)

    async def __call__(self, result: EpisodeResult) -> Reward:
        over = _overrun(result.usage.output_tokens, self.target)
        return _less(await part_reward(self.reward, result), "length", self.weight * over)


@dataclass(frozen=True)
class TurnPenalty:
    """Subtracts up to ``weight`` for turns beyond ``target``; the curve of `LengthPenalty`."""

    reward: RewardAggregator = field(default_factory=Mean)
    """The reward to shape."""

    target: float = field(kw_only=True)
    """Turns (model calls) that an episode may take at no cost."""

    weight: float = field(default=1.0, kw_only=True)
    """The maximum penalty."""

    def __post_init__(self) -> None:
        require_parts(self.reward)
        require_number("target", self.target, above=0)
        require_number("weight", self.weight)

    async def __call__(self, result: EpisodeResult) -> Reward:
        over = _overrun(result.turns, self.target)
        return _less(await part_reward(self.reward, result), "turns", self.weight * over)


@dataclass(frozen=True)
class FormatPenalty:
    """Subtracts ``weight`` when the final completion does not contain ``pattern``."""

    reward: RewardAggregator = field(default_factory=Mean)
    """The reward to shape."""

    pattern: str = field(kw_only=True)
    r"""A Python regular expression to search for; ``.`` matches line ends, ``\A`` anchors."""

    weight: float = field(default=1.0, kw_only=True)
    """The penalty."""

    def __post_init__(self) -> None:
        require_parts(self.reward)
        require_number("weight", self.weight)
        try:
            re.compile(self.pattern, re.DOTALL)
        except (re.error, TypeError) as ex:
            raise RewardError(f"{self.pattern!r} is not a regular expression: {ex}") from ex

    async def __call__(self, result: EpisodeResult) -> Reward:
        found = re.search(self.pattern, result.state.output.completion, re.DOTALL)
        return _less(
            await part_reward(self.reward, result), "format", 0.0 if found else self.weight
        )


@dataclass(frozen=True)
class ToolErrorPenalty:
    """Subtracts ``weight`` per tool call that was answered with an error, at most ``cap``."""

    reward: RewardAggregator = field(default_factory=Mean)
    """The reward to shape."""

    weight: float = field(default=0.1, kw_only=True)
    """Penalty per failed call."""

    cap: float = field(default=1.0, kw_only=True)
    """The maximum penalty."""

    def __post_init__(self) -> None:
        require_parts(self.reward)
        require_number("weight", self.weight)
        require_number("cap", self.cap)

    async def __call__(self, result: EpisodeResult) -> Reward:
        errors = sum(
            isinstance(message, ChatMessageTool) and message.error is not None
            for message in result.state.messages
        )
        penalty = min(self.cap, self.weight * errors)
        return _less(await part_reward(self.reward, result), "tool_errors", penalty)


def _less(reward: Reward, name: str, penalty: float) -> Reward:
    return Reward(reward.value - penalty, {**reward.metrics, f"reward/{name}_penalty": penalty})


def _overrun(amount: float, target: float) -> float:
    return min(1.0, max(0.0, amount / target - 1.0))
