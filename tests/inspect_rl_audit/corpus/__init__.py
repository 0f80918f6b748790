"""Small tasks with planted defects, and a few without any."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

from inspect_ai import Task


@dataclass(frozen=True)
class Planted:
    """A task with defects, and the codes that the audit has to find them under."""

    name: str
    codes: tuple[str, ...]
    make: Callable[[], Task]
    options: dict[str, Any] = field(default_factory=dict)
    docker: bool = False


CORPUS: list[Planted] = []


def planted(
    *codes: str, docker: bool = False, **options: Any
) -> Callable[[Callable[[], Task]], Callable[[], Task]]:
    """Put a task into the corpus."""

    def add(make: Callable[[], Task]) -> Callable[[], Task]:
        CORPUS.append(Planted(make.__name__, codes, make, options, docker))
        return make

    return add


ELSEWHERE = {
    "near-duplicates-unchecked": "test_audit.py::test_a_missing_extra_is_reported",
    "probe-failed": "test_audit.py::test_a_probe_that_fails_stops_no_other",
}
"""Codes that say nothing about a task, so no task can show them; with the tests that do."""
