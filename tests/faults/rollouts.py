"""Groups of tasks that go wrong, rolled out by the cookbook."""

from __future__ import annotations

from typing import Any

import pytest
from inspect_ai import Task
from tests.rl.policies import roll_out_task
from tinker_cookbook.rl.rollout_strategy import RetryOnFailure
from tinker_cookbook.rl.types import TrajectoryGroup

from inspect_tinker_plugin.contracts.errors import EpisodeError


async def rolled(task: Task, *lines: str, retries: int = 0, **options: Any) -> TrajectoryGroup:
    """Roll out the first group, with these replies again and again."""
    return await roll_out_task(
        task, lines or ("x",), RetryOnFailure(max_retries=retries), **options
    )


async def failure_of(
    task: Task, *lines: str, match: str | None = None, retries: int = 0, **options: Any
) -> EpisodeError:
    """Return the error that a group of the task ends with."""
    with pytest.raises(EpisodeError, match=match) as caught:
        await rolled(task, *lines, retries=retries, **options)
    return caught.value
