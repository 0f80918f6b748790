"""``inspect rl watch``: shows a run in the terminal while it trains."""

from __future__ import annotations

import time
from pathlib import Path

import click

from inspect_tinker_plugin.cli.reporting import reported
from inspect_tinker_plugin.contracts.errors import ConfigError

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
    from inspect_tinker_plugin.train.watching import read_state, show_state

    if not (run / RUN).is_file():
        raise ConfigError(f"{run} is not the folder of a run of `inspect rl train`")
    console = Console()
    state = read_state(run)
    if once or not state.trained:
        console.print(show_state(state, rows=1000))
        return
    with Live(show_state(state), console=console, auto_refresh=False) as live:
        while state.trained:
            time.sleep(_PERIOD)
            state = read_state(run)
            live.update(show_state(state), refresh=True)
