"""The schema of an export's files, which never depends on data, and the file formats.

Parts are written and read back through ``datasets``.
"""

from __future__ import annotations

import os
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal, get_args

from inspect_tinker_plugin.errors import ConfigError

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
