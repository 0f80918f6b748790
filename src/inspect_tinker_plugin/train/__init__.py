"""Training runs: train a model on a task with the cookbook's own loop."""

from __future__ import annotations

from inspect_tinker_plugin.train.request import (
    EpisodeCost,
    average_costs,
    cost_of,
    plan_lines,
    plan_of,
    plan_rows,
    plan_title,
    read_prices,
)

__all__ = [
    "EpisodeCost",
    "average_costs",
    "cost_of",
    "plan_lines",
    "plan_of",
    "plan_rows",
    "plan_title",
    "read_prices",
]
