"""The samples of a task as plugins filter and transform them, one at a time and when asked for."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from copy import deepcopy
from dataclasses import dataclass
from typing import overload

from inspect_ai import Task
from inspect_ai.dataset import Sample

from inspect_tinker_plugin.episode.task import with_ids
from inspect_tinker_plugin.errors import PluginError
from inspect_tinker_plugin.plugins import Plugin, Plugins, default_plugins


@dataclass(frozen=True)
class SampleStage:
    """What one plugin does to the samples of a task: drop some, then change the rest."""

    keep: Callable[[Sample], bool] | None = None
    """Says whether a sample stays; ``None`` keeps all. It means one pass over the dataset."""

    transform: Callable[[Sample], Sample] | None = None
    """Gives the sample to use, from a copy of the task's; called when a sample is needed."""


def plugin_samples(
    task: Task, samples: Sequence[Sample], *, plugins: Plugins | None = None
) -> Sequence[Sample]:
    """Apply every plugin's filter and transformation to the samples of a task.

    Args:
        task: the task, as the hooks see it.
        samples: its samples; left as they are.
        plugins: where hooks are looked up; the installed plugins when not given.

    Returns:
        ``samples`` itself when no plugin has anything to do. Otherwise a sequence that works
        on a sample when it is asked for; the first use passes over the dataset if, and only
        if, there is a filter.

    Raises:
        PluginError: a hook raised or gave something else than a stage; later, when a sample
            is asked for, its filter or transformation did.
    """
    stages: list[tuple[Plugin, SampleStage]] = []
    for plugin, stage in (plugins or default_plugins()).call("inspect_rl_samples", task=task):
        if not isinstance(stage, SampleStage):
            raise PluginError(
                f"hook inspect_rl_samples of plugin {plugin.name!r} ({plugin.label}) gave "
                f"{stage!r:.80}, not a SampleStage"
            )
        for part in ("keep", "transform"):
            function = getattr(stage, part)
            if function is not None and not callable(function):
                raise PluginError(
                    f"hook inspect_rl_samples of plugin {plugin.name!r} ({plugin.label}) gave a "
                    f"SampleStage whose {part} is {function!r:.80}, not a function"
                )
        stages.append((plugin, stage))
    return StagedSamples(samples, tuple(stages)) if stages else samples


class StagedSamples(Sequence[Sample]):
    """Samples seen through the stages of plugins."""

    def __init__(
        self, samples: Sequence[Sample], stages: tuple[tuple[Plugin, SampleStage], ...]
    ) -> None:
        self._samples = samples
        self._stages = stages
        self._filtered = any(stage.keep is not None for _, stage in stages)
        self._kept: list[int] | None = None

    def __len__(self) -> int:
        return len(self._indices())

    @overload
    def __getitem__(self, index: int) -> Sample: ...
    @overload
    def __getitem__(self, index: slice) -> Sequence[Sample]: ...
    def __getitem__(self, index: int | slice) -> Sample | Sequence[Sample]:
        if isinstance(index, slice):
            return [self._staged(i) for i in self._indices()[index]]
        return self._staged(self._indices()[index])

    def __iter__(self) -> Iterator[Sample]:
        return (self._staged(index) for index in self._indices())

    def _indices(self) -> Sequence[int]:
        if not self._filtered:
            return range(len(self._samples))
        if self._kept is None:
            self._kept = [
                index for index in range(len(self._samples)) if self._apply(index) is not None
            ]
        return self._kept

    def _staged(self, index: int) -> Sample:
        sample = self._apply(index)
        if sample is None:
            raise PluginError(f"sample {self._samples[index].id!r} was kept once and dropped later")
        return sample

    def _apply(self, index: int) -> Sample | None:
        """Run the stages in turn; ``None`` as soon as one drops the sample."""
        # Samples without an id are numbered as they stand in the task, whatever is dropped.
        sample = deepcopy(with_ids(self._samples[index], index))
        sample_id = sample.id
        for plugin, stage in self._stages:
            who = f"plugin {plugin.name!r} ({plugin.label})"
            kept: object = True
            try:
                if stage.keep is not None:
                    kept = stage.keep(sample)
                if _truth(kept) and stage.transform is not None:
                    sample = stage.transform(sample)
            except Exception as ex:
                raise PluginError(
                    f"{who} failed on sample {sample_id!r}: {type(ex).__name__}: {ex}"
                ) from ex
            if _truth(kept) is None:
                raise PluginError(
                    f"{who}: its filter gave {kept!r:.80} for sample {sample_id!r}, not True or "
                    "False"
                )
            if not kept:
                return None
            if not isinstance(sample, Sample):
                raise PluginError(f"{who} made {sample!r:.80} of sample {sample_id!r}")
            if sample.id is None:
                sample = sample.model_copy(update={"id": sample_id})
        return sample


def _truth(value: object) -> bool | None:
    """Read what a filter gave; ``None`` when it is no truth value (a filter that forgot to return).

    A coroutine, or the text "no", would be true.
    """
    if isinstance(value, bool):
        return value
    # numpy's own truth value, without an import of numpy
    return bool(value) if type(value).__name__ in ("bool", "bool_") else None
