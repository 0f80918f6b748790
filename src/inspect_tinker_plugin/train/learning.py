"""Reports when training learns nothing, and why, from the metrics of its steps."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from inspect_tinker_plugin.train.metrics import number

WITH_SIGNAL = "env/all/by_group/frac_mixed"
"""Share of the groups whose rewards differ: only these have non-zero advantages."""

CUT = "max_tokens"
_STOP = "env/all/stop/"


def step_problems(row: Mapping[str, Any]) -> list[str]:
    """Say what kept one step from learning; nothing for a step with a signal.

    Args:
        row: the cookbook's figures of the step.
    """
    problems = []
    if number(row, WITH_SIGNAL) == 0:
        problems.append("no group had different rewards, so nothing was learned")
    # each rollout has one stop reason; the cookbook averages each over those that have it
    if {name for name in row if name.startswith(_STOP)} == {_STOP + CUT}:
        tokens = number(row, "env/all/ac_tokens_per_turn")
        at = "the token limit" if tokens is None else f"{tokens:.0f} tokens"
        problems.append(f"100% of replies were cut at {at} (max_tokens)")
    return problems


def run_problems(
    rows: Sequence[Mapping[str, Any]], stops: Sequence[str | None], max_tokens: object = None
) -> list[str]:
    """Say what kept a run, or part of it, from learning.

    Args:
        rows: the cookbook's figures of each step.
        stops: stop reasons of the rollouts that were trained on.
        max_tokens: the sampler's limit, for the message.
    """
    problems = []
    shares = [share for row in rows if (share := number(row, WITH_SIGNAL)) is not None]
    silent = sum(share == 0 for share in shares)
    if shares and silent == len(shares):
        problems.append("No group had different rewards in any step: nothing was learned.")
    elif silent:
        problems.append(
            f"No group had different rewards in {silent} of {len(shares)} steps: nothing was "
            "learned in them."
        )
    cut = sum(stop == CUT for stop in stops)
    if cut and cut * 2 >= len(stops):
        at = f"{max_tokens} tokens" if max_tokens else "the token limit"
        problems.append(f"{cut / len(stops):.0%} of replies were cut at {at}: raise max_tokens.")
    return problems
