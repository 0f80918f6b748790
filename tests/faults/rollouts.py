"""Groups of tasks that go wrong, rolled out by the cookbook."""

from __future__ import annotations

from typing import Any

import pytest
from inspect_ai import Task
from tests.rl.policies import Words, renderer
from tinker_cookbook.rl.rollout_strategy import RetryOnFailure
from tinker_cookbook.rl.rollouts import do_group_rollout
from tinker_cookbook.rl.types import TrajectoryGroup

from inspect_tinker_plugin.contracts.errors import EpisodeError
from inspect_tinker_plugin.rl.dataset import as_rl_dataset


async def rolled(task: Task, *lines: str, retries: int = 0, **options: Any) -> TrajectoryGroup:
    """Roll out the first group, with these replies again and again."""
    [builder] = as_rl_dataset(task, renderer(), **options).get_batch(0)
    words = Words(lines or ("x",))
    return await do_group_rollout(builder, words, RetryOnFailure(max_retries=retries))


async def failure_of(
    task: Task, *lines: str, match: str | None = None, retries: int = 0, **options: Any
) -> EpisodeError:
    """Return the error that a group of the task ends with."""
    with pytest.raises(EpisodeError, match=match) as caught:
        await rolled(task, *lines, retries=retries, **options)
    return caught.value
