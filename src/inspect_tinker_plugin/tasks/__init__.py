"""Tasks: from a name to a live task, and the choice of its samples."""

from __future__ import annotations

from inspect_tinker_plugin.tasks.reference import (
    ResolvedTask,
    TaskRef,
    resolve_task,
    task_reference,
)

__all__ = ["ResolvedTask", "TaskRef", "resolve_task", "task_reference"]
