"""Small tasks with one planted defect each, and a few without any."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

from inspect_ai import Task


@dataclass(frozen=True)
class Planted:
    """A task with defects, and the codes that the audit has to find them under."""

    codes: tuple[str, ...]
    make: Callable[[], Task]
    options: dict[str, Any] = field(default_factory=dict)
    docker: bool = False

    @property
    def id(self) -> str:
        return f"{self.make.__name__}-{self.codes[0]}"


CORPUS: list[Planted] = []


def planted(
    *codes: str, docker: bool = False, **options: Any
) -> Callable[[Callable[[], Task]], Callable[[], Task]]:
    """Put a task into the corpus."""

    def add(make: Callable[[], Task]) -> Callable[[], Task]:
        CORPUS.append(Planted(codes, make, options, docker))
        return make

    return add


ONE_PER_PROBE = {
    *("copies", "no_target_and_includes", "a_target_is_taken_for_a_pattern"),
    *("tests_after_the_reply", "tests_beside_the_work", "every_choice_is_taken", "it_chokes"),
    *("trained_on_what_is_known", "something_to_pay_for"),
}
"""The tasks of a usual run of tests, in the order of the probes; the others are long."""

ELSEWHERE = {
    "near-duplicates-unchecked": "test_audit.py::test_a_missing_extra_is_reported",
    "probe-failed": "test_audit.py::test_a_probe_that_fails_stops_no_other",
}
"""Codes that say nothing about a task, so no task can show them; with the tests that do."""
