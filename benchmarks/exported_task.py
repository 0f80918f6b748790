"""A task of short questions that worker processes of an export load from this file."""

from __future__ import annotations

from inspect_ai import Task, task
from inspect_ai.dataset import Sample
from inspect_ai.solver import generate

ROWS = 60_000


@task
def one_turn() -> Task:
    words = "word " * 190
    return Task(
        dataset=[Sample(id=i, input=f"{i}: {words}", target="72") for i in range(ROWS)],
        solver=generate(),
    )
