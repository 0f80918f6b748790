"""``inspect rl overlap``: tells which samples of a task a run was trained on."""

from __future__ import annotations

import json
import sys
from typing import Any

import click

from inspect_tinker_plugin.cli.options import load_task, task_options
from inspect_tinker_plugin.cli.reporting import EXIT_PARTIAL, quiet_stdout, reported
from inspect_tinker_plugin.contracts.errors import ConfigError
from inspect_tinker_plugin.contracts.wording import counted


@click.command("overlap")
@click.argument("run", metavar="RUN")
@task_options
@click.option("--json", "as_json", is_flag=True, help="Print JSON for other programs.")
@reported
def overlap_command(run: str, as_json: bool, **choices: Any) -> None:
    """List the samples of TASK that a run was trained on.

    RUN is the folder of a run, or RUN@STEP for its weights after that many steps, as in `inspect
    eval TASK --model tinker/RUN@STEP`. Samples are compared by input, choices, target, files and
    setup script; what was imitated counts as well. Exit codes: 0 no sample of the task was trained
    on, 3 some were.
    """
    from inspect_tinker_plugin.evaluate.overlap import read_trained, was_trained_on
    from inspect_tinker_plugin.evaluate.source import find_source

    source = find_source(run, has_key=True)
    if source.run is None:
        raise ConfigError(f"{run} is not the folder of a run of `inspect rl train`")
    trained = read_trained(source.run, source.step)
    with quiet_stdout():
        task = load_task(choices).task
        found = [each.id for each in task.dataset if was_trained_on(each, trained)]
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
