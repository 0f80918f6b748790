"""Runs fault campaigns one after the other in one process, with logs: nothing may grow.

``python -m tests.faults.campaign.soak --minutes 30``
"""

from __future__ import annotations

import argparse
import asyncio
import gc
import os
import sys
import tempfile
import threading
import time
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path

from tests.faults.campaign.campaign import Report, Settings, run_campaign

from inspect_tinker_plugin.logs import assemble_pending

WARM_UP = 2
"""Waves before the one to compare with: caches fill, and threads start."""

MAY_GROW_MB = 32.0
"""Megabytes by which a process may grow after the warm-up."""


@dataclass(frozen=True)
class Holding:
    """The resources of the process between two waves."""

    memory_mb: float
    threads: int
    files: int
    tasks: int

    @classmethod
    def now(cls) -> Holding:
        """Measure, after a garbage collection."""
        gc.collect()
        pages = int(Path("/proc/self/statm").read_text().split()[1])
        return cls(
            pages * os.sysconf("SC_PAGE_SIZE") / 1e6,
            threading.active_count(),
            len(os.listdir("/proc/self/fd")),
            len(asyncio.all_tasks()),
        )

    def __str__(self) -> str:
        return (
            f"{self.memory_mb:7.1f} MB, {self.threads} threads, {self.files} files, "
            f"{self.tasks} tasks"
        )

    def grown_since(self, before: Holding) -> list[str]:
        """Return what has grown."""
        grown = []
        if self.memory_mb > before.memory_mb + MAY_GROW_MB:
            grown.append(f"memory: {before.memory_mb:.1f} to {self.memory_mb:.1f} MB")
        for name in ("threads", "files", "tasks"):
            now, then = getattr(self, name), getattr(before, name)
            if now > then:
                grown.append(f"{name}: {then} to {now}")
        return grown


async def soak(minutes: float, settings: Settings) -> list[str]:
    """Run waves of episodes until the time is over.

    Args:
        minutes: Duration.
        settings: How each wave is run; every wave has another seed.

    Returns:
        Everything that went wrong, or has grown.
    """
    wrong: list[str] = []
    holdings: list[Holding] = []
    episodes, end = 0, time.monotonic() + 60 * minutes
    while not wrong and (time.monotonic() < end or len(holdings) < WARM_UP + 2):
        with tempfile.TemporaryDirectory(prefix="rl-soak-") as folder:
            wave = replace(
                settings, seed=settings.seed + len(holdings), log_dir=Path(folder) / "logs"
            )
            report = await run_campaign(wave)
            wrong += _faults_of(report)
            if not await asyncio.to_thread(_finished_logs, Path(folder) / "logs"):
                wrong.append("there are no logs")
        episodes += report.episodes
        holdings.append(Holding.now())
        print(f"wave {len(holdings)}: {episodes:,} episodes; {holdings[-1]}", flush=True)
    return wrong + holdings[-1].grown_since(holdings[min(WARM_UP, len(holdings)) - 1])


def _finished_logs(folder: Path) -> int:
    """Finish the logs, and return how many there are."""
    assemble_pending(folder)
    return len(list(folder.glob("*.eval")))


def _faults_of(report: Report) -> list[str]:
    return [*report.wrong, *(f"left: {thing}" for thing in report.left)]


def main(argv: Sequence[str] | None = None) -> int:
    """Soak: 0 when every reward was right and nothing has grown, else 1."""
    parser = argparse.ArgumentParser(prog="tests.faults.campaign.soak")
    parser.add_argument("--minutes", type=float, default=30.0, help="how long")
    parser.add_argument("--wave", type=int, default=1000, help="episodes per wave")
    parser.add_argument("--seed", type=int, default=0, help="what the faults are drawn from")
    given = parser.parse_args(argv)
    settings = Settings(episodes=given.wave, seed=given.seed)
    wrong = asyncio.run(soak(given.minutes, settings))
    for line in wrong:
        print(line)
    print("something is wrong" if wrong else "every reward was right, and nothing has grown")
    return 1 if wrong else 0


if __name__ == "__main__":
    sys.exit(main())
