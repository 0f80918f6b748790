"""Plans a training run and its cost, from a few scripted episodes; nothing is started.

A cost is tokens, sandbox seconds, and money where prices are known.
"""

from __future__ import annotations

import asyncio
import math
import tempfile
import time
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from inspect_tinker_plugin.contracts.errors import ConfigError
from inspect_tinker_plugin.contracts.policy import TOKENIZER_FOLDER
from inspect_tinker_plugin.contracts.wording import counted
from inspect_tinker_plugin.options import EpisodeOptions, Selection
from inspect_tinker_plugin.train.request import TrainRequest, check_request, missing_key

if TYPE_CHECKING:
    from inspect_ai.model import ModelOutput

    from inspect_tinker_plugin.contracts.episodes import TurnRequest
    from inspect_tinker_plugin.episode.runner import Episode
    from inspect_tinker_plugin.rl.mixture import MixedTask

PRICES = ("prefill", "cached", "sample", "train", "sandbox_hour")
"""Keys of a price file: money per million tokens of each kind, and per hour of a sandbox."""


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


def add_costs(costs: Sequence[EpisodeCost], factors: Sequence[float]) -> EpisodeCost:
    """Return the sum of costs, each times its factor."""
    rows = [asdict(cost) for cost in costs]
    sums = {
        name: sum(row[name] * factor for row, factor in zip(rows, factors, strict=True))
        for name in rows[0]
        if name != "exact"
    }
    return EpisodeCost(**sums, exact=all(cost.exact for cost in costs))


def average_costs(costs: Sequence[EpisodeCost], weights: Sequence[float]) -> EpisodeCost:
    """Return the cost of an episode of several tasks, whose episodes are as frequent as weights."""
    return add_costs(costs, [weight / sum(weights) for weight in weights])


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


def _price(cost: EpisodeCost, prices: Mapping[str, float]) -> float:
    """Return a cost in money; kinds without a price cost nothing."""
    tokens = (cost.prefilled, cost.cached, cost.sampled, cost.trained)
    paid = sum(prices.get(kind, 0.0) * n / 1e6 for kind, n in zip(PRICES, tokens, strict=False))
    return paid + prices.get("sandbox_hour", 0.0) * cost.sandbox_seconds / 3600


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
    whole = add_costs([cost], [episodes])
    plan: dict[str, Any] = {
        "samples": samples,
        "group_size": group_size,
        "epochs": epochs,
        "episodes": episodes,
        "exact": cost.exact,
        "per_episode": _rounded(cost),
        "in_all": _rounded(whole),
    }
    if prices:
        plan["money_per_episode"] = round(_price(cost, prices), 6)
        plan["money_in_all"] = round(_price(whole, prices), 2)
    return plan


def _rounded(cost: EpisodeCost) -> dict[str, float]:
    return {name: round(value, 1) for name, value in asdict(cost).items() if name != "exact"}


def plan_lines(plan: Mapping[str, Any]) -> list[str]:
    """Return a plan as lines of text."""
    one, whole = plan["per_episode"], plan["in_all"]
    kind = "counted" if plan["exact"] else "estimated from characters"
    lines = [
        f"{counted(plan['samples'], 'sample')} x {plan['group_size']} x "
        f"{counted(plan['epochs'], 'epoch')} = {counted(plan['episodes'], 'episode')} "
        f"(tokens {kind})",
        f"{'':<18}{'per episode':>14}{'in all':>16}",
    ]
    for name, label in (
        ("turns", "turns"),
        ("prefilled", "tokens prefilled"),
        ("cached", "tokens cached"),
        ("sampled", "tokens sampled"),
        ("trained", "tokens trained"),
        ("judge_tokens", "judge tokens"),
        ("sandbox_seconds", "sandbox seconds"),
        ("seconds", "seconds"),
    ):
        lines.append(f"{label:<18}{one[name]:>14,.1f}{whole[name]:>16,.0f}")
    if "money_in_all" in plan:
        lines.append(
            f"{'money':<18}{plan['money_per_episode']:>14,.4f}{plan['money_in_all']:>16,.2f}"
        )
    return lines


_SAMPLES = 4
"""Samples of a task that are played once each."""
_SELECTING = ("limit", "sample_id", "sample_ids", "sample_shuffle")
_TURNS = 16
_SECONDS = 120.0
"""Turns and seconds after which a script gives an episode up."""
_OF_EPISODES = ("model_roles", "max_sandboxes", "max_subprocesses")


@dataclass(frozen=True)
class DryRun:
    """The plan of a training run."""

    lines: list[str]
    """What to show: the run, and the plan of its costs."""

    problem: str | None
    """What is missing to start it; everything else was checked."""


def dry_run(request: TrainRequest, prices: Mapping[str, float] | None = None) -> DryRun:
    """Check a request, play a few scripted episodes of its task, and plan the whole run.

    Raises:
        ConfigError: An option cannot be used.
    """
    from inspect_tinker_plugin.train.config import FILE, build_config, check_same_run, has_begun
    from inspect_tinker_plugin.train.imitation import WarmStart

    check_request(request, key=False)
    with tempfile.TemporaryDirectory(prefix="inspect-rl-dry-run-") as folder:
        local = request.local and request.model is None
        model = str(request.model)
        if local:
            from tinker_local import make_tiny_model

            model = str(make_tiny_model(Path(folder) / "model", tokenizer=TOKENIZER_FOLDER))
        log_dir = request.log_dir.expanduser().absolute()
        if has_begun(log_dir) and (log_dir / FILE).exists():  # else it would be written there
            config = build_config(replace(request, log_dir=log_dir), model=model)
            check_same_run(log_dir, config)
        config = build_config(replace(request, log_dir=Path(folder) / "run"), model=model)
        batches = config.dataset_builder.check()
        if request.warm_start is not None:
            WarmStart.of(request.warm_start, config, epochs=request.warm_epochs)
        tasks = config.dataset_builder.mixed_tasks()
        costs = [asyncio.run(_cost(request, each)) for each in tasks]
        known = [cost for cost in costs if cost is not None]
        weights = [each.share for each in tasks]
        cost = average_costs(known, weights) if len(known) == len(tasks) else None
    steps = batches if config.max_steps is None else min(config.max_steps, batches)
    builder = config.dataset_builder
    lines = [
        f"{counted(steps, 'step')} of {counted(builder.batch_size, 'group')} of "
        f"{counted(builder.group_size, 'episode')}, replies of at most "
        f"{counted(config.max_tokens, 'token')}, learning rate {config.learning_rate:g}",
        *_planned(cost, steps, builder, prices, config.max_tokens),
    ]
    return DryRun(lines, missing_key(request))


def _planned(
    cost: EpisodeCost | None,
    steps: int,
    builder: Any,
    prices: Mapping[str, float] | None,
    max_tokens: int,
) -> list[str]:
    if cost is None:
        return ["no scripted episode of a task could be played, so the cost is not known"]
    # A real model writes more than a script: the plan assumes replies of maximum length.
    sampled = cost.turns * max_tokens
    longest = replace(
        cost,
        sampled=max(cost.sampled, sampled),
        trained=max(cost.trained, cost.prefilled + sampled),
    )
    plan = plan_of(
        longest,
        samples=steps * builder.batch_size,
        group_size=builder.group_size,
        prices=prices,
    )
    return ["", "with every reply at its longest:", *plan_lines(plan)]


async def _cost(request: TrainRequest, task: MixedTask) -> EpisodeCost | None:
    """Return the mean cost of a few scripted episodes; ``None`` if none can be played."""
    from inspect_tinker_plugin.episode.runner import EpisodeRunner
    from inspect_tinker_plugin.rl.hooks import with_plugin_scorers
    from inspect_tinker_plugin.tasks.reference import resolve_task
    from inspect_tinker_plugin.tasks.samples import select_samples
    from inspect_tinker_plugin.tasks.sandboxes import choose_sandbox

    options = dict(request.options)
    sandbox = choose_sandbox(options.get("sandbox"))
    live = resolve_task(task.task, task.task_args).task
    chosen = {name: options[name] for name in _SELECTING if options.get(name) is not None}
    samples = select_samples(live, Selection(**chosen))
    episode = {name: options[name] for name in _OF_EPISODES if options.get(name) is not None}
    runner = EpisodeRunner(
        with_plugin_scorers(live),
        options=EpisodeOptions(**episode),
        solver=options.get("solver"),
        sandbox=sandbox.for_inspect,
        sandbox_mapping=sandbox.mapping,
        keep_log=True,
    )
    step = max(1, len(samples) // _SAMPLES)
    some = [samples[n] for n in range(0, len(samples), step)][:_SAMPLES]
    costs = await asyncio.gather(*(_play(runner.episode(sample)) for sample in some))
    known = [cost for cost in costs if cost is not None]
    return average_costs(known, [1.0] * len(known)) if known else None


async def _play(episode: Episode) -> EpisodeCost | None:
    """Play an episode, and estimate its tokens: four characters each."""
    from inspect_tinker_plugin.contracts.episodes import EpisodeResult, TurnRequest

    target = episode.sample.target
    answer = target if isinstance(target, str) else ", ".join(target)
    started = time.perf_counter()
    prompts: list[int] = []
    sampled = boxes = 0
    try:
        async with asyncio.timeout(_SECONDS):
            outcome = await episode.start()
            while isinstance(outcome, TurnRequest):
                boxes = len(episode.sandboxes)
                if len(prompts) == _TURNS:
                    outcome = await episode.stop("the script has nothing more to say")
                    break
                prompts.append(sum(len(each.text) for each in outcome.messages) // 4 + 1)
                reply = _reply(answer, outcome)
                sampled += len(answer) // 4 + 1
                outcome = await episode.reply(reply)
    except TimeoutError:
        return None
    finally:
        await episode.close()
    if not prompts or not isinstance(outcome, EpisodeResult):
        return None
    seconds = time.perf_counter() - started
    cached = sum(prompts[:-1])  # each prompt begins with the one before
    others = {} if outcome.build_log is None else outcome.build_log().model_usage
    return EpisodeCost(
        turns=len(prompts),
        prefilled=sum(prompts) - cached,
        cached=cached,
        sampled=sampled,
        trained=prompts[-1] + sampled,
        sandbox_seconds=seconds if boxes else 0.0,
        seconds=seconds,
        judge_tokens=sum(
            u.total_tokens for name, u in others.items() if not name.startswith("rl/")
        ),
    )


def _reply(answer: str, request: TurnRequest) -> ModelOutput:
    """Answer through the tool ``submit`` if there is one."""
    from inspect_ai.model import ModelOutput

    for tool in request.tools:
        if tool.name == "submit" and len(tool.parameters.properties) == 1:
            arguments = {name: answer for name in tool.parameters.properties}
            return ModelOutput.for_tool_call("script", tool.name, arguments, content="")
    return ModelOutput.from_content("script", f"ANSWER: {answer}")
