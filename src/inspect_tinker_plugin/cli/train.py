"""``inspect rl train``: trains a model on a task, with the cookbook's own loop."""

from __future__ import annotations

import sys
from datetime import datetime
from pathlib import Path
from typing import Any

import click

from inspect_tinker_plugin.cli.options import (
    dataset_choices,
    dataset_options,
    mixed_task_options,
    parse_args,
    price_option,
    split_tasks,
    test_task_options,
)
from inspect_tinker_plugin.cli.reporting import EXIT_INTERRUPTED, reported

_COUNT = click.IntRange(1)


@click.command("train")
@mixed_task_options
@click.option("--model", metavar="NAME", help="Model to train (with --local, a model folder).")
@click.option("--renderer", metavar="NAME", help="Renderer, if not the model's own.")
@click.option(
    "--local",
    is_flag=True,
    help="Train on this machine's CPU, with a local server and, without --model, a tiny "
    "random model: to try things out, without a key.",
)
@click.option("--base-url", metavar="URL", help="Tinker API server, if not the hosted one.")
@click.option(
    "--log-dir",
    type=click.Path(path_type=Path),
    metavar="DIR",
    help="Folder of the run; one with an interrupted run continues it. By default a new one in "
    "./logs.",
)
@click.option(
    "--steps",
    type=_COUNT,
    help="Training steps; one pass over the samples if not given (15 with --local).",
)
@dataset_options(
    "train",
    hints={"batch_size": "8; 2 with --local", "group_size": "8; 16 with --local"},
    batch_size=None,
    group_size=None,
    shuffle=True,
)
@click.option("--learning-rate", type=float, help="By default the cookbook's for the model.")
@click.option("--lora-rank", type=_COUNT, help="Rank of the adapter (32; 16 with --local).")
@click.option("--max-tokens", type=_COUNT, help="Tokens per reply (1024; 16 with --local).")
@click.option(
    "--save-every", type=click.IntRange(0), help="Steps between checkpoints (10; 5 with --local)."
)
@click.option(
    "--eval-every",
    type=click.IntRange(0),
    help="Steps between measurements on the test set (10; 5 with --local).",
)
@test_task_options("Measure the reward on this task during training.")
@click.option(
    "--test-split",
    metavar="SHARE",
    help="Hold out a part of TASK instead: 0.1, 10% or a number of samples.",
)
@click.option("--test-samples", type=_COUNT, help="Use only this many test samples.")
@click.option("--allow-overlap", is_flag=True, help="Allow test samples that are also trained on.")
@click.option(
    "--warm-start",
    metavar="DIR",
    help="First imitate an export of logs (`inspect rl export --from-logs`, layout chat or "
    "tinker), then train.",
)
@click.option(
    "--warm-epochs", type=_COUNT, default=1, show_default=True, help="Passes over that export."
)
@click.option("--workers", type=_COUNT, metavar="N", help="Roll out in N processes.")
@click.option(
    "--ray",
    is_flag=False,
    flag_value="",
    default=None,
    metavar="[ADDRESS]",
    help="Roll out on a Ray cluster, or on one that is started here.",
)
@click.option(
    "--dry-run",
    is_flag=True,
    help="Check everything that can be checked without a server, print what the run would do and "
    "cost, and stop.",
)
@price_option("Prices for --dry-run, as for `inspect rl audit`.")
@click.option("--verbose", is_flag=True, help="Show the cookbook's own output, too.")
@reported
def train_command(**choices: Any) -> None:
    """Train a model on TASK by reinforcement learning, or on several tasks at once.

    TASK is a registered name (package/task) or a file (file.py@task), as for `inspect eval`.
    Of several tasks each batch has groups, in the shares of --mix. Options about samples apply to
    each task; -T NAME.KEY=VALUE and --sample-id NAME:ID are for the task NAME only.

    The loop is the Tinker cookbook's; KEY=VALUE arguments set any of its options
    (rl.train.Config), e.g. kl_penalty_coef=0.01, num_substeps=2 or, for its asynchronous
    mode, async_config.max_steps_off_policy=2 async_config.groups_per_batch=4.

    The folder of a run gets the cookbook's metrics and checkpoints, one .eval log per batch
    (rollouts/train, rollouts/test) and report.html. The same command on the same folder
    continues an interrupted run from its last checkpoint.
    """
    from inspect_tinker_plugin.train.request import TrainRequest

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
        **{name: options.pop(name) for name in ("batch_size", "group_size", "epochs")},
        options=options,
        **choices,
    )
    if planned:
        _dry_run(request, price)
    else:
        _train(request)


def _dry_run(request: Any, price: Path | None) -> None:
    from inspect_tinker_plugin.train.plan import dry_run, read_prices

    result = dry_run(request, read_prices(price) if price is not None else None)
    for line in result.lines:
        click.echo(line)
    if result.problem is not None:
        raise click.ClickException(f"the run cannot start: {result.problem}")


def _train(request: Any) -> None:
    # Printed before the imports, which take seconds.
    from inspect_tinker_plugin.train.request import check_request

    check_request(request)
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


def _new_folder(task: str) -> Path:
    name = task.rpartition("@")[2].rpartition("/")[2]
    return Path("logs") / f"{datetime.now():%Y-%m-%dT%H-%M-%S}_train_{name}"
