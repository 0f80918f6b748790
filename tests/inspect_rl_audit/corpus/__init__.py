"""Small tasks with one planted defect each, and a few without any."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

from inspect_ai import Task


@dataclass(frozen=True)
class Planted:
    """A task with a defect, and the code that the audit has to find it under."""

    code: str
    make: Callable[[], Task]
    options: dict[str, Any] = field(default_factory=dict)
    docker: bool = False

    @property
    def id(self) -> str:
        return f"{self.make.__name__}-{self.code}"


CORPUS: list[Planted] = []


def planted(
    code: str, *, docker: bool = False, **options: Any
) -> Callable[[Callable[[], Task]], Callable[[], Task]]:
    """Put a task into the corpus."""

    def add(make: Callable[[], Task]) -> Callable[[], Task]:
        CORPUS.append(Planted(code, make, options, docker))
        return make

    return add


ELSEWHERE = {
    "near-duplicates-unchecked": "test_audit.py::test_a_missing_extra_is_reported",
    "probe-failed": "test_audit.py::test_a_probe_that_raises_stops_no_other",
}
"""Codes that say nothing about a task, so no task can show them; with the tests that do."""
