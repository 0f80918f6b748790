"""The schema of an export's files, which never depends on data, and the file formats.

Parts are written and read back through ``datasets``.
"""

from __future__ import annotations

import json
import os
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from itertools import islice
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal, get_args

from inspect_tinker_plugin.contracts.errors import ConfigError

if TYPE_CHECKING:
    from datasets import Features

Row = Mapping[str, Any]
"""A row: its values by column."""

Kind = Literal[
    "text", "json", "int", "float", "bool", "messages", "comparison", "verl_reward", "verl_info"
]
"""The type of a column; ``json`` is text in the files, and parsed by ``datasets``."""

RICH_KEYS = ("reasoning_content", "tool_calls", "tool_call_id", "name")
"""Keys of a message beside role and content; only in exports where a message needs them."""

_STRUCTS: dict[str, dict[str, str]] = {
    "verl_reward": {"style": "text", "ground_truth": "text"},
    "verl_info": {"index": "int", "id": "text", "info": "text"},
}
_TEXTS = ("text", "json")
_COMPARED = ("prompt_conversation", "completion_A", "completion_B")


@dataclass(frozen=True)
class Schema:
    """Columns and types of an export.

    Messages have :data:`RICH_KEYS` in all files of an export or in none: chat templates tell an
    assistant message with tool calls by the presence of the key, so plain exports do without.
    """

    columns: Mapping[str, Kind]
    """The columns in their order."""

    flat_calls: bool = False
    """Whether a tool call has name and arguments beside its id, and not in ``function``."""

    marked: bool = False
    """Whether each message says in ``trainable`` if it is to be trained on."""

    def features(self, *, rich: bool) -> Features:
        """Return the types that ``datasets`` reads.

        Raises:
            ConfigError: The installed ``datasets`` is too old for one of them.
        """
        return self._features(_json_value() if "json" in self.columns.values() else None, rich)

    def written(self, *, rich: bool) -> Features:
        """Return the types that rows have before they are cast: JSON is text."""
        return self._features(_value("text"), rich)

    def _features(self, json: Any, rich: bool) -> Features:
        from datasets import Features, List

        messages = List(self._message(rich=rich))
        kinds: dict[str, Any] = {
            **{kind: _value(kind) for kind in ("text", "int", "float", "bool")},
            **{
                kind: {name: _value(of) for name, of in struct.items()}
                for kind, struct in _STRUCTS.items()
            },
            "json": json,
            "messages": messages,
            "comparison": dict.fromkeys(_COMPARED, messages),
        }
        return Features({name: kinds[kind] for name, kind in self.columns.items()})

    def is_rich(self, row: Row) -> bool:
        """Whether a message of a row has any of :data:`RICH_KEYS`."""
        return any(
            key in message
            for messages in self._conversations(row)
            for message in messages
            for key in RICH_KEYS
        )

    def widened(self, row: Row) -> dict[str, Any]:
        """Give every message of a row all the keys of the rich schema."""
        empty = dict.fromkeys(RICH_KEYS)

        def wide(messages: list[dict[str, Any]]) -> list[dict[str, Any]]:
            return [{**empty, **message} for message in messages]

        made = dict(row)
        for name, kind in self.columns.items():
            if kind == "messages":
                made[name] = wide(row[name])
            elif kind == "comparison":
                made[name] = {part: wide(row[name][part]) for part in _COMPARED}
        return made

    def size(self, row: Row) -> int:
        """Estimate the size of a row in bytes."""
        texts = sum(len(row[name] or "") for name, kind in self.columns.items() if kind in _TEXTS)
        return texts + sum(
            len(message["content"]) for part in self._conversations(row) for message in part
        )

    def _conversations(self, row: Row) -> Iterator[list[dict[str, Any]]]:
        for name, kind in self.columns.items():
            if kind == "messages":
                yield row[name]
            elif kind == "comparison":
                yield from (row[name][part] for part in _COMPARED)

    def _message(self, *, rich: bool) -> dict[str, Any]:
        from datasets import List

        text = _value("text")
        message: dict[str, Any] = {"role": text, "content": text}
        if self.marked:
            message["trainable"] = _value("bool")
        if rich:
            function = {"name": text, "arguments": text}
            named = function if self.flat_calls else {"function": function}
            message |= {
                "reasoning_content": text,
                "tool_calls": List({"id": text, "type": text, **named}),
                "tool_call_id": text,
                "name": text,
            }
        return message


def _value(kind: str) -> Any:
    from datasets import Value

    types = {"text": "string", "int": "int64", "float": "float64", "bool": "bool"}
    return Value(types[kind])


def _json_value() -> Any:
    try:
        from datasets import Json
    except ImportError as error:
        raise ConfigError(
            "this layout needs datasets 4.7 or newer, as its trainer does: pip install -U datasets"
        ) from error
    return Json()


Format = Literal["parquet", "jsonl", "arrow"]
FORMATS: tuple[Format, ...] = get_args(Format)


CHUNK_ROWS = 100
"""Rows that are read back at a time."""


class PartWriter:
    """Writes one file, some rows at a time; it appears complete or not at all.

    Args:
        path: The file.
        format: File format.
        schema: Its columns.
        rich: Whether messages have all the keys of the schema.
    """

    def __init__(self, path: Path, *, format: Format, schema: Schema, rich: bool) -> None:
        self._path = path
        self._partial = path.with_name(path.name + ".partial")
        self._format = format
        self._schema = schema
        self._rich = rich
        self._begin()

    def _begin(self) -> None:
        import pyarrow
        import pyarrow.parquet

        self._file = self._partial.open("wb")
        columns = self._schema.features(rich=self._rich).arrow_schema
        if self._format == "parquet":
            self._tables: Any = pyarrow.parquet.ParquetWriter(self._file, columns)
        elif self._format == "arrow":
            # The stream format of Arrow, which ``load_dataset`` reads from a folder.
            self._tables = pyarrow.ipc.new_stream(self._file, columns)
        else:
            self._tables = None

    def write(self, rows: Sequence[Row]) -> None:
        """Append rows."""
        import pyarrow
        from datasets import Dataset

        schema, rich = self._schema, self._rich
        written, read = schema.written(rich=rich), schema.features(rich=rich)
        given = (schema.widened(row) if rich else row for row in rows)
        ordered = [{name: row.get(name) for name in schema.columns} for row in given]
        chunk = Dataset.from_list(ordered, features=written)
        with _quiet():
            if written != read:
                chunk = chunk.cast(read)
            if self._tables is None:
                chunk.to_json(self._file, lines=True, force_ascii=False)
            else:
                self._tables.write_table(chunk.data.table)
        del chunk
        # Otherwise Arrow keeps the memory for a while, and takes more.
        pyarrow.default_memory_pool().release_unused()

    def widen(self) -> None:
        """Rewrite what was appended in the rich schema, in which everything else will be too."""
        self._end()
        plain = self._path.with_name(self._path.name + ".plain")
        self._partial.replace(plain)
        self._rich = True
        self._begin()
        for rows in read_chunks(plain, format=self._format):
            self.write(rows)
        plain.unlink()

    def close(self) -> None:
        """Complete the file and give it its name."""
        self._end()
        # A power cut after the rename must not leave an empty file under the final name.
        with self._partial.open("rb") as file:
            os.fsync(file.fileno())
        self._partial.replace(self._path)

    def discard(self) -> None:
        """Remove what was appended."""
        with suppress(OSError):
            self._end()
        self._partial.unlink(missing_ok=True)

    def _end(self) -> None:
        try:
            if self._tables is not None:
                self._tables.close()
        finally:
            self._file.close()


def read_chunks(path: Path, *, format: Format) -> Iterator[list[Row]]:
    """Read the rows of a file with messages that a :class:`PartWriter` wrote, some at a time."""
    import pyarrow
    import pyarrow.parquet

    if format == "parquet":
        with pyarrow.parquet.ParquetFile(path) as file:
            for batch in file.iter_batches(CHUNK_ROWS):
                yield batch.to_pylist()
    elif format == "arrow":
        with pyarrow.OSFile(str(path), "rb") as source, pyarrow.ipc.open_stream(source) as stream:
            for batch in stream:
                yield batch.to_pylist()
    else:
        with path.open(encoding="utf-8", newline="\n") as lines:
            while chunk := list(islice(lines, CHUNK_ROWS)):
                yield [json.loads(line) for line in chunk]


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
