"""``.eval`` logs of rollouts: one per training batch, readable with ``inspect view``."""

from __future__ import annotations

from inspect_tinker_plugin.logs.header import make_header
from inspect_tinker_plugin.logs.index import find_logs, reward_of
from inspect_tinker_plugin.logs.rollout import (
    Rollout,
    RolloutStatus,
    figures,
    trajectory_groups,
)
from inspect_tinker_plugin.logs.staging import GroupSlot, LogRun
from inspect_tinker_plugin.logs.writer import (
    assemble_pending,
    close_run,
    count_lost,
    open_run,
    write_group,
)

__all__ = [
    "GroupSlot",
    "LogRun",
    "Rollout",
    "RolloutStatus",
    "assemble_pending",
    "close_run",
    "count_lost",
    "figures",
    "find_logs",
    "make_header",
    "open_run",
    "reward_of",
    "trajectory_groups",
    "write_group",
]
