"""Writes the log of a batch as an ``.eval`` file, from the lines of its parts.

Inspect's recorder turns each record into objects, condenses it again, makes its summary and starts
twelve threads to compress it. Here a record's JSON goes into the file as it is. The entries of the
file are those that the recorder makes.
"""

from __future__ import annotations

import os
import textwrap
import time
import zipfile
from collections.abc import Mapping
from pathlib import Path
from typing import Any
from zlib import crc32

import zstandard
from inspect_ai.log import EvalLog, EvalSampleSummary
from inspect_ai.scorer import Score

from inspect_tinker_plugin import inspect_internals as internals
from inspect_tinker_plugin.logs.parts import StoredSample

_KNOWN_VERSION = 2
"""The version of the format whose entries are known here."""

_ZSTANDARD = 93
_LEVEL = 3
_FRAME = 200 * 2**20
"""Bytes per frame: the viewer cannot read a larger one."""

_SHOWN = 1024
"""Characters of a text, and bytes of an entry of metadata, that a summary shows."""

_LOOKED_AT = 8 * _SHOWN


def can_write(log: EvalLog) -> bool:
    """Whether all of a log is known here, so that it may be written without Inspect's recorder."""
    return (
        log.version == _KNOWN_VERSION
        and not log.reductions
        and all(isinstance(sample, StoredSample) for sample in log.samples or ())
    )


def write_eval_file(log: EvalLog, path: Path) -> None:
    """Write a log of stored samples, safely on disk when this returns.

    Raises:
        OSError: It cannot be written.
    """
    samples = [sample for sample in log.samples or () if isinstance(sample, StoredSample)]
    header = log.model_copy(update={"samples": None})
    start = {"version": log.version, "eval": log.eval, "plan": log.plan}
    summaries = _json([_summary(sample) for sample in samples])
    with path.open("wb") as file:
        with _Archive(file) as archive:
            archive.add("_journal/start.json", _json(start))
            for sample in samples:
                archive.add(f"samples/{sample.id}_epoch_{sample.epoch}.json", sample.to_json())
            archive.add("_journal/summaries/1.json", summaries)
            archive.add("summaries.json", summaries)
            archive.add("header.json", _json(header))
        file.flush()
        os.fsync(file.fileno())


def _json(value: Any) -> bytes:
    return internals.to_json_safe(value, indent=None)


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


def _summary(sample: StoredSample) -> EvalSampleSummary:
    """Summarise a sample as Inspect does, without its way to cut texts, of which few are long."""
    scores, metadata = sample.scores, sample.metadata
    summary = sample.model_copy(update={"scores": None, "metadata": {}}).summary()
    summary.metadata = _thin(metadata)
    if scores is not None:
        summary.scores = {name: _thin_score(score) for name, score in scores.items()}
    return summary


def _thin_score(score: Score) -> Score:
    texts = {name: getattr(score, name) for name in ("answer", "explanation", "reason")}
    thin = {name: _short(text) for name, text in texts.items() if isinstance(text, str)}
    metadata = None if score.metadata is None else _thin(score.metadata)
    return score.model_copy(update={**thin, "metadata": metadata, "history": []})


def _thin(metadata: Mapping[str, Any]) -> dict[str, Any]:
    return {name: _thin_value(value) for name, value in metadata.items()}


def _thin_value(value: Any) -> Any:
    if isinstance(value, str):
        return _short(value)
    if isinstance(value, int | float):
        return value
    large = len(internals.to_json_safe(value).decode()) > _SHOWN
    return "Key removed from summary (> 1k)" if large else value


def _short(text: str) -> str:
    words = " ".join(text[:_LOOKED_AT].split())
    return words if len(words) <= _SHOWN else textwrap.shorten(words, _SHOWN, placeholder="...")
