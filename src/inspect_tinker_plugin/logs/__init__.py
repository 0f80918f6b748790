"""``.eval`` logs of rollouts: one per training batch, readable with ``inspect view``."""

from __future__ import annotations

from inspect_tinker_plugin.logs.rollout import Rollout, RolloutStatus, figures
from inspect_tinker_plugin.logs.run import GroupSlot, LogRun
from inspect_tinker_plugin.logs.spec import eval_spec
from inspect_tinker_plugin.logs.writer import (
    assemble_pending,
    close_run,
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
    "eval_spec",
    "figures",
    "open_run",
    "write_group",
]
