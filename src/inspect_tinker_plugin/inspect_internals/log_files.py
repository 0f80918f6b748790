"""Reads headers and summaries of ``.eval`` logs from the files themselves.

Inspect reads a header in milliseconds, with an event loop per log, and all summaries of a log
together, with their inputs: too slow for folders of tens of thousands of logs, and a hundred
megabytes for a log of some ten thousand samples. What is not a finished log on this machine is
left to Inspect.
"""

from __future__ import annotations

import io
import json
import re
import zipfile
from collections.abc import Collection, Iterator
from contextlib import suppress
from dataclasses import dataclass
from typing import IO, Any

from inspect_ai.log import (
    EvalSampleSummary,
    EvalSpec,
    read_eval_log,
    read_eval_log_sample_summaries,
)

_NOT_HERE = (OSError, zipfile.BadZipFile, NotImplementedError, KeyError)
"""Errors after which Inspect is asked: the log is elsewhere, unfinished, or of another release."""


@dataclass(frozen=True)
class Header:
    """The header of a log, without its results."""

    eval: EvalSpec
    status: str


def read_header(path: str) -> Header:
    """Read a header.

    Raises:
        Exception: The log cannot be read, for whatever reason Inspect has.
    """
    with suppress(*_NOT_HERE, ValueError), zipfile.ZipFile(path) as log:
        found = json.loads(log.read("header.json"))
        return Header(EvalSpec.model_validate(found["eval"]), found["status"])
    header = read_eval_log(path, header_only=True)
    return Header(header.eval, header.status)


def read_summaries(path: str, fields: Collection[str]) -> Iterator[EvalSampleSummary]:
    """Read the summaries of a log, one at a time if it can be.

    Args:
        path: The log.
        fields: The fields that are read for certain. A sample may have several summaries, of
            which the last is true.

    Raises:
        Exception: The log cannot be read, for whatever reason Inspect has.
    """
    with suppress(*_NOT_HERE), zipfile.ZipFile(path) as log:
        with log.open("summaries.json") as file:
            for item in json_items(io.TextIOWrapper(file, encoding="utf-8")):
                used = {name: item[name] for name in fields if name in item}
                yield EvalSampleSummary.model_validate({**used, "input": "", "target": ""})
        return
    yield from read_eval_log_sample_summaries(path)


def json_items(text: IO[str], at_once: int = 1 << 16) -> Iterator[Any]:
    """Parse a JSON list one item at a time.

    Args:
        text: The list.
        at_once: Characters that are read at a time, at least.

    Raises:
        ValueError: It is no list, or it is cut off.
    """
    decode = json.JSONDecoder().raw_decode
    buffer = text.read(at_once)
    if not buffer.startswith("["):
        raise ValueError("a list was expected")
    place = 1
    while True:
        match = _BETWEEN.match(buffer, place)
        assert match is not None
        place = match.end()
        if buffer.startswith("]", place):
            return
        try:
            item, place = decode(buffer, place)
        except ValueError:
            more = text.read(max(at_once, len(buffer) - place))
            if not more:
                raise
            buffer, place = buffer[place:] + more, 0
        else:
            yield item


_BETWEEN = re.compile(r"[\s,]*")
