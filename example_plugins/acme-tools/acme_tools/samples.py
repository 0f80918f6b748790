"""Drops long questions and writes the others in capitals, for tasks whose metadata ask for it."""

from __future__ import annotations

from inspect_ai import Task
from inspect_ai.dataset import Sample

from inspect_tinker_plugin.plugins import SampleStage


def question_stage(task: Task) -> SampleStage | None:
    """Make the stage of a task with ``acme_max_words`` in its metadata."""
    limit: int | None = (task.metadata or {}).get("acme_max_words")
    if limit is None:
        return None

    def keep(sample: Sample) -> bool:
        return len(str(sample.input).split()) <= limit

    def shout(sample: Sample) -> Sample:
        return sample.model_copy(update={"input": str(sample.input).upper()})

    return SampleStage(keep=keep, transform=shout)
