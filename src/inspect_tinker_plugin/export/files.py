"""The files of an export, written from its journal through ``datasets``, and its card.

The card, ``README.md``, tells ``load_dataset`` (and the Hugging Face Hub) the schema. JSON lines
need it: their reader guesses types from the first lines, and a key that is null there would have no
type for the lines that follow.
"""

from __future__ import annotations

import os
import shutil
import uuid
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any

from inspect_tinker_plugin.export.layouts import Row
from inspect_tinker_plugin.export.options import Format
from inspect_tinker_plugin.processes import Journal

if TYPE_CHECKING:
    from datasets import Features

FILE_BYTES = 256 * 1024 * 1024
"""Size of the rows of a file, before they are compressed; with more, there are several files."""

CHUNK_ROWS = 100
"""Rows that are converted together."""


def write_split(
    journal: Journal, split: str, features: Features, format: Format
) -> tuple[list[Path], int]:
    """Write the rows of a split into files beside the journal, and return these and the rows."""
    from datasets import Dataset

    folder = journal.path.parent
    cache = folder / "cache"
    shutil.rmtree(cache, ignore_errors=True)
    with hide_bars():
        rows: Any = Dataset.from_generator(
            _read_rows,
            gen_kwargs={"path": journal.path, "split": split},
            features=features,
            cache_dir=str(cache),
            writer_batch_size=CHUNK_ROWS,
        )
        total = min(len(rows), -(-rows.data.nbytes // FILE_BYTES))
        paths = [folder / f"file-{split}-{number}" for number in range(total)]
        for number, path in enumerate(paths):
            _write_file(rows.shard(total, number, contiguous=True), path, format)
    return paths, len(rows)


def _read_rows(path: Path, split: str) -> Iterator[Row]:
    """Yield the rows of a split; ``datasets`` calls this once more for each split."""
    for record, _ in Journal(path).read():
        if record.get("split") == split:
            yield record["row"]


def _write_file(rows: Any, path: Path, format: Format) -> None:
    with path.open("wb") as file:
        if format == "parquet":
            rows.to_parquet(file)
        elif format == "jsonl":
            rows.to_json(file, batch_size=CHUNK_ROWS, lines=True, force_ascii=False)
        else:
            import pyarrow

            # The stream format of Arrow, which `load_dataset` reads from a folder.
            with pyarrow.ipc.new_stream(file, rows.features.arrow_schema) as tables:
                for table in rows.with_format("arrow").iter(CHUNK_ROWS):
                    tables.write_table(table)
        file.flush()
        os.fsync(file.fileno())


@contextmanager
def hide_bars() -> Iterator[None]:
    """Keep ``datasets`` from showing progress bars of its own."""
    from datasets import disable_progress_bars, enable_progress_bars, is_progress_bar_enabled

    shown = is_progress_bar_enabled()
    disable_progress_bars()
    try:
        yield
    finally:
        if shown:
            enable_progress_bars()


def write_card(title: str, about: str, *, features: Features, files: Mapping[str, str]) -> str:
    """Write the card of an export."""
    from datasets import DatasetInfo
    from datasets.info import DatasetInfosDict
    from huggingface_hub import DatasetCardData

    splits = [{"split": split, "path": pattern} for split, pattern in files.items()]
    # `load_dataset` keeps what it read of a folder under the folder's last name and a hash of this
    # card, and would take another export of that name for the same.
    config = {"data_files": splits, "description": f"export {uuid.uuid4().hex}"}
    head = DatasetCardData(configs=[{"config_name": "default", **config}])
    DatasetInfosDict({"default": DatasetInfo(features=features)}).to_dataset_card_data(head)
    return f"---\n{head}\n---\n\n# {title}\n\n{about}\n`export.json` says how it was made.\n"
