"""``inspect rl rollout``: runs a task as the trainer would, and shows what happens."""

from __future__ import annotations

import json
import sys
from collections.abc import Callable, Sequence
from contextlib import ExitStack
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, cast

import click

from inspect_tinker_plugin.cli.options import (
    dataset_choices,
    dataset_options,
    load_task,
    sampling_options,
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
from inspect_tinker_plugin.contracts.errors import ConfigError
from inspect_tinker_plugin.contracts.wording import counted, write_json
from inspect_tinker_plugin.processes.workers import run_in_loop

if TYPE_CHECKING:
    from inspect_ai.dataset import Sample
    from tinker_cookbook.completers import TokenCompleter
    from tinker_cookbook.renderers import Renderer

    from inspect_tinker_plugin.contracts.episodes import TurnRequest
    from inspect_tinker_plugin.rl.dataset import InspectRLDataset
    from inspect_tinker_plugin.rl.env import InspectEnv
    from inspect_tinker_plugin.rl.group import InspectGroupBuilder
    from inspect_tinker_plugin.rl.rollouts import PolicyFor, RolloutReport
    from inspect_tinker_plugin.testing import Script
    from tinker_local import LocalServer

DEFAULT_RENDERER = "qwen3_instruct"
"""Renderer of the scripted policy, whose tokenizer has Qwen3's special tokens."""


@click.command("rollout")
@task_options
@click.option(
    "--script",
    type=click.Path(path_type=Path),
    metavar="FILE",
    help="JSON lines of replies for the scripted policy. Without one, the rollouts of a group "
    "answer in turn with the sample's target and with 'I do not know'.",
)
@click.option("--model", metavar="NAME", help="Sample from this model (or tinker:// weights).")
@click.option("--base-url", metavar="URL", help="Tinker API server, if not the hosted one.")
@click.option(
    "--local",
    type=click.Path(path_type=Path),
    metavar="RUN",
    help="Folder of a run of `inspect rl train --local`: start its server for weights of it.",
)
@sampling_options
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
    renderer = _make_renderer(choices)
    with ExitStack() as stack:
        server = None
        if choices["local"] is not None:
            from tinker_local import SERVER_FOLDER, LocalServer, LocalSettings

            click.echo("starting the local Tinker API server (about 20 s)", err=True)
            state = choices["local"] / SERVER_FOLDER
            rank = max(LocalSettings().max_lora_rank, choices["lora_rank"])
            settings = LocalSettings(max_lora_rank=rank)
            server = stack.enter_context(
                LocalServer(choices["base_model"], state_dir=state, settings=settings)
            )
            stack.enter_context(server.export_environ())
            choices["base_url"] = server.url
        _roll_out(choices, renderer, server)


def _roll_out(choices: dict[str, Any], renderer: Renderer, server: LocalServer | None) -> None:
    policy_for = _make_policies(choices, renderer)
    with quiet_stdout():
        dataset = _make_dataset(choices, renderer)
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
            rolling = roll_groups(builders, policy_for, count, groups)
            run_in_loop(rolling if server is None else server.during(rolling))
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
    model = choices["model"]
    if choices["local"] is not None:
        if model is None or not model.startswith("tinker://"):
            raise click.UsageError("--local needs --model tinker://..., weights of that run.")
        if choices["base_url"] is not None:
            raise click.UsageError("--local starts its own server; leave --base-url out.")
        _read_run(choices)
    if choices["script"] is not None and model is not None:
        raise click.UsageError("--script does not go with --model.")
    if choices["base_url"] is not None and model is None:
        raise click.UsageError("--base-url needs --model.")
    if model is not None and choices["local"] is None:
        from inspect_tinker_plugin.rl.models import no_key

        if problem := no_key("sample from", "leave --model out to use the scripted policy"):
            raise ConfigError(problem)


def _read_run(choices: dict[str, Any]) -> None:
    """Take model and renderer from a local run, where the command does not name them."""
    from tinker_local import SERVER_FOLDER, check_reply_length

    folder = choices["local"] = choices["local"].expanduser().absolute()
    try:
        run = json.loads((folder / "run.json").read_text(encoding="utf-8"))
        model, renderer = run["model"], run["renderer"]
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise click.UsageError(f"--local {folder}: no run of `inspect rl train`.") from error
    if not (folder / SERVER_FOLDER).is_dir():
        raise click.UsageError(f"--local {folder}: that run was not trained with --local.")
    choices |= {"base_model": model, "lora_rank": int(run.get("LoRA rank") or 0)}
    choices["tokenizer"] = choices["tokenizer"] or model
    choices["renderer"] = choices["renderer"] or renderer
    check_reply_length(model, choices["max_tokens"])


def _make_renderer(choices: dict[str, Any]) -> Renderer:
    """Make the named renderer, the model's own, or the scripted policy's."""
    from inspect_tinker_plugin.rl.models import make_renderer
    from inspect_tinker_plugin.testing.policy import tokenizer_path

    model, tokenizer = choices["model"], choices["tokenizer"]
    if model is None:
        name = choices["renderer"] or DEFAULT_RENDERER
        tokenizer = tokenizer or str(tokenizer_path())
        return make_renderer(name, model=None, tokenizer=tokenizer, option="--renderer")
    return make_renderer(choices["renderer"], model=model, tokenizer=tokenizer, option="--renderer")


def _make_policies(choices: dict[str, Any], renderer: Renderer) -> PolicyFor:
    from inspect_tinker_plugin.testing.replies import answer_with, read_script, target_of

    if choices["model"] is not None:
        from inspect_tinker_plugin.rl.models import tinker_policy

        sampler = tinker_policy(
            choices["model"],
            base_url=choices["base_url"],
            max_tokens=choices["max_tokens"],
            temperature=choices["temperature"],
        )
        return lambda env, sample, position: sampler
    episodes = read_script(choices["script"]) if choices["script"] else None

    def policy_for(env: InspectEnv, sample: Sample, position: int) -> TokenCompleter:
        if episodes is not None:
            script: Script = episodes[position % len(episodes)]
        else:
            script = answer_with("I do not know" if position % 2 else target_of(sample))
        return scripted_policy(env, renderer, script, max_tokens=choices["max_tokens"])

    return policy_for


def _context_window(choices: dict[str, Any]) -> int | None:
    """Find out how many tokens the model takes; a scripted policy takes any number."""
    if choices["model"] is None:
        return None
    from inspect_tinker_plugin.evaluate.source import find_window

    model = choices["model"] if choices["local"] is None else choices["tokenizer"]
    return find_window(model, choices["base_url"])


def _make_dataset(choices: dict[str, Any], renderer: Renderer) -> InspectRLDataset:
    from inspect_tinker_plugin.processes.workers import freeze_memory_once
    from inspect_tinker_plugin.rl.dataset import as_rl_dataset

    options = dataset_choices("rollout", choices, limit=1)
    if options["context_window"] is None:
        options["context_window"] = _context_window(choices)
    resolved = load_task(choices, options["model_roles"])
    dataset = as_rl_dataset(resolved, renderer, **options)
    freeze_memory_once()
    return dataset


def _finish_logs(log_dir: str | Path | None) -> click.ClickException | None:
    """Wait until the logs of the rollouts can be read; return why they cannot be."""
    if log_dir is None:
        return None
    from inspect_tinker_plugin.logs import assemble_pending, count_lost

    try:
        assemble_pending(log_dir)
    except OSError as error:
        return click.ClickException(
            f"the logs of these rollouts could not be written to {log_dir}: {error}. What is there "
            "is kept, and the next command that logs to this folder completes it."
        )
    if lost := count_lost(log_dir):
        return click.ClickException(
            f"the rollouts of {counted(lost, 'group')} could not be written to {log_dir}: "
            "no log has them"
        )
    return None


def _show(groups: Sequence[Sequence[RolloutReport]], choices: dict[str, Any]) -> None:
    if choices["as_json"]:
        for report in (report for group in groups for report in group):
            click.echo(write_json(report.as_json()))
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
    from inspect_tinker_plugin.rl.rollouts import MemberRollout, report_rollout, roll_group

    groups = [] if groups is None else groups
    for builder in builders:
        members: list[MemberRollout] = []
        try:
            await roll_group(builder, policy_for, members, done=done)
        finally:
            if members:
                groups.append(_with_advantages([report_rollout(each) for each in members]))
    return groups


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
