"""A task as a cookbook ``RLDataset``: batches of groups, made when they are asked for."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

from inspect_ai import Task
from inspect_ai.dataset import Dataset, Sample
from inspect_ai.model import Model
from inspect_ai.util import SandboxEnvironmentType
from tinker_cookbook.renderers import Renderer
from tinker_cookbook.rl.rollout_limits import RolloutLimits
from tinker_cookbook.rl.types import RLDataset

from inspect_tinker_plugin.config import DatasetOptions, OnError
from inspect_tinker_plugin.episode.task import SolverLike, with_ids
from inspect_tinker_plugin.episode.types import EpisodeOptions
from inspect_tinker_plugin.errors import ConfigError, RendererError, TaskError
from inspect_tinker_plugin.hooks import with_plugin_scorers
from inspect_tinker_plugin.rewards import GroupRewardSpec, RewardSpec
from inspect_tinker_plugin.rl.group import InspectGroupBuilder
from inspect_tinker_plugin.rl.order import Permutation
from inspect_tinker_plugin.rl.prewarm import prewarm
from inspect_tinker_plugin.rl.recording import log_folder, open_logs
from inspect_tinker_plugin.rl.task_handle import TaskHandle
from inspect_tinker_plugin.rl.tool_probe import can_describe_tools, refuse_tools
from inspect_tinker_plugin.samples import plugin_samples
from inspect_tinker_plugin.tasks import TaskRef, resolve_task

TaskLike = Task | Callable[..., Task] | str | TaskRef
"""A task, a task function, a name (``pkg/task``), a file (``file.py@task``) or a reference."""


class InspectRLDataset(RLDataset):
    """Batches of :class:`InspectGroupBuilder` over the samples of a task.

    An epoch has ``ceil(samples / batch_size)`` batches; its last one may be smaller. No
    sample is rendered, and no sandbox is started, before its episode begins.
    """

    def __init__(
        self, handle: TaskHandle, samples: Sequence[Sample], indices: Sequence[int]
    ) -> None:
        self.handle = handle
        self._samples = samples
        self._indices = indices

    @property
    def options(self) -> DatasetOptions:
        """The options that the dataset was built with."""
        return self.handle.options

    def get_batch(self, index: int) -> list[InspectGroupBuilder]:
        """Make the group builders of one batch.

        Args:
            index: Batch, ``0 <= index < len(self)``.
        """
        if not 0 <= index < len(self):
            raise IndexError(f"batch {index} of {len(self)}")
        epoch, batch = divmod(index, self._batches_an_epoch)
        order = self._order(epoch)
        start = batch * self.options.batch_size
        stop = min(start + self.options.batch_size, len(order))
        return [
            InspectGroupBuilder(
                self.handle,
                self._samples[order[position]],
                batch=index,
                index=position - start,
                groups=stop - start,
            )
            for position in range(start, stop)
        ]

    def __len__(self) -> int:
        """Batches in all epochs together."""
        return self._batches_an_epoch * self.options.epochs

    @property
    def _batches_an_epoch(self) -> int:
        return math.ceil(len(self._indices) / self.options.batch_size)

    def _order(self, epoch: int) -> Sequence[int]:
        if not self.options.shuffle:
            return self._indices
        seed = hash((self.options.seed or 0, epoch))
        return _Reordered(self._indices, Permutation(len(self._indices), seed))


class NumberedSamples(Sequence[Sample]):
    """The samples of a dataset, those without id numbered from 1 as ``eval()`` numbers them."""

    def __init__(self, dataset: Dataset) -> None:
        self._dataset = dataset

    def __len__(self) -> int:
        return len(self._dataset)

    def __getitem__(self, index: int) -> Sample:  # type: ignore[override]  # no slices needed
        return with_ids(self._dataset[index], index)


class _Reordered(Sequence[int]):
    def __init__(self, indices: Sequence[int], order: Sequence[int]) -> None:
        self._indices = indices
        self._positions = order

    def __len__(self) -> int:
        return len(self._indices)

    def __getitem__(self, position: int) -> int:  # type: ignore[override]  # no slices needed
        return self._indices[self._positions[position]]


def as_rl_dataset(
    task: TaskLike,
    renderer: Renderer,
    *,
    task_args: Mapping[str, Any] | None = None,
    batch_size: int = 1,
    group_size: int = 1,
    max_samples: int | None = None,
    sample_ids: Sequence[int | str] | None = None,
    epochs: int = 1,
    shuffle: bool = False,
    seed: int | None = None,
    solver: SolverLike | None = None,
    max_turns: int | None = None,
    sandbox: SandboxEnvironmentType | None = None,
    sandbox_config: Any = None,
    model_roles: Mapping[str, str | Model | list[str | Model]] | None = None,
    message_limit: int | None = None,
    token_limit: int | None = None,
    time_limit: int | None = None,
    working_limit: int | None = None,
    max_sandboxes: int | None = None,
    reward: RewardSpec = "mean",
    group_reward: GroupRewardSpec | None = None,
    tool_executor: Any = None,
    on_error: OnError = "raise",
    rollout_limits: RolloutLimits | None = None,
    log_dir: str | Path | None = None,
) -> InspectRLDataset:
    """Turn any Inspect task into a Tinker RL dataset.

    Args:
        task: A ``Task``, a ``@task`` function, a registered name (``pkg/task``), a file
            (``file.py@task``) or a ``TaskRef``.
        renderer: A ``tinker_cookbook`` renderer for the model under training.
        task_args: Arguments of the task function, for tasks given by name or function.
        batch_size: Groups a batch (P).
        group_size: Episodes a group (G), all of the same sample.
        max_samples: Use only the first so many samples.
        sample_ids: Use only the samples with these ids.
        epochs: Passes over the samples.
        shuffle: Another order in every epoch.
        seed: Seed of that order.
        solver: Replaces the task's solver, as ``inspect eval --solver`` does.
        max_turns: Model calls an episode may make; the next one ends it, scored, with
            ``stop/max_turns``.
        sandbox: Replaces the task's sandbox, as ``inspect eval --sandbox`` does.
        sandbox_config: Configuration (a compose file, say) for ``sandbox``.
        model_roles: Models by role, ``{"grader": "openai/gpt-5"}``, over the task's own.
        message_limit: Messages in a conversation.
        token_limit: Tokens of all models together.
        time_limit: Seconds of wall clock, sampling included.
        working_limit: Seconds of working time.
        max_sandboxes: Sandboxes alive at once in a process; the provider's own default
            when ``None``.
        reward: How scores become the reward: an expression such as ``"mean"`` or
            ``"weighted(accuracy=0.8,format=0.2)"``, an aggregator, or a function.
        group_reward: How a whole group's rewards are reconsidered, e.g. ``"rank"``.
        tool_executor: Who carries out tool calls; Inspect itself when ``None``.
        on_error: ``"raise"``, a penalty for all failures, or penalties by cause
            (``{"sandbox": "raise", "scorer": -1.0}``); causes that are not named raise.
        rollout_limits: The cookbook's budgets, enforced by its rollout runner.
        log_dir: Write one ``.eval`` log a batch into this folder.

    Returns:
        The dataset; it holds ``ceil(samples / batch_size) * epochs`` batches.

    Raises:
        ConfigError: An option, the task, the reward or the renderer is not usable; one line
            says which and what to do.
    """
    if sandbox_config is not None:
        sandbox = _with_config(sandbox, sandbox_config)
    options = DatasetOptions(
        batch_size=batch_size,
        group_size=group_size,
        max_samples=max_samples,
        sample_ids=sample_ids,
        epochs=epochs,
        shuffle=shuffle,
        seed=seed,
        solver=solver,
        sandbox=sandbox,
        reward=reward,
        group_reward=group_reward,
        tool_executor=tool_executor,
        on_error=on_error,
        log_dir=None if log_dir is None else log_folder(log_dir),
        rollout_limits=rollout_limits,
        episode=EpisodeOptions(
            max_turns=max_turns,
            message_limit=message_limit,
            token_limit=token_limit,
            time_limit=time_limit,
            working_limit=working_limit,
            max_sandboxes=max_sandboxes,
            model_roles=dict(model_roles or {}),
        ),
    )
    return build_dataset(task, renderer, options, task_args=task_args)


def build_dataset(
    task: TaskLike,
    renderer: Renderer,
    options: DatasetOptions,
    *,
    task_args: Mapping[str, Any] | None = None,
) -> InspectRLDataset:
    """Check a task, a renderer and options against each other, and make the dataset."""
    if not callable(getattr(renderer, "build_generation_prompt", None)):
        raise RendererError(
            f"renderer: {renderer!r:.80} is not a renderer of tinker_cookbook; make one with "
            "get_renderer('qwen3', tokenizer)"
        )
    resolved = resolve_task(task, task_args)
    if not with_plugin_scorers(resolved.task).scorer:
        raise TaskError(
            f"task {resolved.task.name!r} has no scorer, so its episodes would have no reward; "
            "add scorer=... to the task"
        )
    if resolved.task.sample_source is not None:
        raise TaskError(
            f"task {resolved.task.name!r} makes its samples while it runs (SampleSource); "
            "a dataset needs them beforehand"
        )
    # A task that is given as an object may have been changed since a function made it.
    ref = None if isinstance(task, Task) else resolved.ref
    handle = TaskHandle(resolved.task, ref, renderer, options)
    parts = handle.parts()
    samples = plugin_samples(resolved.task, NumberedSamples(resolved.task.dataset))
    indices = _select(samples, options, resolved.task.name)
    if not can_describe_tools(parts.context):
        refuse_tools(parts.runner, options.solver, renderer, samples[indices[0]])
    dataset = InspectRLDataset(handle, samples, indices)
    open_logs(handle, batches=len(dataset))
    episodes = min(options.batch_size, len(indices)) * options.group_size
    prewarm(parts.runner.prepared, samples[indices[0]], episodes)
    return dataset


def _with_config(sandbox: SandboxEnvironmentType | None, config: Any) -> SandboxEnvironmentType:
    if not isinstance(sandbox, str):
        raise ConfigError(
            "sandbox_config needs sandbox to name a provider, e.g. sandbox='docker', "
            "sandbox_config='compose.yaml'"
        )
    return (sandbox, config)


def _select(samples: Sequence[Sample], options: DatasetOptions, task: str) -> Sequence[int]:
    """Positions of the samples in use; the dataset is scanned only to find ids."""
    size = len(samples)
    if size == 0:
        raise TaskError(f"task {task!r} has no samples")
    if options.sample_ids is None:
        return range(min(size, options.max_samples or size))
    by_id: dict[str, list[tuple[int | str | None, int]]] = {}
    for index, sample in enumerate(samples):
        by_id.setdefault(str(sample.id), []).append((sample.id, index))
    wanted = list(dict.fromkeys(options.sample_ids))
    missing = [str(sample_id) for sample_id in wanted if str(sample_id) not in by_id]
    if missing:
        raise ConfigError(f"task {task!r} has no sample with id {', '.join(missing)}")
    return list(dict.fromkeys(index for i in wanted for index in _named(i, by_id[str(i)])))


def _named(wanted: int | str, candidates: Sequence[tuple[int | str | None, int]]) -> Sequence[int]:
    """Choose between ``7`` and ``"7"``: the id itself, or the other spelling if there is no such.

    Several samples may have one id; an eval would run all of them.
    """
    exact = [index for sample_id, index in candidates if sample_id == wanted]
    return exact or [index for _, index in candidates]
