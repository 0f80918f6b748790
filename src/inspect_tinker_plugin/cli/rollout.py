"""``inspect rl rollout``: run a task as the trainer would, and look at what happens."""

from __future__ import annotations

import asyncio
import json
import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from inspect_tinker_plugin.cli.options import (
    parse_args,
    parse_on_error,
    parse_sandbox,
    sample_options,
    task_options,
)
from inspect_tinker_plugin.cli.reporting import (
    EXIT_ERROR,
    EXIT_INTERRUPTED,
    EXIT_PARTIAL,
    reported,
)

if TYPE_CHECKING:
    from inspect_ai.dataset import Sample
    from rich.console import Console
    from tinker_cookbook.completers import TokenCompleter
    from tinker_cookbook.renderers import Renderer

    from inspect_tinker_plugin.cli.group_rollout import PolicyFor
    from inspect_tinker_plugin.cli.report import RolloutReport
    from inspect_tinker_plugin.config import OnError
    from inspect_tinker_plugin.episode.types import TurnRequest
    from inspect_tinker_plugin.rl.dataset import InspectRLDataset
    from inspect_tinker_plugin.rl.env import InspectEnv

DEFAULT_RENDERER = "qwen3_instruct"
"""Renderer of the scripted policy, whose tokenizer has Qwen3's special tokens."""

WIDTH = 100
"""Columns when the output is not a terminal."""


@click.command("rollout")
@task_options
@sample_options
@click.option("--group-size", type=click.IntRange(1), default=4, show_default=True)
@click.option(
    "--policy",
    type=click.Choice(["scripted", "tinker"]),
    help="Who answers; tinker when --model is given, else scripted.",
)
@click.option(
    "--script",
    type=click.Path(path_type=Path),
    metavar="FILE",
    help="JSON lines of replies for the scripted policy. Without one, the rollouts of a group "
    "answer in turn with the sample's target and with 'I do not know'.",
)
@click.option("--model", metavar="NAME", help="Sample from this model (or tinker:// weights).")
@click.option("--base-url", metavar="URL", help="Tinker API server, if not the hosted one.")
@click.option("--tokenizer", metavar="NAME", help="Tokenizer, if not the model's own.")
@click.option("--renderer", metavar="NAME", help="Renderer, if not the model's own.")
@click.option("--max-tokens", type=click.IntRange(1), default=1024, show_default=True)
@click.option("--temperature", type=float, default=1.0, show_default=True)
@click.option("--max-turns", type=click.IntRange(1), help="Model calls an episode may make.")
@click.option("--message-limit", type=click.IntRange(1), help="Messages in a conversation.")
@click.option("--token-limit", type=click.IntRange(1), help="Tokens of an episode.")
@click.option("--time-limit", type=click.IntRange(1), help="Seconds of an episode.")
@click.option("--max-sandboxes", type=click.IntRange(1), help="Sandboxes alive at once.")
@click.option("--tool-executor", metavar="NAME", help="Who carries out tool calls.")
@click.option("--reward", default="mean", show_default=True, help="How scores become a reward.")
@click.option("--group-reward", metavar="EXPR", help="How a group's rewards are reconsidered.")
@click.option(
    "--on-error",
    multiple=True,
    metavar="raise|NUMBER|CAUSE=NUMBER",
    callback=parse_on_error,
    help="Reward of a failed episode instead of its failure, for all causes or by cause, e.g. "
    "--on-error scorer=-1 --on-error sandbox=raise.",
)
@click.option("--log-dir", metavar="DIR", help="Write an .eval log a batch here.")
@click.option(
    "--show", type=click.IntRange(0), default=1, show_default=True, help="Conversations to print."
)
@click.option("--full", is_flag=True, help="Print long messages whole.")
@click.option("--json", "as_json", is_flag=True, help="Print one JSON object a rollout instead.")
@reported
def rollout(**choices: Any) -> None:
    """Roll out groups of episodes of TASK, and show conversations with their rewards.

    TASK is a registered name (package/task) or a file (file.py@task), as for `inspect eval`;
    one sample of it is taken unless --limit or --sample-id says otherwise. Nothing is
    trained. Without --model nothing leaves this machine: a scripted policy speaks through
    the tokenizer that is shipped with the package. Exit codes: 0 all rollouts ended with a
    reward, 1 none did, 2 wrong usage, 3 some failed.
    """
    from rich.console import Console

    from inspect_tinker_plugin.cli.group_rollout import roll_groups

    _check(choices)
    renderer = _renderer(choices)
    policy_for = _policies(choices, renderer)
    dataset = _dataset(choices, renderer)
    builders = [builder for batch in range(len(dataset)) for builder in dataset.get_batch(batch)]
    try:
        with _progress_bar(len(builders) * choices["group_size"]) as done:
            groups = asyncio.run(roll_groups(builders, policy_for, done))
    except KeyboardInterrupt:
        sys.exit(EXIT_INTERRUPTED)
    finally:
        _finish_logs(choices["log_dir"])
    terminal = Console()
    _show(groups, choices, terminal if terminal.is_terminal else Console(width=WIDTH))
    failed = sum(report.reward is None for group in groups for report in group)
    if failed:
        total = sum(len(group) for group in groups)
        click.echo(f"{failed} of {total} rollouts failed", err=True)
        sys.exit(EXIT_ERROR if failed == total else EXIT_PARTIAL)


def _check(choices: dict[str, Any]) -> None:
    """Refuse options that contradict each other, before anything is loaded."""
    model, policy = choices["model"], choices["policy"]
    if policy == "tinker" and model is None:
        raise click.UsageError("--policy tinker needs --model.")
    if policy == "scripted" and model is not None:
        raise click.UsageError("--model does not go with --policy scripted.")
    if choices["script"] is not None and model is not None:
        raise click.UsageError("--script does not go with --model.")


def _renderer(choices: dict[str, Any]) -> Renderer:
    """Make the renderer that is named, the model's own, or the scripted policy's."""
    from tinker_cookbook.model_info import get_recommended_renderer_name
    from tinker_cookbook.renderers import get_renderer
    from tinker_cookbook.tokenizer_utils import get_tokenizer

    from inspect_tinker_plugin.errors import ConfigError
    from inspect_tinker_plugin.local.model import TOKENIZER_FOLDER

    model, name = choices["model"], choices["renderer"]
    tokenizer = choices["tokenizer"] or model or str(TOKENIZER_FOLDER)
    if tokenizer.startswith("tinker://"):
        raise click.UsageError("weights do not name their tokenizer: add --tokenizer.")
    try:
        if name is None:
            name = get_recommended_renderer_name(model) if model else DEFAULT_RENDERER
        return get_renderer(name, get_tokenizer(tokenizer))
    except (ValueError, KeyError, OSError) as error:
        raise ConfigError(
            f"no renderer {name or 'recommended'} for the tokenizer {tokenizer}: {error}"
        ) from error


def _policies(choices: dict[str, Any], renderer: Renderer) -> PolicyFor:
    from inspect_tinker_plugin.cli import policies

    if choices["model"] is not None:
        sampler = policies.tinker_policy(
            choices["model"],
            base_url=choices["base_url"],
            max_tokens=choices["max_tokens"],
            temperature=choices["temperature"],
        )
        return lambda env, sample, position: sampler
    script = policies.read_script(choices["script"]) if choices["script"] else None

    def scripted(env: InspectEnv, sample: Sample, position: int) -> TokenCompleter:
        def request() -> TurnRequest:
            assert env.request is not None
            return env.request

        replies = (
            script[position % len(script)]
            if script is not None
            else policies.answer_with(_target(sample) if position % 2 == 0 else UNKNOWING)
        )
        return policies.scripted_policy(
            renderer, replies, max_tokens=choices["max_tokens"], request=request
        )

    return scripted


UNKNOWING = "I do not know"


def _target(sample: Sample) -> str:
    return sample.target if isinstance(sample.target, str) else ", ".join(sample.target)


def _dataset(choices: dict[str, Any], renderer: Renderer) -> InspectRLDataset:
    from inspect_tinker_plugin.export.selection import SelectedSamples, Selection
    from inspect_tinker_plugin.rl.dataset import as_rl_dataset
    from inspect_tinker_plugin.task_loading import create_solver
    from inspect_tinker_plugin.tasks import resolve_task

    task = resolve_task(choices["task"], parse_args(choices["task_args"], choices["task_config"]))
    shuffle, ids = choices["sample_shuffle"], choices["sample_id"]
    selection = Selection(
        limit=choices["limit"] if choices["limit"] or ids else 1,
        sample_ids=ids,
        shuffle=shuffle is not None,
        seed=None if shuffle is True else shuffle,
    )
    samples = SelectedSamples(task.task.dataset, selection)
    on_error: OnError = choices["on_error"]
    solver, solver_args = choices["solver"], parse_args(choices["solver_args"])
    if solver_args and solver is None:
        raise click.UsageError("-S needs --solver.")
    return as_rl_dataset(
        task.ref or task.task,
        renderer,
        sample_ids=[sample.id for sample in samples if sample.id is not None],
        group_size=choices["group_size"],
        solver=create_solver(solver, solver_args) if solver else None,
        sandbox=parse_sandbox(choices["sandbox"]),
        model_roles=parse_args(choices["model_roles"]),
        max_turns=choices["max_turns"],
        message_limit=choices["message_limit"],
        token_limit=choices["token_limit"],
        time_limit=choices["time_limit"],
        max_sandboxes=choices["max_sandboxes"],
        reward=choices["reward"],
        group_reward=choices["group_reward"],
        tool_executor=choices["tool_executor"],
        on_error=on_error,
        log_dir=choices["log_dir"],
    )


def _finish_logs(log_dir: str | None) -> None:
    """Wait until the logs of the rollouts are there to be read."""
    if log_dir is not None:
        from inspect_tinker_plugin.logs import assemble_pending

        assemble_pending(log_dir)


@contextmanager
def _progress_bar(total: int) -> Iterator[Callable[[], None]]:
    """Draw a bar on stderr, when that is a terminal."""
    from rich.console import Console
    from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn

    console = Console(stderr=True)
    columns = (TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn())
    with Progress(
        *columns, console=console, transient=True, disable=not console.is_terminal
    ) as bar:
        line = bar.add_task("rollouts", total=total)
        yield lambda: bar.advance(line)


def _show(
    groups: Sequence[Sequence[RolloutReport]], choices: dict[str, Any], console: Console
) -> None:
    from inspect_tinker_plugin.cli.display import show_conversation, show_group

    if choices["as_json"]:
        for group in groups:
            for report in group:
                click.echo(json.dumps(report.as_json(), ensure_ascii=False))
        return
    left = choices["show"]
    for group in groups:
        for report in group[:left]:
            console.print(show_conversation(report, full=choices["full"]))
        left -= min(left, len(group))
        console.print(show_group(group))
