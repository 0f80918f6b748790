"""Inspects the code of scorers: the functions that they consist of, and the files they name."""

from __future__ import annotations

import re
from collections.abc import Iterator, Sequence
from types import CodeType, FunctionType
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
