"""The files of an export, written some rows at a time through ``datasets``, and its card.

The card, ``README.md``, tells ``load_dataset`` (and the Hugging Face Hub) the schema. JSON lines
need it: their reader guesses types from the first lines, and a key that is null there would have no
type for the lines that follow.
"""

from __future__ import annotations

import os
import uuid
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import IO, TYPE_CHECKING, Any, Literal, get_args

from inspect_tinker_plugin.export.layouts import Row, Schema

if TYPE_CHECKING:
    from datasets import Features

Format = Literal["parquet", "jsonl", "arrow"]
FORMATS: tuple[Format, ...] = get_args(Format)

CHUNK_ROWS = 1_000
CHUNK_BYTES = 8 * 1024 * 1024
"""Rows that are written together: as many of either."""

FILE_BYTES = 256 * 1024 * 1024
"""Size of the rows of a file, before they are compressed; with more, another file begins."""


class SplitFiles:
    """The files of a split, written one after the other.

    Args:
        path: Path of the files, without their numbers.
        format: File format.
        schema: Columns.
        rich: Whether messages have all the keys of the schema.
    """

    def __init__(self, path: Path, *, format: Format, schema: Schema, rich: bool) -> None:
        self.paths: list[Path] = []
        self._path = path
        self._format = format
        self._schema = schema
        self._rich = rich
        self._file: IO[bytes] | None = None
        self._tables: Any = None
        self._chunk: list[Row] = []
        self._chunk_bytes = 0
        self._file_bytes = 0

    def add(self, row: Row, size: int) -> None:
        """Append a row of so many bytes."""
        self._chunk.append(row)
        self._chunk_bytes += size
        self._file_bytes += size
        if self._file_bytes >= FILE_BYTES:
            self.close()
        elif len(self._chunk) >= CHUNK_ROWS or self._chunk_bytes >= CHUNK_BYTES:
            self._write()

    def close(self) -> None:
        """Complete the last file; it is on the disk when this returns."""
        if self._chunk:
            self._write()
        if self._tables is not None:
            self._tables.close()
        if self._file is not None:
            self._file.flush()
            os.fsync(self._file.fileno())
            self._file.close()
        self._file = self._tables = None
        self._file_bytes = 0

    def _open(self) -> IO[bytes]:
        import pyarrow
        import pyarrow.parquet

        path = self._path.with_name(f"{self._path.name}-{len(self.paths)}")
        self.paths.append(path)
        file = path.open("wb")
        columns = self._schema.features(rich=self._rich).arrow_schema
        if self._format == "parquet":
            self._tables = pyarrow.parquet.ParquetWriter(file, columns)
        elif self._format == "arrow":
            # The stream format of Arrow, which `load_dataset` reads from a folder.
            self._tables = pyarrow.ipc.new_stream(file, columns)
        return file

    def _write(self) -> None:
        import pyarrow
        from datasets import Dataset

        self._file = self._file or self._open()
        schema, rich = self._schema, self._rich
        written, read = schema.written(rich=rich), schema.features(rich=rich)
        rows = [{name: row.get(name) for name in schema.columns} for row in self._chunk]
        table = Dataset.from_list(rows, features=written)
        with _quiet():
            if written != read:
                table = table.cast(read)
            if self._tables is None:
                table.to_json(self._file, lines=True, force_ascii=False)
            else:
                self._tables.write_table(table.data.table)
        self._chunk.clear()
        self._chunk_bytes = 0
        del table
        # Otherwise Arrow keeps the memory for a while, and takes more.
        pyarrow.default_memory_pool().release_unused()


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


def write_card(title: str, about: str, *, features: Features, files: Mapping[str, str]) -> str:
    """Write the card of an export.

    Args:
        title: Its heading.
        about: What the rows are.
        features: Types of the columns.
        files: A pattern of file names for each split.
    """
    import yaml

    splits = [{"split": split, "path": pattern} for split, pattern in files.items()]
    head: dict[str, Any] = {
        "configs": [
            {
                "config_name": "default",
                "data_files": splits,
                # `load_dataset` keeps what it read of a folder under the folder's last name and a
                # hash of this card, and would take another export of that name for the same.
                "description": f"export {uuid.uuid4().hex}",
            }
        ],
        "dataset_info": {"features": _fields(features)},
    }
    return (
        f"---\n{yaml.safe_dump(head, sort_keys=False)}---\n\n# {title}\n\n{about}\n"
        "`export.json` says how it was made.\n"
    )


def _fields(struct: Any) -> list[dict[str, Any]]:
    return [{"name": name, **_type(of)} for name, of in struct.items()]


def _type(of: Any) -> dict[str, Any]:
    from datasets import List

    if isinstance(of, List):
        inner = of.feature
        return {"list": _fields(inner)} if isinstance(inner, dict) else {"list": inner.dtype}
    if isinstance(of, dict):
        return {"struct": _fields(of)}
    return {"dtype": getattr(of, "dtype", None) or type(of).__name__.lower()}  # Json has none
