"""Tasks: from a name to a live task, the choice of its samples, and the sandbox that they get."""

from __future__ import annotations

from inspect_tinker_plugin.options import Selection
from inspect_tinker_plugin.tasks.loading import describe_part
from inspect_tinker_plugin.tasks.reference import (
    ResolvedTask,
    TaskRef,
    resolve_task,
    task_digest,
    task_reference,
)
from inspect_tinker_plugin.tasks.samples import (
    SelectedSamples,
    choice_name,
    choice_texts,
    content_hash,
    sample_content,
    select_samples,
    targets,
)

__all__ = [
    "ResolvedTask",
    "SelectedSamples",
    "Selection",
    "TaskRef",
    "choice_name",
    "choice_texts",
    "content_hash",
    "describe_part",
    "resolve_task",
    "sample_content",
    "select_samples",
    "targets",
    "task_digest",
    "task_reference",
]
