"""Plans a training run and its cost: everything is checked, but no server or step is started."""

from __future__ import annotations

import asyncio
import tempfile
from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from inspect_rl_audit import AuditOptions, run_audit
from inspect_rl_audit.plan import EpisodeCost, average, plan_lines, plan_of
from inspect_tinker_plugin.contracts.policy import TOKENIZER_FOLDER
from inspect_tinker_plugin.contracts.wording import counted
from inspect_tinker_plugin.rl.mixture import MixedTask
from inspect_tinker_plugin.tasks.reference import resolve_task
from inspect_tinker_plugin.tasks.sandboxes import resolve_sandbox
from inspect_tinker_plugin.tasks.selection import Selection
from inspect_tinker_plugin.train.config import FILE, build_config, check_same_run, has_begun
from inspect_tinker_plugin.train.request import TrainRequest, check_request, missing_key
from inspect_tinker_plugin.train.warm_start import WarmStart

_SAMPLES = 4
_SELECTING = ("limit", "sample_id", "sample_ids", "sample_shuffle")
_BUDGET = ("40", "2m")
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
        costs = [
            asyncio.run(_cost(request, each, Path(folder) / f"audit-{number}"))
            for number, each in enumerate(tasks)
        ]
        known = [cost for cost in costs if cost is not None]
        weights = [each.share for each in tasks]
        cost = average(known, weights) if len(known) == len(tasks) else None
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


async def _cost(request: TrainRequest, task: MixedTask, folder: Path) -> EpisodeCost | None:
    """Return the cost of an episode, from a few scripted ones with and without the right answer."""
    options = dict(request.options)
    mapping = resolve_sandbox(options.get("sandbox"))
    runner = {
        "solver": options.get("solver"),
        "sandbox": options.get("sandbox") if mapping is None else None,
        "sandbox_mapping": mapping,
    }
    episode = {name: options.get(name) for name in _OF_EPISODES}
    report = await run_audit(
        resolve_task(task.task, task.task_args).task,
        AuditOptions(
            out=folder,
            probes=["cost"],
            samples=_SAMPLES,
            wide=_SAMPLES,
            budget=_BUDGET,
            selection=Selection(
                **{name: options[name] for name in _SELECTING if options.get(name) is not None}
            ),
            runner_options={name: value for name, value in runner.items() if value is not None},
            episode_options={name: value for name, value in episode.items() if value is not None},
        ),
    )
    known = report.summary.get("cost")
    return None if known is None else EpisodeCost(**known["per_episode"], exact=known["exact"])
