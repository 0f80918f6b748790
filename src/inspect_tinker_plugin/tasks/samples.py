"""Decides which samples of a task are used, in which order, and which are held out by content.

A choice is made in the order in which an eval makes it: the stages of plugins filter and transform
the samples, ``sample_shuffle`` shuffles them, and ``limit``, ``sample_id`` or ``sample_ids`` takes
some of them. Nothing is copied: a chosen sample is looked up, and transformed, when it is needed.
"""

from __future__ import annotations

import copy
import hashlib
import inspect
import json
import random
import re
from array import array
from collections.abc import Iterable, Iterator, Mapping, Sequence
from copy import deepcopy
from fnmatch import fnmatchcase
from itertools import islice
from typing import Any, overload

from inspect_ai import Task
from inspect_ai.dataset import MemoryDataset, Sample
from inspect_ai.log import EvalSample
from pydantic import BaseModel

from inspect_tinker_plugin.contracts.errors import ConfigError, PluginError, TaskError
from inspect_tinker_plugin.contracts.hooks import SampleStage
from inspect_tinker_plugin.contracts.wording import counted
from inspect_tinker_plugin.options import Selection
from inspect_tinker_plugin.plugins.manager import Plugin, default_plugins

_SHOWN = 8
"""Number of ids that a message lists."""

Stages = tuple[tuple[Plugin, SampleStage], ...]
"""What plugins do with the samples of a task, in their order."""


class SelectedSamples(Sequence[Sample]):
    """The chosen samples of a task, as the stages of plugins leave them; each has an id.

    It works on a sample when it is asked for. What a plugin raises then is a ``PluginError``.

    Args:
        dataset: All samples of the task; those without id are numbered, as in an eval.
        stages: What plugins do with them.
        positions: Positions of the chosen ones, in their order.
    """

    def __init__(self, dataset: Sequence[Sample], stages: Stages, positions: Sequence[int]) -> None:
        self._dataset = dataset
        self._stages = stages
        self._positions = positions

    def __len__(self) -> int:
        return len(self._positions)

    @overload
    def __getitem__(self, index: int) -> Sample: ...
    @overload
    def __getitem__(self, index: slice) -> SelectedSamples: ...
    def __getitem__(self, index: int | slice) -> Sample | SelectedSamples:
        if isinstance(index, slice):
            return SelectedSamples(self._dataset, self._stages, self._positions[index])
        position = self._positions[index]
        sample = self._apply(position)
        if sample is None:
            raise PluginError(
                f"sample {self._dataset[position].id!r} was kept once and dropped later"
            )
        return sample

    def subset(self, indices: Iterable[int]) -> SelectedSamples:
        """Choose again among these samples, by their index in this sequence."""
        positions = array("q", (self._positions[i] for i in indices))
        return SelectedSamples(self._dataset, self._stages, positions)

    def transform_each(self) -> Iterator[tuple[Sample, Sample]]:
        """Yield each sample as it is in the task and as plugins leave it; none without plugins."""
        for position in self._positions if self._stages else ():
            if (sample := self._apply(position)) is not None:
                yield with_id(self._dataset[position], position), sample

    def drop_filtered(self) -> SelectedSamples:
        """Leave out the samples that plugins drop: one pass, if there is a filter."""
        if all(stage.keep is None for _, stage in self._stages):
            return self
        kept = (i for i, position in enumerate(self._positions) if self._apply(position))
        return self.subset(kept)

    def _apply(self, position: int) -> Sample | None:
        """Run the stages in turn; ``None`` as soon as one drops the sample."""
        # Samples without an id are numbered by their position in the task, whatever is dropped.
        sample = with_id(self._dataset[position], position)
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
                if _is_true(kept) and stage.transform is not None:
                    sample = stage.transform(sample)
            except (Exception, SystemExit) as ex:
                raise PluginError(
                    f"{who} failed on sample {sample_id!r}: {type(ex).__name__}: {ex}"
                ) from ex
            if _is_true(kept) is None:
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


def _is_true(value: object) -> bool | None:
    """Read a filter's result; ``None`` if it is no truth value (a filter that forgot to return).

    A coroutine, or the text "no", would count as true.
    """
    # numpy's own truth value, without an import of numpy
    return bool(value) if type(value).__name__ in ("bool", "bool_") else None


def select_samples(task: Task, selection: Selection | None = None) -> SelectedSamples:
    """Choose samples of a task.

    Args:
        task: The task; its dataset is left as it is.
        selection: Which samples; all of them when not given.

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
    size = len(task.dataset)
    if size == 0:
        raise TaskError(f"task {task.name!r} has no samples")
    samples = SelectedSamples(task.dataset, sample_stages(task), range(size)).drop_filtered()
    size = len(samples)
    if size == 0:
        raise TaskError(f"plugins drop every sample of task {task.name!r}")
    selection = selection or Selection()
    if selection.sample_ids is not None:
        return samples.subset(_find_ids(samples, selection.sample_ids, task.name))
    if selection.sample_id is not None:
        return samples.subset(_match_ids(samples, selection.patterns, task.name))
    if selection.sample_shuffle and not task.dataset.shuffled:
        order = array("q", range(size))
        seed = None if selection.sample_shuffle is True else selection.sample_shuffle
        random.Random(seed).shuffle(order)
        samples = samples.subset(order)
    limit = selection.limit
    chosen = samples[slice(*limit) if isinstance(limit, tuple) else slice(limit)]
    if not chosen:
        text = f"{limit[0] + 1}-{limit[1]}" if isinstance(limit, tuple) else str(limit)
        raise ConfigError(f"limit {text} leaves no sample: task {task.name!r} has {size}")
    return chosen


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


def sample_stages(task: Task) -> Stages:
    """Ask every plugin for its filter and transformation of the samples of a task."""
    stages: list[tuple[Plugin, SampleStage]] = []
    for plugin, stage in default_plugins().call("inspect_rl_samples", task=task):
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


def _find_ids(samples: Sequence[Sample], wanted: Sequence[str | int], task: str) -> Sequence[int]:
    """Return the positions of exact ids, in the order in which they are given.

    Several samples may have the same id; all of them are taken, as in an eval.
    """
    found: dict[str, list[int]] = {str(each): [] for each in wanted}
    for position, sample in enumerate(samples):
        if (text := str(sample.id)) in found:
            found[text].append(position)
    if missing := [each for each, positions in found.items() if not positions]:
        raise ConfigError(_unknown_ids(samples, missing, task))
    return [position for positions in found.values() for position in positions]


def _match_ids(samples: Sequence[Sample], wanted: Sequence[str | int], task: str) -> Sequence[int]:
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
    return str(int(text)).zfill(20) if text.isdecimal() else text


def _unknown_ids(samples: Sequence[Sample], missing: Sequence[object], task: str) -> str:
    known = ", ".join(str(sample.id) for sample in islice(samples, _SHOWN))
    ids = ", ".join(dict.fromkeys(str(each) for each in missing))
    return f"task {task!r}: no sample has the id {ids} (the first ids are {known})"


def sample_hash(sample: Sample | EvalSample) -> str:
    """Hash the content of a sample: input, choices, target, files and setup script.

    Ids, metadata and the order of choices do not count: the same question under another id is the
    same question. A logged sample has the hash of the sample that it is of, unless that has files:
    a log holds their names only.
    """
    return content_hash(sample_content(sample))


def logged_hash(sample: Sample) -> str:
    """Return the :func:`sample_hash` that a log's sample of this one has."""
    files = list(sample.files) if sample.files else None
    return content_hash({**sample_content(sample), "files": files})


def sample_content(sample: Sample | EvalSample) -> dict[str, Any]:
    """Return the parts of a sample that make it the question that it is.

    The order of its choices does not: many tasks shuffle them whenever they are loaded.
    """
    content = {
        "input": sample.input,
        "choices": sample.choices,
        "target": sample.target,
        "files": sample.files,
        "setup": sample.setup,
    }
    if sample.choices and (right := choice_texts(sample)):
        content |= {"choices": sorted(sample.choices), "target": sorted(right)}
    return content


def targets(sample: Sample | EvalSample) -> list[str]:
    """Return the targets of a sample, each as text; empty ones are left out."""
    given = [sample.target] if isinstance(sample.target, str) else list(sample.target)
    return [target for target in given if target.strip()]


def choice_texts(sample: Sample | EvalSample) -> list[str] | None:
    """Return the texts of the right choices; ``None`` when a target names no choice."""
    choices = sample.choices or []
    found = []
    for target in targets(sample):
        text = target.strip()
        places = choice_places(text, choices)
        if not places and text not in (choice.strip() for choice in choices):
            return None
        found += [choices[place] for place in places] or [text]
    return found


def choice_places(target: str, choices: Sequence[str]) -> list[int]:
    """Return the choices that a target names as Inspect has it: ``B``, ``A,C`` or ``AC``.

    Returns:
        Their positions; nothing for the text of a choice, or another text.
    """
    if len(target.strip()) > 1 and target.strip() in (choice.strip() for choice in choices):
        return []
    names = [choice_name(place) for place in range(len(choices))]
    words = target.upper().replace(",", " ").split()
    named = [name for word in words for name in ([word] if word.isnumeric() else word)]
    if len(set(named)) < len(named) or not set(named) <= set(names):
        return []
    return [names.index(name) for name in named]


def choice_name(place: int) -> str:
    """Return what Inspect calls a choice: a letter, and a number after the 26th."""
    return chr(ord("A") + place) if place < 26 else str(place - 25)


def content_hash(content: object, *, fold_spaces: bool = False) -> str:
    """Hash content, the same in every process.

    Args:
        content: Values of samples, such as texts, messages and mappings of them.
        fold_spaces: Whether texts that differ only in white space are the same.
    """
    plain = _plain(content, fold_spaces)
    text = json.dumps(plain, sort_keys=True, ensure_ascii=False, default=str)
    return hashlib.sha256(text.encode("utf-8", "surrogatepass")).hexdigest()


def _plain(value: Any, fold_spaces: bool) -> Any:
    if isinstance(value, BaseModel):
        # The ids of messages differ from process to process.
        return value.model_dump(mode="json", exclude={"id"}, exclude_none=True)
    if isinstance(value, Mapping):
        return {str(key): _plain(entry, fold_spaces) for key, entry in value.items()}
    if isinstance(value, list | tuple):
        return [_plain(entry, fold_spaces) for entry in value]
    return " ".join(value.split()) if fold_spaces and isinstance(value, str) else value


def held_out_hashes(counts: Mapping[str, int], share: str, *, seed: int = 0) -> frozenset[str]:
    """Return the hashes of the samples that a split holds out."""
    size = sum(counts.values())
    wanted = held_out(share, size)
    order = sorted(counts, key=lambda each: hashlib.sha256(f"{seed}:{each}".encode()).digest())
    held: set[str] = set()
    taken = 0
    for each in order:
        if taken >= wanted:
            break
        held.add(each)
        taken += counts[each]
    if taken == size:
        raise ConfigError(
            f"a test split of {share} holds out all of {counted(size, 'sample')}: many have "
            "the same content; give a smaller share, or a --test-task"
        )
    return frozenset(held)


def held_out(share: str, size: int) -> int:
    """Return how many of ``size`` samples a share is, at least one."""
    text = share.strip()
    try:
        if text.endswith("%"):
            count = round(size * float(text[:-1]) / 100)
        elif "." in text:
            fraction = float(text)
            if not 0 < fraction < 1:
                raise ValueError
            count = round(size * fraction)
        else:
            count = int(text)
            if count < 1:
                raise ValueError
    except ValueError:
        raise ConfigError(
            f"a test split is a fraction (0.1), a percentage (10%) or a number of samples (50), "
            f"not {share!r}"
        ) from None
    count = max(1, count)
    if count >= size:
        raise ConfigError(
            f"a test split of {share} leaves none of {counted(size, 'sample')} to train on"
        )
    return count
