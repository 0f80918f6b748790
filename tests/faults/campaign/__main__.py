"""Runs the fault campaign: `python -m tests.faults.campaign --episodes 10000`."""

from __future__ import annotations

import argparse
import asyncio
import sys
import time
from collections.abc import Sequence

from rich.console import Console
from rich.progress import Progress, TimeElapsedColumn
from rich.table import Table
from tests.faults.campaign.campaign import Report, Settings, run_campaign


def main(argv: Sequence[str] | None = None) -> int:
    """Run a campaign: 0 when nothing went wrong but the faults, else 1."""
    parser = argparse.ArgumentParser(prog="tests.faults.campaign")
    parser.add_argument("--episodes", type=int, default=Settings.episodes, help="how many")
    parser.add_argument("--seed", type=int, default=0, help="what the faults are drawn from")
    parser.add_argument("--at-once", type=int, default=Settings.at_once, help="groups at once")
    parser.add_argument("--only", type=int, help="run this case alone")
    args = parser.parse_args(argv)
    settings = Settings(
        episodes=args.episodes, seed=args.seed, at_once=args.at_once, only=args.only
    )
    console = Console()
    started = time.monotonic()
    total = settings.episodes if settings.only is None else settings.group_size
    with Progress(*Progress.get_default_columns(), TimeElapsedColumn(), console=console) as bar:
        task = bar.add_task(f"episodes (seed {settings.seed})", total=total)
        report = asyncio.run(
            run_campaign(settings, progress=lambda done: bar.update(task, completed=done))
        )
    _show(report, console, time.monotonic() - started)
    return 0 if report.passed else 1


def _show(report: Report, console: Console, seconds: float) -> None:
    for title, counts in (("fault", report.faults), ("outcome", report.outcomes)):
        table = Table(title, "count")
        for name, count in sorted(counts.items()):
            table.add_row(name, str(count))
        console.print(table)
    for line in [*report.wrong[:50], *[f"left: {what}" for what in report.left[:50]]]:
        console.print(line, markup=False, soft_wrap=True)
    console.print(
        f"{report.episodes} episodes with a fault ({report.struck} of them came), seed "
        f"{report.settings.seed}, {seconds:.0f} s: {len(report.wrong)} wrong, "
        f"{len(report.left)} left behind",
        markup=False,
        soft_wrap=True,
    )


if __name__ == "__main__":
    sys.exit(main())
