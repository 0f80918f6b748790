"""The file of a finished group: its rollouts' records as JSON, which become entries of the log.

A record is condensed and turned into JSON once, when its group ends. Each has two lines::

    {"sample": {...}, "messages": 2, "crc": 305419896}    the small fields, which are read again
    "messages": [...], "events": [...], ...               the rest, which a log takes as it is

:class:`StoredSample` has the small fields, and is written with all of them.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any
from zlib import crc32

from inspect_ai.log import EvalSample, EvalSampleSummary
from pydantic import (
    PrivateAttr,
    SerializationInfo,
    SerializerFunctionWrapHandler,
    model_serializer,
)
from pydantic_core import PydanticSerializationError, from_json, to_json

from inspect_tinker_plugin import inspect_internals as internals
from inspect_tinker_plugin.logs.condensing import condensed

_LARGE = frozenset({"events", "events_data", "attachments", "messages", "store"})
_CHANGED = ("epoch", "metadata", "scores")
"""What the log of a batch adds to the records of its groups."""


class StoredSample(EvalSample):
    """A record without its large fields; as JSON, in a log, it has them.

    Only ``epoch``, ``metadata`` and ``scores`` may be changed.
    """

    _small: dict[str, Any] = PrivateAttr()
    _rest: bytes = PrivateAttr()
    _message_count: int = PrivateAttr()

    @model_serializer(mode="wrap")
    def _whole(
        self, small: SerializerFunctionWrapHandler, info: SerializationInfo
    ) -> dict[str, Any]:
        if info.mode != "json":
            fields: dict[str, Any] = small(self)
            return fields
        return {**self._small, **self._changed(), **from_json(b"{%b}" % self._rest)}

    def summary(self) -> EvalSampleSummary:
        """Summarise the record, all of its messages counted."""
        summary = super().summary()
        summary.message_count = self._message_count
        return summary

    def to_json(self) -> bytes:
        """Return the record as it is in a log, with all of its fields."""
        return b"%b,%b}" % (_json({**self._small, **self._changed()})[:-1], self._rest)

    def _changed(self) -> dict[str, Any]:
        fields = ((name, getattr(self, name)) for name in _CHANGED)
        return {name: value for name, value in fields if value is not None}


def write_part(path: Path, records: Sequence[EvalSample]) -> None:
    """Write the records of a group.

    Raises:
        OSError: They cannot be written.
    """
    path.write_bytes(b"".join(_lines(record) for record in records))


def _lines(record: EvalSample) -> bytes:
    fields = condensed(record)
    small = {name: value for name, value in fields.items() if name not in _LARGE}
    large = {name: value for name, value in fields.items() if name in _LARGE}
    if any(score.get("answer") for score in small.get("scores", {}).values()):
        large["output"] = small.pop("output")  # it is read again for want of an answer
    rest = _json(large)[1:-1]
    about = {"sample": small, "messages": len(fields["messages"]), "crc": crc32(rest)}
    return b"%b\n%b\n" % (_json(about), rest)


def read_part(path: Path) -> list[EvalSample]:
    """Read the records of a group, to be written to a log.

    Raises:
        OSError: The file cannot be read.
        ValueError: It is damaged.
    """
    lines = path.read_bytes().split(b"\n")
    if lines.pop() or len(lines) % 2:
        raise ValueError("its last record is not complete")
    return [_read(*two) for two in zip(lines[::2], lines[1::2], strict=True)]


def _read(line: bytes, rest: bytes) -> StoredSample:
    about = from_json(line)
    if not isinstance(about, dict) or about.get("crc") != crc32(rest):
        raise ValueError("a record is damaged")
    small = about["sample"]
    sample = StoredSample.model_validate(dict(small))
    sample._small, sample._rest, sample._message_count = small, rest, about["messages"]
    return sample


def _json(fields: Mapping[str, Any]) -> bytes:
    """Return JSON values as JSON; what is not valid text is written as Inspect does."""
    try:
        return to_json(fields, exclude_none=True, fallback=lambda _: None)
    except PydanticSerializationError:
        return internals.to_json_safe(fields, indent=None)
