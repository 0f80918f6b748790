"""Inspects the code of scorers: its functions and files; and shifts the clock that it sees."""

from __future__ import annotations

import datetime as dates
import re
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from types import CodeType, FunctionType, ModuleType
from typing import Any

_FOREIGN = ("inspect_ai", "inspect_tinker_plugin")
_FILE = re.compile(r"(?:[\w.-]+/|/)*[\w-]+\.(?:json|jsonl|txt|log|xml|csv|ya?ml|out|result|md)")


def functions_of(scorers: Sequence[object]) -> Iterator[FunctionType]:
    """Yield the functions that scorers consist of, including those that they close over.

    Those of Inspect and of this package are left out.
    """
    waiting, seen = list(scorers), set[int]()
    while waiting:
        each = waiting.pop()
        if id(each) in seen:
            continue
        seen.add(id(each))
        wrapped = getattr(each, "__wrapped__", None)
        if wrapped is not None:
            waiting.append(wrapped)
        if not isinstance(each, FunctionType):
            each = vars(type(each)).get("__call__")
        if isinstance(each, FunctionType):
            if (each.__module__ or "").split(".")[0] not in _FOREIGN:
                yield each
            waiting += [cell.cell_contents for cell in each.__closure__ or () if _filled(cell)]


def files_named(scorers: Sequence[object]) -> list[str]:
    """Return names of data files in the code of scorers, or in their arguments."""
    found: dict[str, None] = {}
    for function in functions_of(scorers):
        given = [
            cell.cell_contents
            for cell in function.__closure__ or ()
            if _has(cell) and isinstance(cell.cell_contents, str)
        ]
        for text in [*given, *_texts(function.__code__)]:
            if _FILE.fullmatch(text):
                found[text] = None
    return list(found)


def _texts(code: CodeType) -> Iterator[str]:
    for constant in code.co_consts:
        if isinstance(constant, str):
            yield constant
        elif isinstance(constant, CodeType):
            yield from _texts(constant)


def _has(cell: Any) -> bool:
    try:
        _ = cell.cell_contents
    except ValueError:
        return False
    return True


def _filled(cell: Any) -> bool:
    return _has(cell) and callable(cell.cell_contents)


@contextmanager
def shifted_clock(scorers: Sequence[object], seconds: float) -> Iterator[None]:
    """Shift the time that the scorers' modules see; nothing else in the process is affected.

    Names in a module that stand for `time`, `datetime` or their functions are replaced for the
    duration; what a scorer reads through another package keeps the real time.
    """
    replaced: list[tuple[dict[str, Any], str, Any]] = []
    spaces = {id(f.__globals__): f.__globals__ for f in functions_of(scorers)}
    for space in spaces.values():
        for name, value in list(space.items()):
            other = _shifted(value, seconds)
            if other is not None:
                replaced.append((space, name, value))
                space[name] = other
    try:
        yield
    finally:
        for space, name, value in replaced:
            space[name] = value


def _shifted(value: object, seconds: float) -> object:
    """Return a stand-in for a clock that is this many seconds off; ``None`` for anything else."""
    if value is time:
        return _Module(time, {"time": lambda: time.time() + seconds, **_structs(seconds)})
    if value is dates:
        return _Module(dates, {"datetime": _datetime(seconds), "date": _date(seconds)})
    if value is dates.datetime:
        return _datetime(seconds)
    if value is dates.date:
        return _date(seconds)
    if value is time.time:
        return lambda: time.time() + seconds
    return None


def _structs(seconds: float) -> dict[str, Any]:
    def moved(function: Callable[..., Any]) -> Callable[..., Any]:
        return lambda at=None: function(time.time() + seconds if at is None else at)

    return {
        "localtime": moved(time.localtime),
        "gmtime": moved(time.gmtime),
        "time_ns": lambda: time.time_ns() + int(seconds * 1e9),
        "strftime": lambda form, at=None: time.strftime(
            form, time.localtime(time.time() + seconds) if at is None else at
        ),
    }


class _Module(ModuleType):
    """A module with some names replaced."""

    def __init__(self, real: ModuleType, others: Mapping[str, Any]) -> None:
        super().__init__(real.__name__)
        self.__dict__.update(others)
        self._real = real

    def __getattr__(self, name: str) -> Any:
        return getattr(self._real, name)


def _datetime(seconds: float) -> type:
    class Moved(dates.datetime):
        @classmethod
        def now(cls, tz: dates.tzinfo | None = None) -> Any:
            return dates.datetime.now(tz) + dates.timedelta(seconds=seconds)

        @classmethod
        def utcnow(cls) -> Any:
            now = dates.datetime.now(dates.UTC).replace(tzinfo=None)
            return now + dates.timedelta(seconds=seconds)

        @classmethod
        def today(cls) -> Any:
            return dates.datetime.now() + dates.timedelta(seconds=seconds)

    return Moved


def _date(seconds: float) -> type:
    class Moved(dates.date):
        @classmethod
        def today(cls) -> Any:
            return (dates.datetime.now() + dates.timedelta(seconds=seconds)).date()

    return Moved
