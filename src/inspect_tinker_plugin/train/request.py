"""A training run: the request, whose fields are options of ``inspect rl train``, and its cost."""

from __future__ import annotations

import math
import sys
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from functools import partial
from importlib import import_module
from pathlib import Path
from typing import TYPE_CHECKING, Any

from inspect_tinker_plugin.contracts.errors import ConfigError
from inspect_tinker_plugin.contracts.wording import counted
from inspect_tinker_plugin.options import option

if TYPE_CHECKING:
    from inspect_ai.log import EvalSample


@dataclass(frozen=True, kw_only=True)
class TrainRequest:
    """A training run. Options that are ``None`` take the default of where the model runs."""

    task: str | Sequence[str]
    """Registered name (``pkg/task``) or file (``file.py@task``); several are mixed."""
    log_dir: Path
    """Folder of the run; one that holds an interrupted run continues it."""
    mix: Sequence[float] | None = None
    """Shares of several tasks, in their order; equal ones when ``None``."""
    task_args: Mapping[str, Any] = field(default_factory=dict)
    """Arguments of the task; of several tasks each gets all, but ``NAME.KEY`` only task NAME."""
    model: str | None = option(None, "Model to train (with --local, a model folder).")
    renderer: str | None = option(None, "Renderer, if not the model's own.")
    local: bool = option(
        False,
        "Train on this machine's CPU, with a local server and, without --model, a tiny random "
        "model: to try things out, without a key.",
    )
    base_url: str | None = option(None, "Tinker API server, if not the hosted one.")
    steps: int | None = option(
        None, "Training steps; one pass over the samples if not given (15 with --local)."
    )
    batch_size: int | None = None
    """Groups per step."""
    group_size: int | None = None
    """Episodes per group."""
    epochs: int = 1
    """Passes over the samples."""
    options: Mapping[str, Any] = field(default_factory=dict)
    """Further options of ``as_rl_dataset``, by name: ``limit``, ``seed``, ``reward`` and others."""
    learning_rate: float | None = option(
        None, "Learning rate of Adam; by default the cookbook's for the model."
    )
    lora_rank: int | None = option(None, "Rank of the adapter (32; 16 with --local).")
    max_tokens: int | None = option(None, "Tokens per reply (1024; 16 with --local).")
    save_every: int | None = option(None, "Steps between checkpoints (10; 5 with --local).")
    eval_every: int | None = option(None, "Steps between evaluations (10; 5 with --local).")
    test_task: str | None = None
    """Task of the test set."""
    test_task_args: Mapping[str, Any] = field(default_factory=dict)
    """Arguments of the test task."""
    test_split: str | None = option(
        None, "Hold out a part of TASK instead: 0.1, 10% or a number of samples."
    )
    test_samples: int | None = option(None, "Use only this many test samples.")
    allow_overlap: bool = option(False, "Allow test samples that are also trained on.")
    eval_task: Sequence[str] = option(
        (), "Evaluate this task every --eval-every steps, as `inspect eval` does; may be repeated."
    )
    eval_args: Mapping[str, Any] = field(default_factory=dict)
    """Arguments of these tasks."""
    eval_limit: int | None = option(None, "Evaluate only this many samples of each --eval-task.")
    warm_start: str | None = option(
        None,
        "First imitate an export of logs (`inspect rl export --from-logs`, layout chat or tinker), "
        "then train.",
    )
    warm_epochs: int = option(1, "Passes over that export.")
    teacher: str | None = option(
        None,
        "Learn from a teacher's probabilities of the sampled tokens, beside the reward (on-policy "
        "distillation): a checkpoint (tinker://...), a base model or a run's folder.",
    )
    teacher_weight: float = option(1.0, "Weight of the teacher beside the advantages.")
    teacher_only: bool = option(False, "Learn from the teacher alone; rewards are only measured.")
    teacher_steps: int | None = option(
        None, "Learn from the teacher in the first N steps, and from rewards alone after them."
    )
    scan: Sequence[str] = option(
        (),
        "Scan each batch's rollouts with the scanners of Inspect Scout in this file, beside the "
        "training.",
    )
    scan_limit: int = option(16, "Rollouts per batch that are scanned, chosen at random.")
    scan_tokens: int | None = option(None, "Tokens of all scans together; then they stop.")
    scan_model: str | None = option(None, "Model of scanners that ask one.")
    rollout_timeout: float | None = option(
        None,
        "Seconds after which a rollout is cancelled and run again, up to three per group (3600 in "
        "the asynchronous loop, else never); 0 for never.",
    )
    workers: int | None = option(None, "Roll out in N processes.")
    ray: str | None = option(
        None, "Roll out on a Ray cluster, or on one that is started here (an empty address)."
    )
    overrides: Sequence[str] = ()
    """``key=value`` pairs for the cookbook's ``rl.train.Config``; they override everything else."""
    verbose: bool = option(False, "Show the cookbook's own output, too.")
    say: Callable[[str], None] = field(
        default_factory=lambda: partial(print, file=sys.stdout, flush=True)
    )
    """Shows lines of progress; by default on the stdout of now, also if that is replaced later."""


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


def cost_of(record: EvalSample, model: str) -> EpisodeCost:
    """Return the cost of a logged attempt: a rollout's from its figures, an eval's from its usage.

    Args:
        record: The attempt.
        model: The model of its log; the usage of others is a judge's.
    """
    from inspect_ai.model import ModelUsage

    from inspect_tinker_plugin.contracts.policy import POLICY_MODEL
    from inspect_tinker_plugin.logs import figures

    seen = figures(record)
    own = {name: each for name, each in record.model_usage.items() if name in (model, POLICY_MODEL)}
    others = [each for name, each in record.model_usage.items() if name not in own]
    usage = sum(own.values(), ModelUsage())
    from_cache = usage.input_tokens_cache_read or 0
    prompts = usage.input_tokens + from_cache + (usage.input_tokens_cache_write or 0)
    seconds = record.total_time or 0.0
    turns = seen.get("turns")
    if turns is None:
        turns = sum(message.role == "assistant" for message in record.messages)
    holds_sandbox = "sandbox/acquire_s" in seen.get("metrics", {})
    if tokens := seen.get("tokens"):
        sampled, trained = tokens["sampled"], tokens["trained"]
        read = trained - (sampled - tokens["unseen"])
        cached = max(0, prompts - read)
    else:
        # of prompts that grow evenly from p to n·p, the sum is p·n(n+1)/2 and the last is n·p
        cached = from_cache or (round(prompts * (1 - 2 / (turns + 1))) if turns > 1 else 0)
        read, sampled = prompts - cached, usage.output_tokens
        trained = read + sampled
    return EpisodeCost(
        turns=turns,
        prefilled=read,
        cached=cached,
        sampled=sampled,
        trained=trained,
        sandbox_seconds=seconds if holds_sandbox else 0.0,
        seconds=seconds,
        judge_tokens=sum(each.total_tokens for each in others),
    )


def average_costs(costs: Sequence[EpisodeCost], weights: Sequence[float]) -> EpisodeCost:
    """Return the cost of an episode of several tasks, whose episodes are as frequent as weights."""
    rows = [asdict(cost) for cost in costs]
    means = {
        name: sum(row[name] * weight for row, weight in zip(rows, weights, strict=True))
        / sum(weights)
        for name in _SHOWN
    }
    return EpisodeCost(**means)


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
    prices: Mapping[str, float] | None = None,
) -> dict[str, Any]:
    """Plan the cost of groups of samples, as plain numbers."""
    episodes = samples * group_size
    one = {name: getattr(cost, name) for name in _SHOWN}
    plan: dict[str, Any] = {
        "samples": samples,
        "group_size": group_size,
        "episodes": episodes,
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
    """Return how many episodes a plan has."""
    return (
        f"{counted(plan['samples'], 'sample')} x {plan['group_size']} = "
        f"{counted(plan['episodes'], 'episode')} (tokens counted)"
    )


def plan_lines(plan: Mapping[str, Any]) -> list[str]:
    """Return a plan as lines of text."""
    rows = [("", "per episode", "in all"), *plan_rows(plan)]
    return [plan_title(plan), *(f"{label:<18}{one:>14}{whole:>16}" for label, one, whole in rows)]
