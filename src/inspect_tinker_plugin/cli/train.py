"""``inspect rl train``, and what shows a run: ``watch``, and ``overlap`` with an eval's task."""

from __future__ import annotations

import asyncio
import json
import re
import sys
import tempfile
import time
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import replace
from datetime import datetime
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from inspect_tinker_plugin.cli.options import (
    Number,
    dataset_choices,
    dataset_options,
    field_options,
    load_task,
    parse_args,
    price_option,
    task_arguments,
    task_options,
    test_task_options,
)
from inspect_tinker_plugin.cli.reporting import (
    EXIT_INTERRUPTED,
    EXIT_PARTIAL,
    quiet_stdout,
    reported,
)
from inspect_tinker_plugin.contracts.errors import ConfigError
from inspect_tinker_plugin.contracts.wording import counted
from inspect_tinker_plugin.processes import local_path
from inspect_tinker_plugin.processes.workers import run_in_loop
from inspect_tinker_plugin.train.request import TrainRequest

if TYPE_CHECKING:
    from inspect_ai.dataset import Sample
    from rich.console import RenderableType
    from tinker_cookbook.completers import TokenCompleter
    from tinker_cookbook.renderers import Renderer

    from inspect_tinker_plugin.rl.env import InspectEnv
    from inspect_tinker_plugin.rl.group import InspectGroupBuilder
    from inspect_tinker_plugin.rl.mixture import MixedTask
    from inspect_tinker_plugin.train import EpisodeCost

_WRITTEN: dict[str, dict[str, Any]] = {
    "model": {"metavar": "NAME"},
    "renderer": {"metavar": "NAME"},
    "base_url": {"metavar": "URL"},
    "learning_rate": {"type": float},
    "save_every": {"type": click.IntRange(0)},
    "eval_every": {"type": click.IntRange(0)},
    "test_split": {"metavar": "SHARE"},
    "eval_task": {"multiple": True, "default": (), "metavar": "TASK"},
    "warm_start": {"metavar": "DIR"},
    "teacher": {"metavar": "MODEL"},
    "teacher_weight": {"type": float},
    "teacher_steps": {"type": click.IntRange(1)},
    "scan": {"multiple": True, "default": (), "metavar": "FILE"},
    "scan_model": {"metavar": "NAME"},
    "rollout_timeout": {"type": Number(0), "metavar": "SECONDS"},
    "workers": {"metavar": "N"},
    "ray": {"is_flag": False, "flag_value": "", "metavar": "[ADDRESS]"},
}
"""How options of a run are written if their type does not say it."""

_PAIR = re.compile(r"-*[A-Za-z_][\w.-]*=")
"""How a ``KEY=VALUE`` argument begins."""


def split_tasks(words: Sequence[str]) -> tuple[list[str], list[str]]:
    """Split arguments into tasks and ``KEY=VALUE`` pairs; the first is always a task."""
    pairs = [word for word in words[1:] if _PAIR.match(word)]
    return [word for number, word in enumerate(words) if not number or word not in pairs], pairs


def _parse_shares(
    ctx: click.Context, param: click.Parameter, text: str | None
) -> list[float] | None:
    if text is None:
        return None
    try:
        return [float(share) for share in text.split(",")]
    except ValueError:
        raise click.BadParameter(f"expected numbers such as 5,3,2, not {text!r}.") from None


@click.command("train")
@click.argument("tasks", metavar="TASK... [KEY=VALUE]...", nargs=-1, required=True)
@task_arguments
@click.option(
    "--mix",
    metavar="SHARES",
    callback=_parse_shares,
    help="Shares of several tasks in each batch, e.g. 5,3,2 (equal ones by default).",
)
@click.option(
    "--log-dir",
    type=click.Path(path_type=Path),
    metavar="DIR",
    help="Folder of the run; one with an interrupted run continues it. By default a new one in "
    "./logs.",
)
@field_options(TrainRequest, written=_WRITTEN)
@click.option(
    "--eval-arg",
    "eval_args",
    multiple=True,
    metavar="KEY=VALUE",
    help="Arguments of the tasks to evaluate.",
)
@test_task_options("Measure the reward on this task during training.")
@dataset_options(
    "train",
    hints={"batch_size": "8; 2 with --local", "group_size": "8; 16 with --local"},
    batch_size=None,
    group_size=None,
    shuffle=True,
)
@click.option(
    "--dry-run",
    is_flag=True,
    help="Check everything that can be checked without a server, print what the run would do and "
    "cost, and stop.",
)
@price_option("Prices for --dry-run, as for `inspect rl audit`.")
@reported
def train_command(**choices: Any) -> None:
    """Train a model on TASK by reinforcement learning, or on several tasks at once.

    TASK is a registered name (package/task) or a file (file.py@task), as for `inspect eval`.
    Of several tasks each batch has groups, in the shares of --mix. Options about samples apply to
    each task; -T NAME.KEY=VALUE and --sample-id NAME:ID are for the task NAME only.

    The loop is the Tinker cookbook's; KEY=VALUE arguments set any of its options
    (rl.train.Config), e.g. kl_penalty_coef=0.01, num_substeps=2 or, for its asynchronous
    mode, async_config.max_steps_off_policy=2 async_config.groups_per_batch=8.

    The folder of a run gets the cookbook's metrics and checkpoints, one .eval log per batch
    (rollouts/train, rollouts/test) and report.html. The same command on the same folder
    continues an interrupted run from its last checkpoint.
    """
    tasks, overrides = split_tasks(choices.pop("tasks"))
    planned, price = choices.pop("dry_run"), choices.pop("price")
    if price is not None and not planned:
        raise click.UsageError("--price needs --dry-run.")
    options = dataset_choices("train", choices)
    request = TrainRequest(
        task_args=parse_args(choices.pop("task_args"), choices.pop("task_config")),
        task=tasks[0] if len(tasks) == 1 else tasks,
        overrides=overrides,
        log_dir=choices.pop("log_dir") or _new_folder(tasks[0]),
        test_task_args=parse_args(choices.pop("test_args")),
        eval_args=parse_args(choices.pop("eval_args")),
        **{name: options.pop(name) for name in ("batch_size", "group_size", "epochs")},
        options=options,
        **choices,
    )
    if planned:
        _dry_run(request, price)
    else:
        _train(request)


_SAMPLES = 4
"""Samples of a task that a dry run plays once each."""
_TURNS = 16
_SECONDS = 120.0
"""Turns and seconds after which it gives an episode up."""


def _dry_run(request: TrainRequest, price: Path | None) -> None:
    from inspect_tinker_plugin.train import read_prices
    from inspect_tinker_plugin.train.config import missing_key

    for line in dry_run(request, read_prices(price) if price is not None else None):
        click.echo(line)
    if (problem := missing_key(request)) is not None:
        raise click.ClickException(f"the run cannot start: {problem}")


def dry_run(request: TrainRequest, prices: Mapping[str, float] | None = None) -> list[str]:
    """Check a request, play a few scripted episodes of its tasks, and plan the whole run."""
    from inspect_tinker_plugin.train.config import check_request
    from inspect_tinker_plugin.train.request import (
        average_costs,
        plan_lines,
        plan_of,
        published_prices,
    )
    from inspect_tinker_plugin.train.run import plan_run

    check_request(request, key=False)
    request = replace(request, log_dir=local_path(request.log_dir).absolute())
    with tempfile.TemporaryDirectory(prefix="inspect-rl-dry-run-") as folder:
        begun = (request.log_dir / "tiny-model").is_dir()
        run = plan_run(request, models=request.log_dir if begun else Path(folder))
        config, steps = run.config, run.steps
        data = config.dataset_builder
        tasks = data.mixed_tasks()
        costs = [
            _play_task(task, config, Path(folder) / f"task-{number}")
            for number, task in enumerate(tasks)
        ]
    lines = [
        f"{counted(steps, 'step')} of {counted(run.passes.largest, 'group')} of "
        f"{counted(data.group_size, 'episode')}, replies of at most "
        f"{counted(config.max_tokens, 'token')}, learning rate {config.learning_rate:g}"
    ]
    known = [cost for cost in costs if cost is not None]
    if len(known) < len(tasks):
        return [*lines, "no scripted episode of a task could be played: the cost is not known"]
    cost = average_costs(known, [task.share for task in tasks])
    if prices is None and not request.local:
        prices = published_prices(config.model_name)
    plan = plan_of(
        cost,
        samples=run.passes.count_groups(steps),
        group_size=data.group_size,
        prices=prices,
    )
    return [*lines, "", "with every reply at its longest:", *plan_lines(plan)]


def _play_task(task: MixedTask, config: Any, folder: Path) -> EpisodeCost | None:
    """Return the mean cost of a few scripted episodes; ``None`` if none can be played."""
    from inspect_ai.log import read_eval_log

    from inspect_tinker_plugin.logs import assemble_pending
    from inspect_tinker_plugin.rl.dataset import build_dataset
    from inspect_tinker_plugin.train.request import average_costs, cost_of

    data = config.dataset_builder
    options = replace(
        data.dataset_options(**task.options),
        batch_size=_SAMPLES,
        group_size=1,
        group_reward=None,
        sampler=None,
        sampler_logs=None,
        max_turns=_TURNS,
        log_dir=folder,
    )
    renderer = data.renderer()
    dataset = build_dataset(task.task, renderer, options, task_args=task.task_args)
    run_in_loop(_answer(dataset.get_batch(0), renderer, config.max_tokens))
    assemble_pending(folder)
    logs = [read_eval_log(str(path)) for path in folder.glob("**/*.eval")]
    costs = [cost_of(sample, log.eval.model) for log in logs for sample in log.samples or []]
    known = [_lengthen(cost, config.max_tokens) for cost in costs if cost.turns]
    return average_costs(known, [1.0] * len(known)) if known else None


def _lengthen(cost: EpisodeCost, max_tokens: int) -> EpisodeCost:
    """Return the cost with every reply at its longest: a real model writes more than a script."""
    longer = max(0.0, cost.turns * max_tokens - cost.sampled)
    return replace(
        cost,
        sampled=cost.sampled + longer,
        trained=cost.trained + longer,
        cached=cost.cached + longer * (cost.turns - 1) / 2,  # each is a part of all later prompts
    )


async def _answer(
    builders: Sequence[InspectGroupBuilder], renderer: Renderer, max_tokens: int
) -> None:
    from inspect_tinker_plugin.cli.rollout import roll_groups, scripted_policy
    from inspect_tinker_plugin.testing.replies import answer_with, target_of

    def policy_for(env: InspectEnv, sample: Sample, position: int) -> TokenCompleter:
        return scripted_policy(env, renderer, answer_with(target_of(sample)), max_tokens=max_tokens)

    with suppress(TimeoutError):
        async with asyncio.timeout(_SECONDS):
            await roll_groups(builders, policy_for, lambda failed: None)


def _train(request: TrainRequest) -> None:
    from inspect_tinker_plugin.train.history import last_checkpoint
    from inspect_tinker_plugin.train.progress import reward_curve
    from inspect_tinker_plugin.train.run import InterruptedRun, train

    try:
        result = train(request)
    except InterruptedRun:
        step = last_checkpoint(request.log_dir)
        goes_on = (
            "starts again, since there is no checkpoint yet (--save-every)"
            if step is None
            else f"continues from the checkpoint of step {step}"
        )
        click.echo(
            f"interrupted; the same command with --log-dir {request.log_dir} {goes_on}", err=True
        )
        sys.exit(EXIT_INTERRUPTED)
    curve = reward_curve(request.log_dir)
    if curve:
        click.echo(f"\n{curve}\n")
    click.echo(f"report: {result.report}")
    if result.try_it is not None:
        click.echo(f"checkpoint: {result.checkpoint}\ntry it: {result.try_it}")
        click.echo(f"evaluate it: {result.evaluate_it}")


def _new_folder(task: str) -> Path:
    name = task.rpartition("@")[2].rpartition("/")[2]
    return Path("logs") / f"{datetime.now():%Y-%m-%dT%H-%M-%S}_train_{name}"


_PERIOD = 2.0
"""Seconds between two looks at the files."""


@click.command("watch")
@click.argument("run", type=click.Path(path_type=Path), metavar="RUN")
@click.option("--once", is_flag=True, help="Print the state of now, and end.")
@reported
def watch_command(run: Path, once: bool) -> None:
    """Show a run while it trains: its last steps, its current rollouts, and the last rewards.

    RUN is the folder of `inspect rl train`. All comes from its files, so the run is not disturbed,
    and any number of people can watch. It ends with the training, or with Ctrl-C.
    """
    from rich.console import Console
    from rich.live import Live

    from inspect_tinker_plugin.train.history import RUN
    from inspect_tinker_plugin.train.progress import read_state, show_state

    run = local_path(run)
    if not (run / RUN).is_file():
        raise ConfigError(f"{run} is not the folder of a run of `inspect rl train`")
    console = Console()
    state = read_state(run)
    if once or not state.trained:
        console.print(show_state(state, rows=1000))
        return

    def fitted() -> RenderableType:
        """Draw it no longer than the terminal, which may have changed."""
        return show_state(state, rows=max(2, (console.height - 20) // 2))

    with Live(fitted(), console=console, auto_refresh=False) as live:
        while state.trained:
            time.sleep(_PERIOD)
            state = read_state(run)
            live.update(fitted(), refresh=True)


@click.command("overlap")
@click.argument("run", metavar="RUN")
@task_options
@click.option("--json", "as_json", is_flag=True, help="Print JSON for other programs.")
@reported
def overlap_command(run: str, as_json: bool, **choices: Any) -> None:
    """List the samples of TASK that a run was trained on.

    RUN is the folder of a run, or RUN@STEP for its weights after that many steps, as in `inspect
    eval TASK --model tinker/RUN@STEP`. Samples are compared by input, choices (in whatever order),
    target, files and setup script; what was imitated counts as well. Exit codes: 0 no sample of the
    task was trained on, 3 some were.
    """
    from inspect_tinker_plugin.evaluate.overlap import read_trained, was_trained_on
    from inspect_tinker_plugin.evaluate.source import find_source
    from inspect_tinker_plugin.tasks.samples import with_id

    source = find_source(run, has_key=True)
    if source.run is None:
        raise ConfigError(f"{run} is not the folder of a run of `inspect rl train`")
    trained = read_trained(source.run, source.step)
    with quiet_stdout():
        task = load_task(choices).task
        found = [
            with_id(each, position).id
            for position, each in enumerate(task.dataset)
            if was_trained_on(each, trained)
        ]
    name, total = task.name, len(task.dataset)
    if as_json:
        about = {"run": str(source.run), "step": source.step, "task": name, "samples": total}
        click.echo(json.dumps({**about, "trained_on": len(found), "ids": found}))
    else:
        for each in found:
            click.echo(each)
        after = f"{source.run} was trained on until step {source.step}"
        click.echo(
            f"{len(found)} of {counted(total, 'sample')} of {name} are among those that {after}",
            err=True,
        )
    sys.exit(EXIT_PARTIAL if found else 0)
