"""The files of rollouts: one per finished group, and the ``.eval`` log of a batch made of them.

A record is condensed by Inspect and turned into JSON once, when its group ends. Each has two lines
in the file of its group::

    {"sample": {...}, "messages": 2, "crc": 305419896}    the small fields, which are read again
    "messages": [...], "events": [...], ...               the rest, which a log takes as it is

Inspect's recorder would turn each record into objects and condense it again, which doubles the CPU
time of a short episode. The entries of a log are those that the recorder makes.
"""

from __future__ import annotations

import os
import textwrap
import time
import zipfile
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any
from zlib import crc32

import zstandard
from inspect_ai.log import EvalLog, EvalSample, EvalSampleSummary, condense_sample
from inspect_ai.scorer import Score
from pydantic import PrivateAttr
from pydantic_core import PydanticSerializationError, from_json, to_json, to_jsonable_python

from inspect_tinker_plugin import inspect_internals as internals
from inspect_tinker_plugin.contracts.wording import all_spelt_out

_LARGE = frozenset({"events", "events_data", "attachments", "messages", "store"})
_CHANGED = ("epoch", "metadata", "scores")
"""What the log of a batch adds to the records of its groups."""

_VERSION = 2
"""The version of the log format whose entries are written here."""

_ZSTANDARD = 93
_LEVEL = 3
_FRAME = 200 * 2**20
"""Bytes per frame: the viewer cannot read a larger one."""

_SHOWN = 1024
"""Characters of a text, and bytes of an entry of metadata, that a summary shows."""

_LOOKED_AT = 8 * _SHOWN


class StoredSample(EvalSample):
    """A record without its large fields, which are in the log all the same.

    Only ``epoch``, ``metadata`` and ``scores`` may be changed.
    """

    _small: dict[str, Any] = PrivateAttr()
    _rest: bytes = PrivateAttr()
    _message_count: int = PrivateAttr()

    def summary(self) -> EvalSampleSummary:
        """Summarise as Inspect does, without its way to cut texts, of which few are long."""
        bare = self.model_copy(update={"scores": None, "metadata": {}})
        summary = EvalSample.summary(bare)
        summary.message_count = self._message_count
        summary.metadata = _thin(self.metadata)
        if self.scores is not None:
            summary.scores = {name: _thin_score(score) for name, score in self.scores.items()}
        return summary

    def to_json(self) -> bytes:
        """Return the record as it is in a log, with all of its fields."""
        changed = {name: getattr(self, name) for name in _CHANGED}
        known = {name: value for name, value in changed.items() if value is not None}
        return b"%b,%b}" % (_json({**self._small, **known})[:-1], self._rest)


def write_part(path: Path, records: Sequence[EvalSample]) -> None:
    """Write the records of a group.

    Raises:
        OSError: They cannot be written.
    """
    path.write_bytes(b"".join(_lines(record) for record in records))


def _lines(record: EvalSample) -> bytes:
    fields = _condense(record)
    small = {name: value for name, value in fields.items() if name not in _LARGE}
    large = {name: value for name, value in fields.items() if name in _LARGE}
    if any(score.get("answer") for score in small.get("scores", {}).values()):
        large["output"] = small.pop("output")  # it is read again for want of an answer
    rest = _json(large)[1:-1]
    about = {"sample": small, "messages": len(fields["messages"]), "crc": crc32(rest)}
    return b"%b\n%b\n" % (_json(about), rest)


def _condense(record: EvalSample) -> dict[str, Any]:
    """Return the fields of a record as JSON values, with long texts and messages kept once."""
    try:
        record = condense_sample(record)
    except PydanticSerializationError:  # half surrogate pairs in messages to the model
        record = condense_sample(EvalSample.model_validate(all_spelt_out(_jsonable(record))))
    fields: dict[str, Any] = _jsonable(record)
    return fields


def _jsonable(value: Any) -> Any:
    return to_jsonable_python(value, exclude_none=True, fallback=lambda _: None)


def read_part(path: Path) -> list[StoredSample]:
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


def write_log(header: EvalLog, samples: Sequence[StoredSample], path: Path) -> None:
    """Write the log of a batch, safely on disk when this returns.

    Args:
        header: All of the log but its samples.
        samples: Its samples.
        path: The file, which must not exist.

    Raises:
        OSError: It cannot be written.
    """
    start = {"version": _VERSION, "eval": header.eval, "plan": header.plan}
    summaries = _json_safe([sample.summary() for sample in samples])
    with path.open("xb") as file:
        with _Archive(file) as archive:
            archive.add("_journal/start.json", _json_safe(start))
            for sample in samples:
                archive.add(f"samples/{sample.id}_epoch_{sample.epoch}.json", sample.to_json())
            archive.add("_journal/summaries/1.json", summaries)
            archive.add("summaries.json", summaries)
            whole = header.model_copy(update={"version": _VERSION})
            archive.add("header.json", _json_safe(whole))
        file.flush()
        os.fsync(file.fileno())


class _Archive(zipfile.ZipFile):
    """A new archive, each entry of which is compressed in one go, by one compressor."""

    def __init__(self, file: Any) -> None:
        super().__init__(file, "w")
        self._compressor = zstandard.ZstdCompressor(level=_LEVEL)
        self._now = time.localtime()[:6]

    def add(self, name: str, content: bytes) -> None:
        """Add an entry."""
        entry = zipfile.ZipInfo(name, self._now)
        entry.compress_type = _ZSTANDARD
        entry.external_attr = 0o600 << 16
        frames = [content[at : at + _FRAME] for at in range(0, len(content), _FRAME)]
        compressed = b"".join(self._compressor.compress(frame) for frame in frames)
        entry.CRC = crc32(content)
        entry.file_size, entry.compress_size = len(content), len(compressed)
        entry.header_offset = self.start_dir
        assert self.fp is not None
        self.fp.write(entry.FileHeader())
        self.fp.write(compressed)
        self.start_dir = self.fp.tell()
        self.filelist.append(entry)
        self.NameToInfo[entry.filename] = entry


def _thin_score(score: Score) -> Score:
    texts = {name: getattr(score, name) for name in ("answer", "explanation", "reason")}
    thin = {name: _shorten(text) for name, text in texts.items() if isinstance(text, str)}
    metadata = None if score.metadata is None else _thin(score.metadata)
    return score.model_copy(update={**thin, "metadata": metadata, "history": []})


def _thin(metadata: Mapping[str, Any]) -> dict[str, Any]:
    return {name: _thin_value(value) for name, value in metadata.items()}


def _thin_value(value: Any) -> Any:
    if isinstance(value, str):
        return _shorten(value)
    if isinstance(value, int | float):
        return value
    large = len(internals.to_json_safe(value).decode()) > _SHOWN
    return "Key removed from summary (> 1k)" if large else value


def _shorten(text: str) -> str:
    words = " ".join(text[:_LOOKED_AT].split())
    return words if len(words) <= _SHOWN else textwrap.shorten(words, _SHOWN, placeholder="...")


def _json(fields: Mapping[str, Any]) -> bytes:
    """Return JSON values as JSON; what is not valid text is written as Inspect does."""
    try:
        return to_json(fields, exclude_none=True, fallback=lambda _: None)
    except PydanticSerializationError:
        return _json_safe(fields)


def _json_safe(value: Any) -> bytes:
    return internals.to_json_safe(value, indent=None)
