"""``inspect rl train``: train a model on a task, with the cookbook's own loop."""

from __future__ import annotations

import sys
from datetime import datetime
from pathlib import Path
from typing import Any

import click

from inspect_tinker_plugin.cli.options import parse_args, parse_sandbox, task_options
from inspect_tinker_plugin.cli.reporting import EXIT_INTERRUPTED, reported

_COUNT = click.IntRange(1)


@click.command("train")
@task_options
@click.argument("overrides", nargs=-1, metavar="[KEY=VALUE]...")
@click.option("--model", metavar="NAME", help="Model to train (with --local, a model folder).")
@click.option("--renderer", metavar="NAME", help="Renderer, if not the model's own.")
@click.option(
    "--local",
    is_flag=True,
    help="Train on this machine's CPU, with a server of its own and, without --model, a tiny "
    "random model: to try things out, without a key.",
)
@click.option("--base-url", metavar="URL", help="Tinker API server, if not the hosted one.")
@click.option(
    "--log-dir",
    type=click.Path(path_type=Path),
    metavar="DIR",
    help="Folder of the run; one with an interrupted run continues it. A new one in ./logs "
    "without this option.",
)
@click.option(
    "--steps",
    type=_COUNT,
    help="Training steps; one pass over the samples if not given (15 with --local).",
)
@click.option("--batch-size", type=_COUNT, help="Groups a step (8; 2 with --local).")
@click.option(
    "--group-size", type=_COUNT, help="Rollouts a group, all of one sample (8; 16 with --local)."
)
@click.option(
    "--epochs", type=_COUNT, default=1, show_default=True, help="Passes over the samples."
)
@click.option("--limit", type=_COUNT, help="Use only the first so many samples.")
@click.option("--seed", type=int, help="Seed of the order of the samples and of --test-split.")
@click.option("--reward", default="mean", show_default=True, help="How scores become a reward.")
@click.option("--group-reward", metavar="EXPR", help="How a group's rewards are reconsidered.")
@click.option("--tool-executor", metavar="NAME", help="Who carries out tool calls.")
@click.option("--learning-rate", type=float, help="The cookbook's for the model if not given.")
@click.option("--lora-rank", type=_COUNT, help="Rank of the adapter (32; 16 with --local).")
@click.option("--max-tokens", type=_COUNT, help="Tokens of a reply (1024; 16 with --local).")
@click.option("--max-turns", type=_COUNT, help="Model calls an episode may make.")
@click.option("--message-limit", type=_COUNT, help="Messages in a conversation.")
@click.option("--token-limit", type=_COUNT, help="Tokens of an episode.")
@click.option("--time-limit", type=_COUNT, help="Seconds of an episode.")
@click.option("--max-sandboxes", type=_COUNT, help="Sandboxes alive at once in a process.")
@click.option(
    "--save-every", type=click.IntRange(0), help="Steps between checkpoints (10; 5 with --local)."
)
@click.option(
    "--eval-every",
    type=click.IntRange(0),
    help="Steps between measurements on the test set (10; 5 with --local).",
)
@click.option(
    "--test-task", metavar="TASK", help="Measure the reward on this task during training."
)
@click.option(
    "--test-arg",
    "test_args",
    multiple=True,
    metavar="KEY=VALUE",
    help="Arguments of the test task.",
)
@click.option(
    "--test-split",
    metavar="SHARE",
    help="Hold out a part of TASK instead: 0.1, 10% or a number of samples.",
)
@click.option("--test-samples", type=_COUNT, help="Use only the first so many test samples.")
@click.option("--allow-overlap", is_flag=True, help="Allow test samples that are also trained on.")
@click.option("--workers", type=_COUNT, metavar="N", help="Roll out in N processes.")
@click.option(
    "--ray",
    is_flag=False,
    flag_value="",
    default=None,
    metavar="[ADDRESS]",
    help="Roll out on a Ray cluster, or on one that is started here.",
)
@click.option("--verbose", is_flag=True, help="Show what the cookbook prints, too.")
@reported
def train_command(**choices: Any) -> None:
    """Train a model on TASK by reinforcement learning.

    TASK is a registered name (package/task) or a file (file.py@task), as for `inspect eval`.
    The loop is the Tinker cookbook's; KEY=VALUE arguments set any of its options
    (rl.train.Config), e.g. kl_penalty_coef=0.01, num_substeps=2 or, for its asynchronous
    mode, async_config.max_steps_off_policy=2 async_config.groups_per_batch=4.

    The folder of a run gets the cookbook's metrics and checkpoints, an .eval log a batch
    (rollouts/, test/) and report.html. The same command on the same folder continues an
    interrupted run from its last checkpoint.
    """
    from inspect_tinker_plugin.train.request import TrainRequest

    request = TrainRequest(
        task_args=parse_args(choices.pop("task_args"), choices.pop("task_config")),
        log_dir=choices.pop("log_dir") or _new_folder(choices["task"]),
        sandbox=parse_sandbox(choices.pop("sandbox")),
        options=_options(choices),
        test_task_args=parse_args(choices.pop("test_args")),
        **choices,
    )
    _train(request)


def _train(request: Any) -> None:
    # Said before the seconds that the imports take.
    from inspect_tinker_plugin.train.request import check_request

    check_request(request)
    from inspect_tinker_plugin.train.curve import reward_curve
    from inspect_tinker_plugin.train.run import InterruptedRun, train

    try:
        result = train(request)
    except InterruptedRun:
        click.echo(
            f"interrupted; the same command with --log-dir {request.log_dir} goes on from the "
            "last checkpoint",
            err=True,
        )
        sys.exit(EXIT_INTERRUPTED)
    curve = reward_curve(request.log_dir)
    if curve:
        click.echo(f"\n{curve}\n")
    click.echo(f"report: {result.report}")


def _options(choices: dict[str, Any]) -> dict[str, Any]:
    """Take out what goes to ``as_rl_dataset`` under its own name."""
    names = (
        "group_reward",
        "tool_executor",
        "max_turns",
        "message_limit",
        "token_limit",
        "time_limit",
        "max_sandboxes",
    )
    options = {name: choices.pop(name) for name in names}
    roles = parse_args(choices.pop("model_roles"))
    solver, solver_args = choices.pop("solver"), parse_args(choices.pop("solver_args"))
    if solver_args and solver is None:
        raise click.UsageError("-S needs --solver.")
    if solver is not None:
        from inspect_tinker_plugin.task_loading import create_solver

        options["solver"] = create_solver(solver, solver_args)
    return {**options, "model_roles": roles or None}


def _new_folder(task: str) -> Path:
    name = task.rpartition("@")[2].rpartition("/")[2]
    return Path("logs") / f"{datetime.now():%Y-%m-%dT%H-%M-%S}_train_{name}"
