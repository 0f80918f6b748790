"""Outcomes of earlier attempts at a task, from the summaries of ``.eval`` logs."""

from __future__ import annotations

from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor

from inspect_ai.dataset import Sample

from inspect_tinker_plugin.contracts.errors import ConfigError
from inspect_tinker_plugin.contracts.samplers import GroupOutcome
from inspect_tinker_plugin.export.logged import Index, find_logs, index_logs


def logged_outcomes(
    paths: Sequence[str], task: str, samples: Sequence[Sample]
) -> list[GroupOutcome]:
    """Return what logs tell about the samples of a task, one outcome for all attempts at each.

    Args:
        paths: Logs and folders of logs: ours, or any eval's. Those of other tasks are left out.
        task: Name of the task.
        samples: Its samples, which are recognised by their ids.

    Raises:
        ConfigError: A path is no log, a log cannot be read, or none has a sample of the task.
    """
    # Not in an event loop, for which Inspect would patch asyncio.
    with ThreadPoolExecutor(1) as thread:
        index = thread.submit(_read, [str(path) for path in paths]).result()
    bare = task.rpartition("/")[2]
    rewards: dict[str, list[float]] = {}
    for entry in index.entries:
        if index.logs[entry.log].task.rpartition("/")[2] != bare or entry.error:
            continue
        if entry.reward is not None:
            rewards.setdefault(str(entry.id), []).append(entry.reward)
    found = [
        GroupOutcome(position=position, rewards=tuple(rewards[str(sample.id)]))
        for position, sample in enumerate(samples)
        if str(sample.id) in rewards
    ]
    if not found:
        others = ", ".join(sorted({log.task for log in index.logs})) or "no task"
        raise ConfigError(
            f"sampler_logs: no log has a rewarded sample of task {task!r} (they are of {others})"
        )
    return found


def _read(paths: Sequence[str]) -> Index:
    index = index_logs(find_logs(paths), score=None)
    if index.failures:
        first = index.failures[0]
        raise ConfigError(f"sampler_logs: {first.id}: {first.reason}")
    return index
