"""Rewards: turn scores, of episodes and of whole groups, into numbers to train on."""

from __future__ import annotations

from inspect_tinker_plugin.contracts.rewards import (
    AggregatorError,
    GroupAggregator,
    GroupFunction,
    GroupMember,
    GroupRewardSpec,
    Reward,
    RewardAggregator,
    RewardFunction,
    RewardSpec,
    UnscoredError,
)
from inspect_tinker_plugin.rewards.builtin import (
    First,
    FormatPenalty,
    LengthPenalty,
    Maximum,
    Mean,
    Minimum,
    MonitorPenalty,
    Product,
    ToolErrorPenalty,
    TurnPenalty,
    Weighted,
)
from inspect_tinker_plugin.rewards.group import BestOf, Diversity, Judge, Pairwise, Rank, Ranking
from inspect_tinker_plugin.rewards.resolve import (
    ResolvedGroupReward,
    ResolvedReward,
    resolve_group_reward,
    resolve_reward,
)
from inspect_tinker_plugin.rewards.scores import ScoreReward, Term

__all__ = [
    "AggregatorError",
    "BestOf",
    "Diversity",
    "First",
    "FormatPenalty",
    "GroupAggregator",
    "GroupFunction",
    "GroupMember",
    "GroupRewardSpec",
    "Judge",
    "LengthPenalty",
    "Maximum",
    "Mean",
    "Minimum",
    "MonitorPenalty",
    "Pairwise",
    "Product",
    "Rank",
    "Ranking",
    "ResolvedGroupReward",
    "ResolvedReward",
    "Reward",
    "RewardAggregator",
    "RewardFunction",
    "RewardSpec",
    "ScoreReward",
    "Term",
    "ToolErrorPenalty",
    "TurnPenalty",
    "UnscoredError",
    "Weighted",
    "resolve_group_reward",
    "resolve_reward",
]
