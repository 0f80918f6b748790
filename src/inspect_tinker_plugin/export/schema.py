"""The schema of an export's files: its columns and their types, which never depend on data."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Literal

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
