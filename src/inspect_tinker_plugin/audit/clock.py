"""Shows a scorer's own modules another time of day; nothing else is affected."""

from __future__ import annotations

import datetime as dates
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from types import ModuleType
from typing import Any

from inspect_tinker_plugin.audit.scorer_code import functions_of


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
