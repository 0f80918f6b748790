"""``inspect rl rescore``: computes the rewards of logged rollouts again, into new logs."""

from __future__ import annotations

import asyncio
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from inspect_tinker_plugin.cli.options import output_option, parse_args
from inspect_tinker_plugin.cli.reporting import (
    EXIT_INTERRUPTED,
    EXIT_PARTIAL,
    name_failures,
    progress_bar,
    reported,
)
from inspect_tinker_plugin.contracts.wording import counted

if TYPE_CHECKING:
    from inspect_tinker_plugin.logs.rescoring import Rescored


@click.command("rescore")
@click.argument("logs", metavar="LOGS...", nargs=-1, required=True)
@output_option("Folder of the new logs; created if missing.")
@click.option("--reward", metavar="EXPR", help="Reward expression (default: each log's own).")
@click.option(
    "--group-reward", metavar="EXPR", help="Group reward expression (default: each log's own)."
)
@click.option("--no-group-reward", is_flag=True, help="Use no group reward.")
@click.option(
    "--failed", is_flag=True, help="Compute only rewards that could not be computed before."
)
@click.option(
    "--model-role",
    "roles",
    multiple=True,
    metavar="ROLE=MODEL",
    help="Judge of scorers that are run again (default: the log's own).",
)
@click.option(
    "--overwrite", is_flag=True, help="Replace logs of the same names that the folder holds."
)
@reported
def rescore_command(logs: tuple[str, ...], **choices: Any) -> None:
    """Compute the rewards of logged rollouts again, into new logs.

    LOGS are .eval logs of `inspect rl rollout` and `inspect rl train`, and folders of them; they
    are not changed. Rewards are computed of the logged scores, group rewards over the groups as
    logged. Scorers are run again only for rollouts whose logged scores are not enough: a scorer or
    its judge had failed, or gave no number. A reward that fails again is an error of its sample
    and never a number.

    Interrupted, the same command continues. Exit codes: 0 all rewards computed, 1 nothing
    written, 2 wrong usage, 3 some rewards could not be computed (they are listed).
    """
    from inspect_tinker_plugin.logs.rescoring import Rescoring, rescore
    from inspect_tinker_plugin.rewards.logged import find_logs

    if choices["group_reward"] is not None and choices["no_group_reward"]:
        raise click.UsageError("--group-reward and --no-group-reward exclude each other.")
    how = Rescoring(roles=parse_args(choices.pop("roles")), **choices)
    try:
        with progress_bar("rewards") as show:
            done = asyncio.run(rescore(find_logs(logs), how, on_progress=show))
    except KeyboardInterrupt:
        click.echo("Interrupted; run the same command again to continue.", err=True)
        sys.exit(EXIT_INTERRUPTED)
    _tell(done, how.output)
    if done.failures:
        sys.exit(EXIT_PARTIAL)


def _tell(done: Rescored, output: Path) -> None:
    lines = [
        f"{failed.log}, sample {failed.id}, epoch {failed.epoch}: {failed.reason}"
        for failed in done.failures
    ]
    name_failures(lines, "as errors of their samples in the new logs")
    earlier = f" ({done.earlier:,} of them by an earlier run)" if done.earlier else ""
    again = f", scorers of {counted(done.scored, 'rollout')} run again" if done.scored else ""
    missing = f"; {len(done.failures):,} failed" if done.failures else ""
    click.echo(
        f"Wrote {counted(len(done.logs), 'log')} to {output}{earlier}: "
        f"{counted(done.computed, 'reward')} computed{again}{missing}."
    )
