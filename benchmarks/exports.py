"""Rows per second of CPU that an export writes, and how soon the first are there."""

from __future__ import annotations

import sys
import tempfile
import time
from itertools import islice
from pathlib import Path

from benchmarks import sides

from inspect_tinker_plugin.export.folder import WORK
from inspect_tinker_plugin.export.options import ExportOptions
from inspect_tinker_plugin.export.pipeline import export_task
from inspect_tinker_plugin.processes import Journal
from inspect_tinker_plugin.processes.workers import freeze_memory
from inspect_tinker_plugin.tasks.reference import resolve_task

ROWS = 20_000


async def ours() -> float:
    resolved = resolve_task(sides.one_turn_task(ROWS))
    freeze_memory()  # as the command does
    with tempfile.TemporaryDirectory() as folder:
        started = time.process_time()
        report = await export_task(resolved, Path(folder) / "out")
        taken = time.process_time() - started
    assert report.written == ROWS
    return ROWS / taken


async def by_workers(workers: int) -> float:
    """Rows per second of the clock; the start of the workers counts."""
    resolved = resolve_task(str(Path(__file__).with_name("exported_task.py")))
    freeze_memory()
    with tempfile.TemporaryDirectory() as folder:
        started = time.perf_counter()
        report = await export_task(resolved, Path(folder) / "out", ExportOptions(workers=workers))
        taken = time.perf_counter() - started
    return report.written / taken


async def bare() -> float:
    """The same rows, by ``datasets`` alone; loading it counts, as it does in an export."""
    task = sides.one_turn_task(ROWS)
    with tempfile.TemporaryDirectory() as folder:
        started = time.process_time()
        from datasets import Dataset

        rows = [
            {
                "id": str(sample.id),
                "prompt": [{"role": "user", "content": sample.input}],
                "answer": str(sample.target),
                "info": "{}",
                "task": task.name,
                "tools": "[]",
            }
            for sample in task.dataset
        ]
        Dataset.from_list(rows).to_parquet(str(Path(folder) / "rows.parquet"))
        return ROWS / (time.process_time() - started)


async def through(bridge: Path) -> float:
    """The older bridge, whose source is in a folder."""
    sys.path.insert(0, str(bridge / "src" if (bridge / "src").is_dir() else bridge))
    from inspect_tinker_bridge.dataset import (  # type: ignore[import-not-found]
        inspect_dataset_to_hf,
    )

    task = sides.one_turn_task(ROWS)
    started = time.process_time()
    assert len(inspect_dataset_to_hf(task, task_name="one_turn")) == ROWS
    return ROWS / (time.process_time() - started)


async def first_rows() -> float:
    """Seconds of CPU until rows are on the disk: in the journal, which an export continues from."""
    resolved = resolve_task(sides.one_turn_task(ROWS))
    freeze_memory()
    found: list[float] = []
    with tempfile.TemporaryDirectory() as folder:
        output = Path(folder) / "out"
        journal = Journal(output / WORK / "journal.jsonl")
        started = time.process_time()

        def look(*counts: int) -> None:
            if not found and any("row" in record for record, _ in islice(journal.read(), 3)):
                found.append(time.process_time() - started)

        await export_task(resolved, output, on_progress=look)
    return found[0]
