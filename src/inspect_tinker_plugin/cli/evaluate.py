"""``inspect rl overlap`` and ``serve-model``: what a run has seen, and its model for any client."""

from __future__ import annotations

import asyncio
import json
import sys
from pathlib import Path
from typing import Any

import click

from inspect_tinker_plugin.cli.options import load_task, task_options
from inspect_tinker_plugin.cli.reporting import EXIT_PARTIAL, quiet_stdout, reported
from inspect_tinker_plugin.cli.serve import LOOPBACK, read_token
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


@click.command("serve-model")
@click.argument("run", metavar="RUN")
@click.option("--port", type=click.IntRange(0, 65535), default=8500, show_default=True)
@click.option(
    "--host",
    default=LOOPBACK[0],
    show_default=True,
    help="Address to listen at; any other than this machine's own needs --token-file.",
)
@click.option(
    "--token-file",
    type=click.Path(path_type=Path, exists=True, dir_okay=False),
    help="File with the token that clients send as their API key.",
)
@click.option("--base-url", metavar="URL", help="Tinker API server, if not the run's own.")
@reported
def serve_model_command(run: str, base_url: str | None, **choices: Any) -> None:
    """Serve the model of a run to any client of OpenAI's or Anthropic's API.

    RUN is what `inspect eval --model tinker/RUN` takes: the folder of a run with or without @STEP,
    a checkpoint (tinker://...) or a base model. Prompts, replies, stop reasons and usage are those
    of an eval. It answers /v1/chat/completions, /v1/responses, /v1/messages and /v1/models.
    """
    from inspect_ai.model import get_model

    from inspect_tinker_plugin import inspect_internals as internals
    from inspect_tinker_plugin.evaluate.serving import serve_model

    token = read_token(choices)
    try:
        model = get_model(f"tinker/{run}", base_url=base_url, memoize=False)
    except internals.PrerequisiteError as error:
        raise ConfigError(internals.in_one_line(error)) from error

    def ready(port: int) -> None:
        click.echo(f"serving {model} on http://{choices['host']}:{port}/v1", err=True)

    async def serve() -> None:
        await model.api.count_text_tokens("")  # connects: what cannot work ends the command
        await serve_model(
            model, host=choices["host"], port=choices["port"], token=token, ready=ready
        )

    asyncio.run(serve())
