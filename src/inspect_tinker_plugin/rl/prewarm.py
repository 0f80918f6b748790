"""Starts the containers of a dataset's first batch while the trainer is still loading its model."""

from __future__ import annotations

import asyncio
import threading
from logging import getLogger

from inspect_ai.dataset import Sample

from inspect_tinker_plugin.episode.task import PreparedTask

logger = getLogger(__name__)

MOST = 32
"""Containers started ahead at the most; a pool starts more when they are asked for."""


def prewarm(prepared: PreparedTask, sample: Sample, episodes: int) -> None:
    """Start containers in the background, when the task's sandbox keeps a pool of them.

    What goes wrong is only logged: the first episode meets the same fault, and says so.

    Args:
        prepared: The task.
        sample: The first sample, whose sandbox stands for the others'.
        episodes: Episodes of the first batch.
    """
    if prepared.sandbox is None and sample.sandbox is None:
        return
    threading.Thread(
        target=lambda: asyncio.run(_prewarm(prepared, sample, min(episodes, MOST))),
        name="prewarm sandboxes",
        daemon=True,
    ).start()


async def _prewarm(prepared: PreparedTask, sample: Sample, count: int) -> None:
    from inspect_tinker_plugin.sandboxes import environment

    try:
        spec = await prepared.sandbox_of(sample)
        if spec is not None and spec.type == "docker_pool":
            await environment.prewarm(spec.config, count, metadata=sample.metadata)
    except Exception as error:
        logger.warning("task %r: sandboxes could not be pre-warmed: %s", prepared.name, error)
