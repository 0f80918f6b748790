"""The options of an audit, and the budget of one run."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from inspect_ai.dataset import Sample

from inspect_rl_audit.attempts import ModelAttempt
from inspect_rl_audit.reference import Gold
from inspect_rl_audit.stage import Budget
from inspect_tinker_plugin.contracts.errors import ConfigError
from inspect_tinker_plugin.rewards import RewardSpec
from inspect_tinker_plugin.tasks.selection import Selection

SAMPLES = 8
"""Number of samples for the expensive probes."""

WIDE = 200
"""Number of samples that are examined with one or two episodes each."""

WIDE_IN_SANDBOX = 40
"""The same for tasks whose samples need a sandbox each."""

SLOW_SCORING = 10.0
"""Seconds that scoring may usually take."""

DEFAULT_BUDGET = ("1500", "20m")
"""Episodes and minutes of one run."""


@dataclass(frozen=True, kw_only=True)
class AuditOptions:
    """Options of an audit."""

    out: Path
    """Folder for ``audit.html``, ``audit.json``, the logs and the journal."""

    probes: Sequence[str] = ()
    """Expressions that name probes; every installed probe when empty."""

    selection: Selection = field(default_factory=Selection)
    """Samples of the task that are audited."""

    samples: int = SAMPLES
    """Number of samples for the expensive probes."""

    wide: int | None = None
    """Samples that are played once with and once without the answer; `WIDE` if not given."""

    reward: RewardSpec = "mean"
    """How scores become a reward."""

    gold: str | None = None
    """Field of the metadata, or shell script, with the right answer; the target if not given."""

    budget: Sequence[str] = DEFAULT_BUDGET
    """Episodes (``200``), seconds (``90s``) or minutes (``10m``) of one run."""

    parallel: int = 4
    """Episodes at once."""

    prompt_tokens: int | None = None
    """Maximum tokens of a prompt."""

    slow_scoring: float = SLOW_SCORING
    """Seconds that scoring one episode may usually take; one policy's may take three times as
    long."""

    group_size: int = 8
    """Episodes per group, for the cost plan."""

    prices: Mapping[str, float] | None = None
    """Prices, see `plan.PRICES`."""

    attempts: Sequence[ModelAttempt] = ()
    """Attempts of a real model."""

    test_samples: Sequence[Sample] = ()
    """Samples of the test task."""

    runner_options: Mapping[str, Any] = field(default_factory=dict)
    """Keyword arguments of `EpisodeRunner`: solver, sandbox …"""

    episode_options: Mapping[str, Any] = field(default_factory=dict)
    """Fields of `EpisodeOptions`: model_roles, max_sandboxes …"""

    def gold_of(self, sample: Sample) -> str | None:
        """Return the answer that ``gold`` names; ``None`` if that is the target."""
        return Gold(self.gold).of(sample)


def read_budget(parts: Sequence[str]) -> Budget:
    """Read the values of ``--budget``.

    Raises:
        ConfigError: It is neither a number of episodes nor a time.
    """
    budget = Budget()
    for part in parts:
        match = re.fullmatch(r"(\d+(?:\.\d+)?)\s*(s|m|min|minutes?|h)?", part.strip())
        if match is None or float(match[1]) <= 0:
            raise ConfigError(
                f"a budget is a number of episodes (200) or a time (90s, 10m, 1h), not {part!r}"
            )
        number, unit = float(match[1]), match[2]
        if unit is None:
            budget.episodes = int(number)
        else:
            budget.seconds = number * {"s": 1, "m": 60, "h": 3600}[unit[0]]
    return budget
