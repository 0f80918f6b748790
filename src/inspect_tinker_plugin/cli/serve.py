"""``inspect rl serve``: episodes over the network; ``serve-model``: the model of a run."""

from __future__ import annotations

import secrets
from functools import partial
from typing import TYPE_CHECKING, Any

import click

from inspect_tinker_plugin.cli.options import (
    LOOPBACK,
    Number,
    dataset_choices,
    dataset_options,
    listening_options,
    parse_args,
    sampling_options,
    task_arguments,
)
from inspect_tinker_plugin.cli.reporting import reported
from inspect_tinker_plugin.contracts.errors import ConfigError
from inspect_tinker_plugin.contracts.wording import missing_extra
from inspect_tinker_plugin.processes.workers import run_in_loop

if TYPE_CHECKING:
    from inspect_tinker_plugin.serve.host import Host

SHORTEST = 16
"""Characters that a token has at least."""


@click.command("serve")
@click.argument("tasks", metavar="TASK...", nargs=-1, required=True)
@task_arguments
@listening_options(port=8400, sent_as="`Authorization: Bearer TOKEN`")
@click.option("--model", metavar="NAME", help="Model that is trained: its tokenizer and renderer.")
@sampling_options
@click.option(
    "--sampler",
    metavar="URL",
    help="Model server of all episodes; without it, each request lends its own.",
)
@click.option(
    "--sampler-form",
    type=click.Choice(["completions", "generate"]),
    default="completions",
    show_default=True,
    help="How it is asked: /v1/completions or /inference/v1/generate.",
)
@click.option(
    "--max-episodes",
    type=click.IntRange(1),
    default=256,
    show_default=True,
    help="Episodes at once per process; others wait.",
)
@click.option(
    "--queue-timeout",
    type=Number(0, min_open=True),
    default=600.0,
    show_default=True,
    help="Seconds that an episode waits for a place.",
)
@click.option(
    "--episode-timeout",
    type=Number(0, min_open=True),
    default=3600.0,
    show_default=True,
    help="Seconds that an episode runs; --time-limit ends one earlier, with a score.",
)
@click.option(
    "--drain-timeout",
    type=Number(0),
    default=300.0,
    show_default=True,
    help="Seconds that running episodes have after SIGTERM.",
)
@click.option(
    "--workers",
    type=click.IntRange(1),
    default=1,
    show_default=True,
    help="Processes behind the address.",
)
@dataset_options("serve", group_size=4)
@reported
def serve_command(**choices: Any) -> None:
    """Serve episodes of TASK, or of several tasks, to trainers over HTTP.

    Trainers send which sample they want and, unless --sampler fixes it, the address of a model
    server that returns token ids. They get tokens, rewards and causes of failures, in the protocol
    of NeMo Gym (/run), of OpenEnv (/mcp, /ws) or as plain JSON (/v1/rollouts). Tasks and options
    are fixed by this command; no request brings code.
    """
    try:
        from inspect_tinker_plugin.serve.app import run_server
    except ImportError as error:
        raise ConfigError(missing_extra(str(error.name), "serve")) from error
    token = read_token(choices)
    host, port, workers = (choices.pop(name) for name in ("host", "port", "workers"))
    patience = choices.pop("drain_timeout")
    run_server(
        partial(load_host, choices),
        token=token,
        patience=patience,
        workers=workers,
        host=host,
        port=port,
        opened=lambda port: click.echo(f"serving on http://{host}:{port}", err=True),
    )


def read_token(choices: dict[str, Any]) -> str | None:
    """Take the token out of a command's choices."""
    path = choices.pop("token_file")
    if path is None:
        if choices["host"] not in LOOPBACK:
            raise ConfigError(
                f"--host {choices['host']} can be reached from other machines: give --token-file, "
                f"for example with {secrets.token_urlsafe(24)}"
            )
        return None
    try:
        token: str = path.read_text(encoding="ascii").strip()  # as a header of HTTP takes it
    except (OSError, UnicodeDecodeError) as error:
        raise ConfigError(f"the token in {path} cannot be read: {error}") from error
    if len(token) < SHORTEST or len(token.split()) > 1:
        raise ConfigError(f"the token in {path} has less than {SHORTEST} characters, or blanks")
    return token


def load_host(choices: dict[str, Any]) -> Host:
    """Load the tasks of a server, in the process that runs them."""
    from inspect_tinker_plugin.rl.builder import InspectRLDatasetBuilder
    from inspect_tinker_plugin.rl.models import make_renderer
    from inspect_tinker_plugin.serve.host import Host, Limits
    from inspect_tinker_plugin.serve.samplers import Endpoint
    from inspect_tinker_plugin.serve.service import RolloutService

    choices = dict(choices)
    options = dataset_choices("serve", choices)
    model, tokenizer = choices["model"], choices["tokenizer"]
    if model is None and tokenizer is None:
        raise ConfigError("name the model that is trained: --model NAME")
    renderer = make_renderer(
        choices["renderer"], model=model, tokenizer=tokenizer, option="--renderer"
    )
    tasks = InspectRLDatasetBuilder(
        task=list(choices["tasks"]),
        model_name=model or str(tokenizer),
        task_args=parse_args(choices["task_args"], choices["task_config"]),
        options=options,
    ).mixed_tasks()
    sampler = None
    if choices["sampler"] is not None:
        sampler = Endpoint(
            url=choices["sampler"],
            model=model or "",
            form=choices["sampler_form"],
            max_tokens=choices["max_tokens"],
            sampling={"temperature": choices["temperature"]},
        )
    return Host(
        [
            RolloutService(
                each.task, renderer, task_args=each.task_args, **{**options, **each.options}
            )
            for each in tasks
        ],
        sampler=sampler,
        limits=Limits(
            max_episodes=choices["max_episodes"],
            queue_timeout=choices["queue_timeout"],
            episode_timeout=choices["episode_timeout"],
        ),
    )


@click.command("serve-model")
@click.argument("run", metavar="RUN")
@listening_options(port=8500, sent_as="their API key")
@click.option("--base-url", metavar="URL", help="Tinker API server, if not the run's own.")
@click.option("--renderer", metavar="NAME", help="Renderer, if not the run's or model's own.")
@reported
def serve_model_command(
    run: str, base_url: str | None, renderer: str | None, **choices: Any
) -> None:
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
        model = get_model(f"tinker/{run}", base_url=base_url, renderer=renderer, memoize=False)
    except internals.PrerequisiteError as error:
        raise ConfigError(internals.in_one_line(error)) from error

    def ready(port: int) -> None:
        click.echo(f"serving {model} on http://{choices['host']}:{port}/v1", err=True)

    async def serve() -> None:
        await model.api.count_text_tokens("")  # connects: what cannot work ends the command
        await serve_model(
            model, host=choices["host"], port=choices["port"], token=token, ready=ready
        )

    run_in_loop(serve())
