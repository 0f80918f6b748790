"""Decides which samples of a task are used, and in which order; everything else asks this module.

A choice is made in the order in which an eval makes it: the stages of plugins filter and transform
the samples, ``sample_shuffle`` shuffles them, and ``limit``, ``sample_id`` or ``sample_ids`` takes
some of them. Nothing is copied: a chosen sample is looked up, and transformed, when it is needed.
"""

from __future__ import annotations

import copy
import inspect
import random
import re
from array import array
from collections.abc import Iterable, Sequence
from copy import deepcopy
from fnmatch import fnmatchcase
from itertools import islice
from typing import overload

from inspect_ai import Task
from inspect_ai.dataset import MemoryDataset, Sample

from inspect_tinker_plugin.contracts.errors import ConfigError, PluginError, TaskError
from inspect_tinker_plugin.contracts.observers import SampleStage
from inspect_tinker_plugin.options import Selection
from inspect_tinker_plugin.plugins.manager import Plugin, Plugins, default_plugins

_SHOWN = 8
"""Number of ids that a message lists."""


class SelectedSamples(Sequence[Sample]):
    """The chosen samples of a task; each has an id.

    Args:
        samples: All samples of the task, staged by plugins and with ids.
        positions: Positions of the chosen ones, in their order.
    """

    def __init__(self, samples: Sequence[Sample], positions: Sequence[int]) -> None:
        self._samples = samples
        self._positions = positions

    def __len__(self) -> int:
        return len(self._positions)

    @overload
    def __getitem__(self, index: int) -> Sample: ...
    @overload
    def __getitem__(self, index: slice) -> SelectedSamples: ...
    def __getitem__(self, index: int | slice) -> Sample | SelectedSamples:
        if isinstance(index, slice):
            return SelectedSamples(self._samples, self._positions[index])
        return self._samples[self._positions[index]]

    def subset(self, indices: Iterable[int]) -> SelectedSamples:
        """Choose again among these samples, by their index in this sequence."""
        return SelectedSamples(self._samples, array("q", (self._positions[i] for i in indices)))


def select_samples(
    task: Task, selection: Selection | None = None, *, plugins: Plugins | None = None
) -> SelectedSamples:
    """Choose samples of a task.

    Args:
        task: The task; its dataset is left as it is.
        selection: Which samples; all of them when not given.
        plugins: Where hooks are looked up; the installed plugins when not given.

    Raises:
        ConfigError: The selection chooses nothing, or names an id that no sample has.
        TaskError: The task has no samples, or makes them while it runs.
        PluginError: A plugin's filter or transformation failed.
    """
    if task.sample_source is not None:
        raise TaskError(
            f"task {task.name!r} makes its samples while it runs (SampleSource), so there is no "
            "list of them to choose from"
        )
    if len(task.dataset) == 0:
        raise TaskError(f"task {task.name!r} has no samples")
    samples = StagedSamples(task.dataset, sample_stages(task, plugins))
    size = len(samples)
    if size == 0:
        raise TaskError(f"plugins drop every sample of task {task.name!r}")
    selection = selection or Selection()
    if selection.sample_ids is not None:
        return SelectedSamples(samples, _with_exact_ids(samples, selection.sample_ids, task.name))
    if selection.sample_id is not None:
        return SelectedSamples(samples, _matching(samples, selection.patterns, task.name))
    order: Sequence[int] = range(size)
    if selection.sample_shuffle and not task.dataset.shuffled:
        order = array("q", order)
        seed = None if selection.sample_shuffle is True else selection.sample_shuffle
        random.Random(seed).shuffle(order)
    chosen = order[_slice(selection.limit)]
    if len(chosen) == 0:
        raise ConfigError(
            f"limit {_range(selection.limit)} leaves no sample: task {task.name!r} has {size}"
        )
    return SelectedSamples(samples, chosen)


def with_samples(task: Task, samples: Sequence[Sample]) -> Task:
    """Return a copy of a task that has only these samples, for an eval of them."""
    bare = copy.copy(task)
    bare.dataset = MemoryDataset(
        list(samples), name=task.dataset.name, location=task.dataset.location
    )
    return bare


def with_id(sample: Sample, position: int) -> Sample:
    """Give a sample without id its 1-based position, as an eval does; the input is kept."""
    return sample if sample.id is not None else sample.model_copy(update={"id": position + 1})


Stages = tuple[tuple[Plugin, SampleStage], ...]
"""What plugins do with the samples of a task, in their order."""


def sample_stages(task: Task, plugins: Plugins | None = None) -> Stages:
    """Ask every plugin for its filter and transformation of the samples of a task.

    Raises:
        PluginError: A hook raised or returned something that is not a stage.
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
    return tuple(stages)


class StagedSamples(Sequence[Sample]):
    """Samples seen through the stages of plugins; those without id are numbered, as in an eval.

    It works on a sample when it is asked for; the first use passes over the dataset if, and only
    if, there is a filter. What a plugin raises then is a ``PluginError``.
    """

    def __init__(self, samples: Sequence[Sample], stages: Stages) -> None:
        self._samples = samples
        self._stages = stages
        self._filtered = any(stage.keep is not None for _, stage in stages)
        self._kept: list[int] | None = None

    def __len__(self) -> int:
        return len(self._indices())

    def __getitem__(self, index: int) -> Sample:  # type: ignore[override]  # no slices needed
        position = self._indices()[index]
        sample = self._apply(position)
        if sample is None:
            id = self._samples[position].id
            raise PluginError(f"sample {id!r} was kept once and dropped later")
        return sample

    def _indices(self) -> Sequence[int]:
        if not self._filtered:
            return range(len(self._samples))
        if self._kept is None:
            self._kept = [
                index for index in range(len(self._samples)) if self._apply(index) is not None
            ]
        return self._kept

    def _apply(self, index: int) -> Sample | None:
        """Run the stages in turn; ``None`` as soon as one drops the sample."""
        # Samples without an id are numbered by their position in the task, whatever is dropped.
        sample = with_id(self._samples[index], index)
        if not self._stages:
            return sample
        sample = deepcopy(sample)
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
                if inspect.iscoroutine(kept):
                    kept.close()  # nobody awaits it
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
    """Read a filter's result; ``None`` if it is no truth value (a filter that forgot to return).

    A coroutine, or the text "no", would count as true.
    """
    if isinstance(value, bool):
        return value
    # numpy's own truth value, without an import of numpy
    return bool(value) if type(value).__name__ in ("bool", "bool_") else None


def _with_exact_ids(
    samples: Sequence[Sample], wanted: Sequence[str | int], task: str
) -> Sequence[int]:
    """Return the positions of exact ids, in the order in which they are given.

    ``7`` and ``"7"`` are distinguished where both exist. Several samples may have the same id; all
    of them are taken, as in an eval.
    """
    texts = {str(each) for each in wanted}
    found: dict[str, list[tuple[str | int | None, int]]] = {}
    for position, sample in enumerate(samples):
        if (text := str(sample.id)) in texts:
            found.setdefault(text, []).append((sample.id, position))
    missing = [each for each in wanted if str(each) not in found]
    if missing:
        raise ConfigError(_unknown_ids(samples, missing, task))
    chosen: dict[int, None] = {}
    for each in wanted:
        candidates = found[str(each)]
        exact = [position for id, position in candidates if id == each]
        chosen.update(dict.fromkeys(exact or [position for _, position in candidates]))
    return array("q", chosen)


def _matching(samples: Sequence[Sample], wanted: Sequence[str | int], task: str) -> Sequence[int]:
    """Return the positions of the ids that match a pattern, in the order of the dataset.

    An id that does not match itself (``q[1]``) is taken literally where no pattern matches it.
    """
    own = f"{task.lower()}:"
    texts = [
        each[len(own) :] if isinstance(each, str) and each.lower().startswith(own) else each
        for each in wanted
    ]
    patterns = [_normal(text) for text in texts]
    literal, wild = set(patterns), [each for each in patterns if re.search(r"[*?[]", each)]
    found: set[str] = set()
    chosen = array("q")
    for position, sample in enumerate(samples):
        name = _normal(sample.id)
        hits = [each for each in wild if fnmatchcase(name, each)]
        if name in literal:
            hits.append(name)
        if hits:
            found.update(hits)
            chosen.append(position)
    missing = [raw for raw, each in zip(wanted, patterns, strict=True) if each not in found]
    if missing:
        raise ConfigError(_unknown_ids(samples, missing, task))
    return chosen


def _normal(id: str | int | None) -> str:
    """Make ``7``, ``"7"`` and ``"007"`` equal, as Inspect does."""
    text = str(id)
    return str(int(text)).zfill(20) if text.isdigit() else text


def _unknown_ids(samples: Sequence[Sample], missing: Sequence[object], task: str) -> str:
    known = ", ".join(str(sample.id) for sample in islice(samples, _SHOWN))
    ids = ", ".join(dict.fromkeys(str(each) for each in missing))
    return f"task {task!r}: no sample has the id {ids} (the first ids are {known})"


def _slice(limit: int | tuple[int, int] | None) -> slice:
    return slice(*limit) if isinstance(limit, tuple) else slice(limit)


def _range(limit: int | tuple[int, int] | None) -> str:
    return f"{limit[0] + 1}-{limit[1]}" if isinstance(limit, tuple) else str(limit)
