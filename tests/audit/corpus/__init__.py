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
        return self.make.__name__


CORPUS: list[Planted] = []


def planted(
    code: str, *, docker: bool = False, **options: Any
) -> Callable[[Callable[[], Task]], Callable[[], Task]]:
    """Put a task into the corpus."""

    def add(make: Callable[[], Task]) -> Callable[[], Task]:
        CORPUS.append(Planted(code, make, options, docker))
        return make

    return add
