"""The file formats of an export: writes parts, and reads them back, through ``datasets``."""

from __future__ import annotations

import os
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any, Literal, get_args

from inspect_tinker_plugin.export.schema import Row, Schema

Format = Literal["parquet", "jsonl", "arrow"]
FORMATS: tuple[Format, ...] = get_args(Format)


def write_part(
    path: Path, rows: Sequence[Row], *, format: Format, schema: Schema, rich: bool
) -> None:
    """Write rows as one file, which appears complete or not at all.

    Args:
        path: The file.
        rows: Its rows.
        format: File format.
        schema: Its columns.
        rich: Whether messages have all the keys of the schema.
    """
    from datasets import Dataset

    written, read = schema.written(rich=rich), schema.features(rich=rich)
    table = Dataset.from_list(
        [schema.widened(row) if rich else dict(row) for row in rows], features=written
    )
    partial = path.with_name(path.name + ".partial")
    with _quiet():
        if written != read:
            table = table.cast(read)
        if format == "parquet":
            table.to_parquet(partial)
        elif format == "jsonl":
            table.to_json(partial, lines=True, force_ascii=False)
        else:
            _write_arrow(partial, table)
    _sync(partial)
    partial.replace(path)


def read_part(path: Path, *, format: Format) -> list[Row]:
    """Read the rows of a file that :func:`write_part` wrote."""
    from datasets import Dataset

    if format == "parquet":
        import pyarrow.parquet

        rows = pyarrow.parquet.read_table(path).to_pylist()
    elif format == "jsonl":
        import json

        rows = [json.loads(line) for line in path.read_text(encoding="utf-8").split("\n") if line]
    else:
        rows = Dataset.from_file(str(path), in_memory=True).to_list()
    return list(rows)


def _write_arrow(path: Path, table: Any) -> None:
    """Write the stream format of Arrow, which ``load_dataset`` reads from a folder."""
    import pyarrow

    data = table.data.table
    with pyarrow.OSFile(str(path), "wb") as sink, pyarrow.ipc.new_stream(sink, data.schema) as out:
        out.write_table(data)


def _sync(path: Path) -> None:
    # A power cut after the rename must not leave an empty file under the final name.
    with path.open("rb") as file:
        os.fsync(file.fileno())


@contextmanager
def _quiet() -> Iterator[None]:
    """Keep ``datasets`` from showing a progress bar per part beside the export's own."""
    from datasets.utils import (
        are_progress_bars_disabled,
        disable_progress_bars,
        enable_progress_bars,
    )

    before = are_progress_bars_disabled()
    disable_progress_bars()
    try:
        yield
    finally:
        if not before:
            enable_progress_bars()
