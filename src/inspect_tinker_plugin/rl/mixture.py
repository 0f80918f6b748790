"""Several tasks in one cookbook ``RLDataset``: each batch has groups of each, in given shares."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, Unpack

from tinker_cookbook.renderers import Renderer
from tinker_cookbook.rl.types import RLDataset

from inspect_tinker_plugin.contracts.errors import ConfigError
from inspect_tinker_plugin.options import (
    DatasetKeywords,
    DatasetOptions,
    documented,
    read_keywords,
    signature_of,
)
from inspect_tinker_plugin.rl.dataset import (
    InspectRLDataset,
    TaskLike,
    open_dataset,
    prepare_task,
)
from inspect_tinker_plugin.rl.group import InspectGroupBuilder
from inspect_tinker_plugin.rl.order import Mix, Portion
from inspect_tinker_plugin.rl.renderer import model_name
from inspect_tinker_plugin.rl.task_handle import TaskHandle
from inspect_tinker_plugin.tasks.samples import SelectedSamples

_OF_ALL = ("batch_size", "epochs", "shuffle", "seed", "log_dir")
"""Options of a mixture that its tasks cannot have differently."""


@dataclass(frozen=True)
class MixedTask:
    """A task of a mixture."""

    task: TaskLike
    """As in :func:`as_rl_dataset`."""

    share: float = 1.0
    """Its share of the groups, in proportion to those of the other tasks."""

    task_args: Mapping[str, Any] | None = None
    """Arguments of the task function."""

    options: Mapping[str, Any] = field(default_factory=dict)
    """Options of :func:`as_rl_dataset` for this task, over those of the mixture."""

    samples: SelectedSamples | None = None
    """Samples that were chosen before, instead of those that the options choose."""


class InspectRLMixture(RLDataset):
    """Batches of groups of several tasks.

    The sources are asked for the same batch and give their part of it, so their logs, steps and
    sandboxes are those of the mixture. Each group is tagged with its task, by which the cookbook
    reports its metrics too.

    Args:
        sources: A dataset per task, all with the same number of batches.
        mix: Deals the groups of each batch out to the sources; one after the other when ``None``.

    Raises:
        ConfigError: There is no source, two are of tasks with the same name, or their renderers,
            models or numbers of batches differ.
    """

    def __init__(self, sources: Sequence[InspectRLDataset], mix: Mix | None = None) -> None:
        _check_names([source.handle for source in sources])
        renderers = [source.handle.renderer for source in sources]
        _require_one("renderers", [type(each).__name__ for each in renderers])
        _require_one("models", [str(model_name(each)) for each in renderers])
        _require_one("numbers of batches", [str(len(source)) for source in sources])
        self.sources = list(sources)
        self._mix = mix

    def get_batch(self, index: int) -> list[InspectGroupBuilder]:
        """Return the group builders of one batch.

        Args:
            index: Batch, ``0 <= index < len(self)``.
        """
        parts = [iter(source.get_batch(index)) for source in self.sources]
        if self._mix is None:
            return [group for part in parts for group in part]
        return [next(parts[source]) for source in self._mix.deal(index)]

    def __len__(self) -> int:
        """Return the number of batches."""
        return len(self.sources[0])


def as_rl_mixture(
    tasks: Sequence[MixedTask | TaskLike],
    renderer: Renderer,
    *,
    batches: int | None = None,
    **options: Unpack[DatasetKeywords],
) -> InspectRLMixture:
    """Turn several Inspect tasks into one Tinker RL dataset.

    Args:
        tasks: The tasks; a bare one has the share 1.
        renderer: A ``tinker_cookbook`` renderer for the model under training.
        batches: Minimum number of batches.
        {options}

    The samples of each task are chosen by the same options. ``batch_size`` counts the groups of
    all tasks together, and a pass (``epochs``) lasts until every task was gone through once;
    smaller tasks begin again meanwhile.

    Raises:
        ConfigError: An option, a share, a task, the reward or the renderer is not usable, or two
            tasks have the same name; one line says which and what to do.
    """
    of_all = read_keywords(options, function="as_rl_mixture")
    mixed = [each if isinstance(each, MixedTask) else MixedTask(each) for each in tasks]
    return build_mixture(mixed, renderer, DatasetOptions(**of_all), batches=batches)


as_rl_mixture.__doc__ = documented(as_rl_mixture.__doc__ or "")
as_rl_mixture.__signature__ = signature_of(as_rl_mixture)  # type: ignore[attr-defined]  # PEP 362


def build_mixture(
    tasks: Sequence[MixedTask],
    renderer: Renderer,
    options: DatasetOptions,
    *,
    batches: int | None = None,
    first_step: int | None = None,
) -> InspectRLMixture:
    """Check that tasks, a renderer and options fit together, and make the mixture.

    Args:
        tasks: The tasks.
        renderer: A cookbook renderer.
        options: The options of all of them.
        batches: Minimum number of batches.
        first_step: As in :func:`~inspect_tinker_plugin.rl.dataset.build_dataset`.

    Raises:
        ConfigError: They do not; nothing was started.
    """
    plan = plan_mixture(tasks, renderer, options, batches=batches)
    sources = [
        open_dataset(handle, samples, order, first_step=first_step)
        for handle, samples, order in plan
    ]
    return InspectRLMixture(sources, plan.mix)


@dataclass(frozen=True)
class MixturePlan:
    """A mixture before anything is started: its tasks, samples and batches."""

    handles: Sequence[TaskHandle]
    samples: Sequence[SelectedSamples]
    mix: Mix
    batches: int

    def __iter__(self) -> Iterator[tuple[TaskHandle, SelectedSamples, Portion]]:
        pairs = zip(self.handles, self.samples, strict=True)
        for source, (handle, samples) in enumerate(pairs):
            size, options = len(samples), handle.options
            yield handle, samples, Portion(size, options, self.mix, source, self.batches)


def plan_mixture(
    tasks: Sequence[MixedTask],
    renderer: Renderer,
    options: DatasetOptions,
    *,
    batches: int | None = None,
) -> MixturePlan:
    """Find out what :func:`build_mixture` would refuse, without starting a log or a sandbox.

    Raises:
        ConfigError: Something is not usable.
    """
    if not tasks:
        raise ConfigError("a mixture needs at least one task")
    mix = Mix(tuple(each.share for each in tasks), options.batch_size)
    prepared = [
        prepare_task(each.task, renderer, _options(each, options), each.task_args, each.samples)
        for each in tasks
    ]
    handles = [handle for handle, _ in prepared]
    _check_names(handles)
    samples = [chosen for _, chosen in prepared]
    natural = mix.batches([len(each) for each in samples], options.epochs)
    return MixturePlan(handles, samples, mix, max(natural, batches or 0))


def _options(task: MixedTask, of_all: DatasetOptions) -> DatasetOptions:
    own = read_keywords(task.options, function="MixedTask.options")
    if wrong := [name for name in own if name in _OF_ALL]:
        raise ConfigError(
            f"{', '.join(wrong)} cannot be options of one task of a mixture; give them to the "
            "mixture"
        )
    return replace(of_all, **own)


def _require_one(what: str, values: Sequence[str]) -> None:
    if len(set(values)) > 1:
        raise ConfigError(
            f"the tasks of a mixture have different {what} ({', '.join(values)}); make their "
            "datasets with the same"
        )


def _check_names(handles: Sequence[TaskHandle]) -> None:
    if not handles:
        raise ConfigError("a mixture needs at least one task")
    names = [handle.name for handle in handles]
    if twice := sorted({name for name in names if names.count(name) > 1}):
        raise ConfigError(
            f"two tasks of the mixture are called {twice[0]!r}, so that logs and metrics could not "
            "tell them apart; give one of them another name (@task(name=...) or Task(name=...))"
        )
