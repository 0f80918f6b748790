"""A task as a cookbook ``RLDataset``: batches of groups, made on demand."""

from __future__ import annotations

import math
import random
import re
import sys
from array import array
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import lru_cache
from pathlib import Path
from typing import Any, Protocol, Unpack

from inspect_ai import Task
from tinker_cookbook.renderers import Renderer
from tinker_cookbook.rl.types import RLDataset

from inspect_tinker_plugin.contracts.errors import ConfigError, RendererError, TaskError
from inspect_tinker_plugin.contracts.hooks import GroupOutcome, SamplePool
from inspect_tinker_plugin.logs import GroupSlot
from inspect_tinker_plugin.logs.index import logged_outcomes
from inspect_tinker_plugin.options import (
    DatasetKeywords,
    DatasetOptions,
    read_keywords,
    spell_out_options,
)
from inspect_tinker_plugin.processes import local_path
from inspect_tinker_plugin.rewards import resolve_reward
from inspect_tinker_plugin.rewards.scores import reads_other_than_scorers, require_scores
from inspect_tinker_plugin.rl.group import InspectGroupBuilder
from inspect_tinker_plugin.rl.hooks import with_plugin_scorers
from inspect_tinker_plugin.rl.prewarm import Ahead
from inspect_tinker_plugin.rl.task_handle import TaskHandle, open_logs
from inspect_tinker_plugin.samplers import (
    FOLDER,
    OutcomeFile,
    SamplerState,
    try_sampler,
)
from inspect_tinker_plugin.tasks.reference import ResolvedTask, TaskRef, resolve_task
from inspect_tinker_plugin.tasks.samples import SelectedSamples, select_samples

TaskLike = Task | Callable[..., Task] | str | TaskRef | ResolvedTask
"""A task, a task function, a name (``pkg/task``), a file (``file.py@task``) or a reference."""


class Order(Protocol):
    """Assigns samples to batches."""

    def __len__(self) -> int:
        """Return the number of batches."""
        ...

    def batch(self, index: int) -> list[int]:
        """Return the positions of a batch's samples, one per group."""
        ...


@dataclass(frozen=True)
class Passes:
    """Passes over the samples; the last batch of each may be smaller."""

    samples: int
    options: DatasetOptions

    def __len__(self) -> int:
        return min(self._per_pass * self.options.epochs, sys.maxsize)  # what len() takes

    def batch(self, index: int) -> list[int]:
        """Return the positions of a batch's samples."""
        number, batch = divmod(index, self._per_pass)
        order = order_of_pass(self.samples, self.options, number)
        start = batch * self.options.batch_size
        return [order[p] for p in range(start, min(start + self.options.batch_size, self.samples))]

    @property
    def _per_pass(self) -> int:
        return math.ceil(self.samples / self.options.batch_size)


@dataclass(frozen=True)
class Sampled:
    """Batches as large as those of another order, of samples that a sampler chooses.

    Batches that the trainer goes through again are later steps.
    """

    sizes: Order
    state: SamplerState

    def __len__(self) -> int:
        return len(self.sizes)

    def batch(self, index: int) -> list[int]:
        """Return the positions of a batch's samples."""
        count = len(self.sizes.batch(index))
        return self.state.choose(self._step(index), count) if count else []

    def outcome_file(self, index: int, group: int, position: int) -> OutcomeFile:
        """Return where the rewards of a group go, for the sampler to learn from."""
        return self.state.outcome_file(self._step(index), group, position)

    def _step(self, index: int) -> int:
        step = self.state.last_step // len(self) * len(self) + index
        return step + len(self) if self.state.rolled_out(step) else step


def order_of_pass(samples: int, options: DatasetOptions, number: int) -> Sequence[int]:
    """Return the order of a pass over the samples, counted from 0."""
    return _shuffle(samples, options.seed or 0, number) if options.shuffle else range(samples)


@lru_cache(maxsize=8)
def _shuffle(samples: int, seed: int, number: int) -> Sequence[int]:
    order = array("q", range(samples))
    random.Random(f"{seed}/{number}").shuffle(order)
    return order


class InspectRLDataset(RLDataset):
    """Batches of :class:`InspectGroupBuilder` over the samples of a task.

    An epoch has ``ceil(samples / batch_size)`` batches; its last one may be smaller. No
    sample is rendered, and no sandbox is started, before its episode begins.

    Args:
        handle: Task, renderer and options.
        samples: The samples of an epoch, before shuffling.
        order: Which of them each batch has.
    """

    def __init__(self, handle: TaskHandle, samples: SelectedSamples, order: Order) -> None:
        self.handle = handle
        self.samples = samples
        """The samples of an epoch, before shuffling."""
        self._order = order
        self.interleaved = False
        """Whether another dataset takes single groups out of its batches."""
        self._ahead: Ahead | None = None

    @property
    def options(self) -> DatasetOptions:
        """The options that the dataset was built with."""
        return self.handle.options

    def get_batch(self, index: int) -> list[InspectGroupBuilder]:
        """Return the group builders of one batch.

        Args:
            index: Batch, ``0 <= index < len(self)``.
        """
        if not 0 <= index < len(self):
            raise IndexError(f"batch {index} of {len(self)}")
        if self._ahead is not None:
            self._ahead.prepare_after(index)
        positions = self._order.batch(index)
        return [
            InspectGroupBuilder(
                self.handle,
                self.samples[position],
                GroupSlot(index, number, len(positions), step_known=not self.interleaved),
                outcome=(
                    self._order.outcome_file(index, number, position)
                    if isinstance(self._order, Sampled)
                    else None
                ),
            )
            for number, position in enumerate(positions)
        ]

    def __len__(self) -> int:
        """Return the number of batches in all epochs together."""
        return len(self._order)

    def prepare_ahead(self) -> None:
        """Prepare the sandboxes of batches before they are asked for, while this dataset lives."""
        prepared = self.handle.parts().runner
        if prepared.sandbox is None and self.samples[0].sandbox is None:
            return
        if isinstance(self._order, Sampled):
            return  # what comes next depends on rewards
        samples, order = self.samples, self._order  # the thread must not refer to this dataset
        self._ahead = Ahead(
            prepared=prepared,
            samples_of=lambda batch: [samples[position] for position in order.batch(batch)],
            batches=len(order),
            batch_size=self.options.batch_size,
            group_size=self.options.group_size,
        )
        self._ahead.start(self)


@spell_out_options
def as_rl_dataset(
    task: TaskLike,
    renderer: Renderer,
    *,
    task_args: Mapping[str, Any] | None = None,
    **options: Unpack[DatasetKeywords],
) -> InspectRLDataset:
    """Turn any Inspect task into a Tinker RL dataset.

    Args:
        task: A ``Task``, a ``@task`` function, a registered name (``pkg/task``), a file
            (``file.py@task``) or a ``TaskRef``.
        renderer: A ``tinker_cookbook`` renderer for the model under training.
        task_args: Arguments of the task function, for tasks given by name or function.
        {options}

    Returns:
        The dataset; it holds ``ceil(samples / batch_size) * epochs`` batches.

    Raises:
        ConfigError: An option, the task, the reward or the renderer is not usable.
    """
    return build_dataset(
        task, renderer, DatasetOptions(**read_keywords(options)), task_args=task_args
    )


def build_dataset(
    task: TaskLike,
    renderer: Renderer,
    options: DatasetOptions,
    *,
    task_args: Mapping[str, Any] | None = None,
    samples: SelectedSamples | None = None,
    first_step: int | None = None,
    asked_every: int | None = None,
) -> InspectRLDataset:
    """Check that a task, a renderer and options fit together, and make the dataset.

    Args:
        task: As in :func:`as_rl_dataset`.
        renderer: A cookbook renderer.
        options: The options.
        task_args: Arguments of the task function.
        samples: As in :func:`prepare_task`.
        first_step: As in :func:`open_dataset`.
        asked_every: As in :func:`open_dataset`.
    """
    handle, samples = prepare_task(task, renderer, options, task_args, samples)
    return open_dataset(handle, samples, first_step=first_step, asked_every=asked_every)


def open_dataset(
    handle: TaskHandle,
    samples: SelectedSamples,
    order: Order | None = None,
    *,
    first_step: int | None = None,
    asked_every: int | None = None,
) -> InspectRLDataset:
    """Make a dataset of a prepared task, start its logs, and prepare its sandboxes ahead.

    Args:
        handle: The task.
        samples: Its samples.
        order: Which of them each batch has; passes over all of them by default.
        first_step: The trainer's step that asks for the first batch, if it is known: what an
            earlier run of the same training has logged of it, and of later steps, is forgotten.
        asked_every: Of a test set, the trainer's steps between evaluations, for the logs.
    """
    options, order = handle.options, order or Passes(len(samples), handle.options)
    if options.sampler is not None:
        assert options.log_dir is not None
        name = re.sub(r"[^\w.-]+", "-", handle.name)
        state = SamplerState(
            Path(options.log_dir) / FOLDER / name,
            options.sampler,
            _pool(handle, samples),
            first_step=first_step or 0,
            logged=lambda: _read_outcomes(handle, samples),
        )
        order = Sampled(order, state)
    dataset = InspectRLDataset(handle, samples, order)
    open_logs(handle, batches=len(dataset), first_step=first_step, asked_every=asked_every)
    dataset.prepare_ahead()
    return dataset


def _pool(handle: TaskHandle, samples: SelectedSamples) -> SamplePool:
    size, seed = handle.options.group_size, handle.options.seed or 0
    return SamplePool(task=handle.name, samples=samples, group_size=size, seed=seed)


def _read_outcomes(handle: TaskHandle, samples: SelectedSamples) -> list[GroupOutcome]:
    """Return what the logs that a sampler begins with tell; nothing if there are none."""
    logs = handle.options.sampler_logs
    return logged_outcomes(logs, handle.name, samples) if logs else []


def prepare_task(
    task: TaskLike,
    renderer: Renderer,
    options: DatasetOptions,
    task_args: Mapping[str, Any] | None = None,
    samples: SelectedSamples | None = None,
) -> tuple[TaskHandle, SelectedSamples]:
    """Resolve everything that a dataset is made of, and check what can be checked beforehand."""
    if not callable(getattr(renderer, "build_generation_prompt", None)):
        raise RendererError(
            f"renderer: {renderer!r:.80} is not a renderer of tinker_cookbook; make one with "
            "get_renderer('qwen3', tokenizer)"
        )
    if options.log_dir is not None:
        options = replace(options, log_dir=local_path(options.log_dir).absolute())
    resolved = resolve_task(task, task_args, roles=options.model_roles)
    reward = resolve_reward(options.reward).aggregator
    if not with_plugin_scorers(resolved.task).scorer and not reads_other_than_scorers(
        options.reward, reward
    ):
        raise TaskError(
            f"task {resolved.task.name!r} has no scorer, so its episodes would have no reward; "
            "add scorer=... to the task, or name a score that its solver sets: "
            "reward='score:name'"
        )
    if samples is None:
        samples = select_samples(resolved.task, options.selection)
    # A task that is given as an object may have been changed since a function made it.
    ref = None if isinstance(task, Task) else resolved.ref
    handle = TaskHandle(resolved.task, ref, renderer, options, resolved.task.name)
    parts = handle.parts()
    scorers = [scorer.name for scorer in parts.runner.scorers]
    require_scores(options.reward, reward, scorers)
    if options.sampler is not None:
        try_sampler(options.sampler, _pool(handle, samples), count=options.batch_size)
        if options.log_dir is None:
            raise ConfigError(
                "a sampler keeps what it learns in the folder of the logs; give log_dir"
            )
        _read_outcomes(handle, samples)
    if options.max_turns != 1:
        parts.context.warn_of_splits(resolved.task.name)
    return handle, samples
