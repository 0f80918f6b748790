"""Plans a training run and its cost: everything is checked, but no server or step is started."""

from __future__ import annotations

import asyncio
import tempfile
import time
from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from inspect_ai.model import ModelOutput

from inspect_tinker_plugin.contracts.episodes import EpisodeResult, TurnRequest
from inspect_tinker_plugin.contracts.policy import TOKENIZER_FOLDER
from inspect_tinker_plugin.contracts.wording import counted
from inspect_tinker_plugin.episode.runner import Episode, EpisodeRunner
from inspect_tinker_plugin.options import EpisodeOptions, Selection
from inspect_tinker_plugin.rl.hooks import with_plugin_scorers
from inspect_tinker_plugin.rl.mixture import MixedTask
from inspect_tinker_plugin.tasks.reference import resolve_task
from inspect_tinker_plugin.tasks.samples import select_samples
from inspect_tinker_plugin.tasks.sandboxes import choose_sandbox
from inspect_tinker_plugin.train.config import FILE, build_config, check_same_run, has_begun
from inspect_tinker_plugin.train.costs import EpisodeCost, average, plan_lines, plan_of
from inspect_tinker_plugin.train.imitation import WarmStart
from inspect_tinker_plugin.train.request import TrainRequest, check_request, missing_key

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


async def _cost(request: TrainRequest, task: MixedTask) -> EpisodeCost | None:
    """Return the mean cost of a few scripted episodes; ``None`` if none can be played."""
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
    return average(known, [1.0] * len(known)) if known else None


async def _play(episode: Episode) -> EpisodeCost | None:
    """Play an episode, and estimate its tokens: four characters each."""
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
    log = outcome.build_log() if outcome.build_log is not None else None
    others = {} if log is None else log.model_usage
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
    for tool in request.tools:
        if tool.name == "submit" and len(tool.parameters.properties) == 1:
            arguments = {name: answer for name in tool.parameters.properties}
            return ModelOutput.for_tool_call("script", tool.name, arguments, content="")
    return ModelOutput.from_content("script", f"ANSWER: {answer}")
