"""``inspect rl rollout``: runs a task as the trainer would, and shows what happens."""

from __future__ import annotations

import asyncio
import json
import sys
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, cast

import click

from inspect_tinker_plugin.cli.options import (
    dataset_choices,
    dataset_options,
    load_task,
    task_options,
)
from inspect_tinker_plugin.cli.reporting import (
    EXIT_ERROR,
    EXIT_INTERRUPTED,
    EXIT_PARTIAL,
    print_to,
    progress_bar,
    quiet_stdout,
    reported,
    show_conversation,
    show_group,
    table_console,
)
from inspect_tinker_plugin.contracts.wording import counted

if TYPE_CHECKING:
    from inspect_ai.dataset import Sample
    from tinker_cookbook.completers import TokenCompleter
    from tinker_cookbook.renderers import Renderer

    from inspect_tinker_plugin.contracts.episodes import TurnRequest
    from inspect_tinker_plugin.evaluate.source import Connection
    from inspect_tinker_plugin.rl.dataset import InspectRLDataset
    from inspect_tinker_plugin.rl.env import InspectEnv
    from inspect_tinker_plugin.rl.group import InspectGroupBuilder
    from inspect_tinker_plugin.rl.rollouts import PolicyFor, RolloutReport
    from inspect_tinker_plugin.testing import Script

DEFAULT_RENDERER = "qwen3_instruct"
"""Renderer of the scripted policy, whose tokenizer has Qwen3's special tokens."""

DEFAULT_TOKENS = 1024
"""Tokens per reply, where neither the command nor a run says how many."""


@click.command("rollout")
@task_options
@click.option(
    "--policy",
    type=click.Choice(["scripted", "tinker"]),
    help="Who answers; by default tinker with --model, else scripted.",
)
@click.option(
    "--script",
    type=click.Path(path_type=Path),
    metavar="FILE",
    help="JSON lines of replies for the scripted policy. Without one, the rollouts of a group "
    "answer in turn with the sample's target and with 'I do not know'.",
)
@click.option(
    "--model",
    metavar="NAME",
    help="Sample from this model, from weights (tinker://...), or from those of a run: its folder, "
    "or folder@STEP. The server of a run with --local is started for it.",
)
@click.option("--base-url", metavar="URL", help="Tinker API server, if not the hosted one.")
@click.option("--tokenizer", metavar="NAME", help="Tokenizer, if not the model's own.")
@click.option("--renderer", metavar="NAME", help="Renderer, if not the model's own.")
@click.option(
    "--max-tokens", type=click.IntRange(1), help="Tokens per reply (default: the run's, or 1024)."
)
@click.option("--temperature", type=float, help="Temperature (default: the run's, or 1).")
@dataset_options("rollout", group_size=4)
@click.option(
    "--show", type=click.IntRange(0), default=1, show_default=True, help="Conversations to print."
)
@click.option("--full", is_flag=True, help="Print long messages whole.")
@click.option("--json", "as_json", is_flag=True, help="Print one JSON object per rollout instead.")
@reported
def rollout(**choices: Any) -> None:
    """Roll out groups of episodes of TASK, and show conversations with their rewards.

    TASK is a registered name (package/task) or a file (file.py@task), as for `inspect eval`;
    one sample of it is taken unless --limit or --sample-id says otherwise. Nothing is
    trained. Without --model nothing leaves this machine: a scripted policy uses the
    tokenizer that is shipped with the package. Exit codes: 0 all rollouts ended with a
    reward, 1 none did, 2 wrong usage, 3 some failed.
    """
    _check_choices(choices)
    connection = None if choices["model"] is None else _connect(choices)
    renderer = _scripted_renderer(choices) if connection is None else connection.renderer
    policy_for = _make_policies(choices, renderer, connection)
    with quiet_stdout():
        dataset = _make_dataset(
            choices, renderer, None if connection is None else connection.window
        )
        batches = range(len(dataset))
        builders = [builder for batch in batches for builder in dataset.get_batch(batch)]
    wanted = len(builders) * dataset.options.group_size
    groups: list[list[RolloutReport]] = []
    ended: list[bool] = []
    interrupted = False
    try:
        with quiet_stdout(), progress_bar("rollouts") as show:

            def count(failed: bool) -> None:
                ended.append(failed)
                show(len(ended), wanted, sum(ended))

            show(0, wanted)
            asyncio.run(roll_groups(builders, policy_for, count, groups))
    except KeyboardInterrupt:
        interrupted = True
    finally:
        unwritten = _finish_logs(dataset.options.log_dir)
    _show(groups, choices)
    if unwritten is not None:
        raise unwritten
    total = sum(len(group) for group in groups)
    if interrupted:
        click.echo(f"Interrupted after {total} of {counted(wanted, 'rollout')}.", err=True)
        sys.exit(EXIT_INTERRUPTED)
    failed = sum(report.reward is None for group in groups for report in group)
    if failed:
        click.echo(f"{failed} of {counted(total, 'rollout')} failed", err=True)
        sys.exit(EXIT_ERROR if failed == total else EXIT_PARTIAL)


def _check_choices(choices: dict[str, Any]) -> None:
    """Refuse options that contradict each other, before anything is loaded."""
    model, policy = choices["model"], choices["policy"]
    if policy == "tinker" and model is None:
        raise click.UsageError("--policy tinker needs --model.")
    if policy == "scripted" and model is not None:
        raise click.UsageError("--model does not go with --policy scripted.")
    if choices["script"] is not None and model is not None:
        raise click.UsageError("--script does not go with --model.")


def _connect(choices: dict[str, Any]) -> Connection:
    """Connect to the model, whose run may state its renderer, reply length and temperature."""
    from inspect_tinker_plugin.evaluate import connect, find_source

    source = find_source(choices["model"], base_url=choices["base_url"])
    source = source.override(renderer=choices["renderer"], tokenizer=choices["tokenizer"])
    if source.run is not None:
        choices["max_tokens"] = choices["max_tokens"] or source.max_tokens
        if choices["temperature"] is None:
            choices["temperature"] = source.temperature
    if source.local:
        click.echo("starting the local Tinker API server (about 20 s)", err=True)
    return connect(source).result()


def _scripted_renderer(choices: dict[str, Any]) -> Renderer:
    from inspect_tinker_plugin.rl.models import make_renderer
    from inspect_tinker_plugin.testing.policy import tokenizer_path

    tokenizer = choices["tokenizer"] or str(tokenizer_path())
    name = choices["renderer"] or DEFAULT_RENDERER
    return make_renderer(name, model=None, tokenizer=tokenizer, option="--renderer")


def _make_policies(
    choices: dict[str, Any], renderer: Renderer, connection: Connection | None
) -> PolicyFor:
    from inspect_tinker_plugin.testing.replies import answer_with, read_script, target_of

    max_tokens = choices["max_tokens"] or DEFAULT_TOKENS
    if connection is not None:
        asked = choices["temperature"]
        sampler = connection.policy(
            max_tokens=max_tokens, temperature=1.0 if asked is None else asked
        )
        return lambda env, sample, position: sampler
    episodes = read_script(choices["script"]) if choices["script"] else None

    def policy_for(env: InspectEnv, sample: Sample, position: int) -> TokenCompleter:
        if episodes is not None:
            script: Script = episodes[position % len(episodes)]
        else:
            script = answer_with("I do not know" if position % 2 else target_of(sample))
        return scripted_policy(env, renderer, script, max_tokens=max_tokens)

    return policy_for


def _make_dataset(
    choices: dict[str, Any], renderer: Renderer, window: int | None
) -> InspectRLDataset:
    from inspect_tinker_plugin.processes.workers import freeze_memory_once
    from inspect_tinker_plugin.rl.dataset import as_rl_dataset

    options = dataset_choices("rollout", choices)
    if options["sample_id"] is None and options["limit"] is None:
        options["limit"] = 1
    if options["context_window"] is None:
        options["context_window"] = window
    resolved = load_task(choices)
    dataset = as_rl_dataset(resolved, renderer, **options)
    freeze_memory_once()
    return dataset


def _finish_logs(log_dir: str | Path | None) -> click.ClickException | None:
    """Wait until the logs of the rollouts can be read; return why they cannot be."""
    if log_dir is None:
        return None
    from inspect_tinker_plugin.logs import assemble_pending

    try:
        assemble_pending(log_dir)
    except OSError as error:
        return click.ClickException(
            f"the logs of these rollouts could not be written to {log_dir}: {error}. What is there "
            "is kept, and the next command that logs to this folder completes it."
        )
    return None


def _show(groups: Sequence[Sequence[RolloutReport]], choices: dict[str, Any]) -> None:
    if choices["as_json"]:
        for report in (report for group in groups for report in group):
            click.echo(json.dumps(report.as_json(), ensure_ascii=False))
        return
    console, left = table_console(), choices["show"]
    for group in groups:
        for report in group[:left]:
            print_to(console, show_conversation(report, full=choices["full"]))
        print_to(console, show_group(group, shown=left))
        left -= min(left, len(group))


async def roll_groups(
    builders: Sequence[InspectGroupBuilder],
    policy_for: PolicyFor,
    done: Callable[[bool], object],
    groups: list[list[RolloutReport]] | None = None,
) -> list[list[RolloutReport]]:
    """Roll out groups one after the other; the rollouts of a group run together.

    They are rolled out as the cookbook does, but for a rollout that fails: the others continue.

    Args:
        builders: The groups.
        policy_for: Makes the policy of each rollout.
        done: Called after each rollout with whether it failed.
        groups: Receives the reports of each group as soon as they are there, so that a caller
            that is interrupted has them, including the finished ones of the last group.

    Returns:
        The reports of each group, in the order of the builders.
    """
    groups = [] if groups is None else groups
    for builder in builders:
        await _roll_group(builder, policy_for, done, groups)
    return groups


async def _roll_group(
    builder: InspectGroupBuilder,
    policy_for: PolicyFor,
    done: Callable[[bool], object],
    groups: list[list[RolloutReport]],
) -> None:
    from inspect_tinker_plugin.rl.rollouts import MemberRollout, report_rollout, roll_group

    members: list[MemberRollout] = []
    try:
        await roll_group(builder, policy_for, done=done, members=members)
    finally:
        task, sample_id = builder.handle.name, builder.sample.id
        reports = [report_rollout(each, task=task, sample_id=sample_id) for each in members]
        if reports:
            groups.append(_with_advantages(reports))


def _with_advantages(reports: Sequence[RolloutReport]) -> list[RolloutReport]:
    """Subtract the mean reward of the group, as group-relative training does."""
    rewards = [report.reward for report in reports if report.reward is not None]
    return [
        report
        if report.reward is None
        else replace(report, advantage=report.reward - sum(rewards) / len(rewards))
        for report in reports
    ]


def scripted_policy(
    env: InspectEnv, renderer: Renderer, script: Script, *, max_tokens: int | None = None
) -> TokenCompleter:
    """Make the policy that follows a script in one env's episode."""
    from inspect_tinker_plugin.testing import ScriptedPolicy

    def request() -> TurnRequest:
        assert env.request is not None
        return env.request

    # Only called, its class is never checked: a subclass would import the cookbook there.
    policy = ScriptedPolicy(renderer, script, request=request, max_tokens=max_tokens)
    return cast("TokenCompleter", policy)
