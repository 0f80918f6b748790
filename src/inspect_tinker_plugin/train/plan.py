"""Plans what a run costs: tokens, sandbox seconds, and money where prices are known."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from importlib import import_module
from pathlib import Path
from typing import Any

from inspect_tinker_plugin.contracts.errors import ConfigError
from inspect_tinker_plugin.contracts.wording import counted

_PAID = (
    ("prefill", "prefilled", 1e6),
    ("cached", "cached", 1e6),
    ("sample", "sampled", 1e6),
    ("train", "trained", 1e6),
    ("sandbox_hour", "sandbox_seconds", 3600),
)
"""Kinds of prices, the figures that they are paid for, and how many of these one price buys."""

PRICES = tuple(kind for kind, _, _ in _PAID)
"""Keys of a price file: money per million tokens of each kind, and per hour of a sandbox."""

_SHOWN = {
    "turns": "turns",
    "prefilled": "tokens prefilled",
    "cached": "tokens cached",
    "sampled": "tokens sampled",
    "trained": "tokens trained",
    "judge_tokens": "judge tokens",
    "sandbox_seconds": "sandbox seconds",
    "seconds": "seconds",
}
"""Figures of an episode, and how they are called."""


@dataclass(frozen=True, kw_only=True)
class EpisodeCost:
    """The average cost of one episode."""

    turns: float
    prefilled: float
    """Prompt tokens that are read for the first time: each prompt minus the part read before."""
    cached: float
    """Prompt tokens that earlier turns have read."""
    sampled: float
    trained: float
    """Tokens of the training sequences."""
    sandbox_seconds: float
    seconds: float
    judge_tokens: float = 0.0
    exact: bool = False
    """Whether a real model's tokens were counted; else they are estimated from characters."""


def average_costs(costs: Sequence[EpisodeCost], weights: Sequence[float]) -> EpisodeCost:
    """Return the cost of an episode of several tasks, whose episodes are as frequent as weights."""
    rows = [asdict(cost) for cost in costs]
    means = {
        name: sum(row[name] * weight for row, weight in zip(rows, weights, strict=True))
        / sum(weights)
        for name in _SHOWN
    }
    return EpisodeCost(**means, exact=all(cost.exact for cost in costs))


def read_prices(path: Path) -> dict[str, float]:
    """Read a price file: YAML or JSON with some of `PRICES`.

    Raises:
        ConfigError: It cannot be read, or has other keys or values.
    """
    import yaml

    try:
        given = yaml.safe_load(path.read_text(encoding="utf-8"))
    except (OSError, UnicodeDecodeError, yaml.YAMLError) as error:
        raise ConfigError(f"the price file {path} cannot be read: {error}") from error
    if not isinstance(given, dict) or not given:
        raise ConfigError(f"the price file {path} holds no prices; they are {', '.join(PRICES)}")
    for name, value in given.items():
        if name not in PRICES:
            raise ConfigError(f"{path}: unknown price {name!r}; they are {', '.join(PRICES)}")
        number = isinstance(value, int | float) and not isinstance(value, bool)
        if not number or not 0 <= value < math.inf:
            raise ConfigError(f"{path}: the price {name} = {value!r} is no number of at least 0")
    return {str(name): float(value) for name, value in given.items()}


def published_prices(model: str) -> dict[str, float] | None:
    """Return the prices of a model in Tinker's documentation, which cookbook 0.6 reads."""
    try:
        found = import_module("tinker_cookbook.utils.cost_estimation").fetch_model_pricing(model)
    except ImportError:
        return None
    fields = {
        "prefill": "prefill",
        "cached": "cached_prefill",
        "sample": "sample",
        "train": "train",
    }
    return found and {
        kind: getattr(found, f"{field}_usd_per_million") for kind, field in fields.items()
    }


def plan_of(
    cost: EpisodeCost,
    *,
    samples: int,
    group_size: int,
    epochs: int = 1,
    prices: Mapping[str, float] | None = None,
) -> dict[str, Any]:
    """Plan the cost of passes over a task, as plain numbers."""
    episodes = samples * group_size * epochs
    one = {name: getattr(cost, name) for name in _SHOWN}
    plan: dict[str, Any] = {
        "samples": samples,
        "group_size": group_size,
        "epochs": epochs,
        "episodes": episodes,
        "exact": cost.exact,
        "per_episode": {name: round(value, 1) for name, value in one.items()},
        "in_all": {name: round(value * episodes, 1) for name, value in one.items()},
    }
    if prices:
        money = sum(prices.get(kind, 0.0) * one[name] / unit for kind, name, unit in _PAID)
        plan["money_per_episode"] = round(money, 6)
        plan["money_in_all"] = round(money * episodes, 2)
    return plan


def plan_rows(plan: Mapping[str, Any]) -> list[tuple[str, str, str]]:
    """Return the figures of a plan: what each is, per episode, and in all."""
    one, whole = plan["per_episode"], plan["in_all"]
    rows = [(label, f"{one[name]:,.1f}", f"{whole[name]:,.0f}") for name, label in _SHOWN.items()]
    if "money_in_all" in plan:
        rows.append(("money", f"{plan['money_per_episode']:,.4f}", f"{plan['money_in_all']:,.2f}"))
    return rows


def plan_title(plan: Mapping[str, Any]) -> str:
    """Return how many episodes a plan has, and how their tokens were found."""
    kind = "counted" if plan["exact"] else "estimated from characters"
    return (
        f"{counted(plan['samples'], 'sample')} x {plan['group_size']} x "
        f"{counted(plan['epochs'], 'epoch')} = {counted(plan['episodes'], 'episode')} "
        f"(tokens {kind})"
    )


def plan_lines(plan: Mapping[str, Any]) -> list[str]:
    """Return a plan as lines of text."""
    rows = [("", "per episode", "in all"), *plan_rows(plan)]
    return [plan_title(plan), *(f"{label:<18}{one:>14}{whole:>16}" for label, one, whole in rows)]
