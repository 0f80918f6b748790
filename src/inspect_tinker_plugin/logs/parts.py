"""The file of a finished group: one line of JSON per rollout, which becomes its entry in the log.

A record is condensed and turned into JSON once, when its group ends. The log of a batch takes the
lines as they are, so that events and messages are not made into objects again:
:class:`StoredSample` has the small fields of a record, and is written with all of them.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

from inspect_ai.log import EvalSample, EvalSampleSummary, condense_sample
from pydantic import (
    PrivateAttr,
    SerializationInfo,
    SerializerFunctionWrapHandler,
    model_serializer,
)
from pydantic_core import from_json

from inspect_tinker_plugin import inspect_internals as internals

_LARGE = frozenset({"events", "events_data", "attachments", "messages", "store"})
_CHANGED = ("epoch", "metadata", "scores")
"""What the log of a batch adds to the records of its groups."""


class StoredSample(EvalSample):
    """A record without its large fields; as JSON, in a log, it has them.

    Only ``epoch``, ``metadata`` and ``scores`` may be changed.
    """

    _stored: dict[str, Any] = PrivateAttr()

    @model_serializer(mode="wrap")
    def _whole(
        self, small: SerializerFunctionWrapHandler, info: SerializationInfo
    ) -> dict[str, Any]:
        if info.mode != "json":
            fields: dict[str, Any] = small(self)
            return fields
        return {**self._stored, **{name: getattr(self, name) for name in _CHANGED}}

    def summary(self) -> EvalSampleSummary:
        """Summarise the record, all of its messages counted."""
        summary = super().summary()
        summary.message_count = len(self._stored.get("messages", ()))
        return summary


def write_part(path: Path, records: Sequence[EvalSample]) -> None:
    """Write the records of a group.

    Raises:
        OSError: They cannot be written.
    """
    with path.open("wb") as file:
        for record in records:
            file.write(internals.to_json_safe(condense_sample(record), indent=None))
            file.write(b"\n")


def read_part(path: Path) -> list[EvalSample]:
    """Read the records of a group, to be written to a log.

    Raises:
        OSError: The file cannot be read.
        ValueError: It is damaged.
    """
    samples: list[EvalSample] = []
    for line in path.read_bytes().splitlines():
        stored = from_json(line)
        if not isinstance(stored, dict):
            raise ValueError("a line is no record")
        fields = {name: value for name, value in stored.items() if name not in _LARGE}
        sample = StoredSample.model_validate(fields)
        sample._stored = stored
        samples.append(sample)
    return samples
