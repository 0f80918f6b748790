"""Several tasks in one cookbook ``RLDataset``: each batch has groups of each, in given shares."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from fractions import Fraction
from functools import cached_property
from typing import Any, Unpack

from tinker_cookbook.renderers import Renderer
from tinker_cookbook.rl.types import RLDataset

from inspect_tinker_plugin.contracts.errors import ConfigError
from inspect_tinker_plugin.options import (
    DatasetKeywords,
    DatasetOptions,
    read_keywords,
    spell_out_options,
)
from inspect_tinker_plugin.rl.dataset import (
    InspectRLDataset,
    TaskLike,
    open_dataset,
    order_of_pass,
    prepare_task,
)
from inspect_tinker_plugin.rl.group import InspectGroupBuilder
from inspect_tinker_plugin.rl.task_handle import TaskHandle
from inspect_tinker_plugin.tasks.samples import SelectedSamples

_FINEST = 1000
"""Shares are rounded to multiples of one thousandth of their sum."""

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


@dataclass(frozen=True)
class Mix:
    """Deals the groups of batches out to tasks, in given shares.

    The groups of all batches, one after the other, are dealt out in turns that repeat: in each
    turn every task gets its share exactly, spread evenly. So every batch has the groups that its
    share says, give or take one, whichever batch it is and however often it is asked for.

    Args:
        shares: One positive number per task; only their ratios count.
        batch_size: Groups per batch.
    """

    shares: tuple[float, ...]
    batch_size: int

    def __post_init__(self) -> None:
        for share in self.shares:
            if isinstance(share, bool) or not 0 < share < math.inf:
                raise ConfigError(f"a share of a mixture is a number above 0, not {share!r}")

    def deal(self, batch: int) -> list[int]:
        """Return the task of each group of a batch."""
        start = batch * self.batch_size
        return [
            self._turn[slot % len(self._turn)] for slot in range(start, start + self.batch_size)
        ]

    def places(self, source: int, batch: int) -> range:
        """Return which of a task's groups are in a batch, counted from the first batch's on."""
        start = batch * self.batch_size
        return range(self._before(source, start), self._before(source, start + self.batch_size))

    def batches(self, sizes: Sequence[int], passes: int) -> int:
        """Return how many batches it takes until every task had this many passes.

        Args:
            sizes: Samples of each task.
            passes: Passes over the samples; smaller tasks will have had more.
        """
        needed = 1
        for source, size in enumerate(sizes):
            slots = [slot for slot, dealt in enumerate(self._turn) if dealt == source]
            turns, last = divmod(size * passes - 1, len(slots))
            needed = max(needed, turns * len(self._turn) + slots[last] + 1)
        return math.ceil(needed / self.batch_size)

    def _before(self, source: int, slot: int) -> int:
        """Return how many groups a task gets before a slot, over all batches."""
        turns, rest = divmod(slot, len(self._turn))
        return turns * self._turn.count(source) + self._turn[:rest].count(source)

    @cached_property
    def _turn(self) -> list[int]:
        """The task of each group of one turn: always that which is most behind its share."""
        whole = _whole_shares(self.shares)
        credit = [0] * len(whole)
        turn = []
        for _ in range(sum(whole)):
            credit = [have + each for have, each in zip(credit, whole, strict=True)]
            chosen = max(range(len(whole)), key=credit.__getitem__)
            credit[chosen] -= sum(whole)
            turn.append(chosen)
        return turn


def _whole_shares(shares: Sequence[float]) -> list[int]:
    """Return shares as whole numbers without a common divisor."""
    parts = [Fraction(share).limit_denominator(10**6) for share in shares]
    exact = [part / sum(parts) for part in parts]
    if math.lcm(*(part.denominator for part in exact)) > _FINEST:
        exact = [Fraction(max(1, round(part * _FINEST)), _FINEST) for part in exact]
    scale = math.lcm(*(part.denominator for part in exact))
    whole = [int(part * scale) for part in exact]
    return [each // math.gcd(*whole) for each in whole]


@dataclass(frozen=True)
class Portion:
    """The part of a mixture's batches that comes from one task; it begins again after each pass."""

    samples: int
    options: DatasetOptions
    mix: Mix
    source: int
    """Position of the task in the mixture."""

    batches: int

    def __len__(self) -> int:
        return self.batches

    def batch(self, index: int) -> list[int]:
        """Return the positions of this task's samples in a batch of the mixture."""
        found = []
        for place in self.mix.places(self.source, index):
            number, position = divmod(place, self.samples)
            found.append(order_of_pass(self.samples, self.options, number)[position])
        return found


class InspectRLMixture(RLDataset):
    """Batches of groups of several tasks.

    The sources are asked for the same batch and give their part of it, so their logs, steps and
    sandboxes are those of the mixture. Each group is tagged with its task, by which the cookbook
    reports its metrics too.

    Args:
        sources: A dataset per task, all with the same number of batches.
        mix: Deals the groups of each batch out to the sources; one after the other when ``None``.

    Raises:
        ConfigError: There is no source, or two are of tasks with the same name.
    """

    def __init__(self, sources: Sequence[InspectRLDataset], mix: Mix | None = None) -> None:
        _check_names([source.handle for source in sources])
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


@spell_out_options
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


def build_mixture(
    tasks: Sequence[MixedTask],
    renderer: Renderer,
    options: DatasetOptions,
    *,
    batches: int | None = None,
    first_step: int | None = None,
) -> InspectRLMixture:
    """Check that tasks, a renderer and options fit together, and make the mixture."""
    plan = plan_mixture(tasks, renderer, options, batches=batches)
    sources = [
        open_dataset(handle, samples, order, first_step=first_step)
        for handle, samples, order in plan.sources
    ]
    return InspectRLMixture(sources, plan.mix)


@dataclass(frozen=True)
class MixturePlan:
    """A mixture before anything is started."""

    sources: Sequence[tuple[TaskHandle, SelectedSamples, Portion]]
    mix: Mix
    batches: int


def plan_mixture(
    tasks: Sequence[MixedTask],
    renderer: Renderer,
    options: DatasetOptions,
    *,
    batches: int | None = None,
) -> MixturePlan:
    """Find out what :func:`build_mixture` would refuse, without starting a log or a sandbox."""
    mix = Mix(tuple(each.share for each in tasks), options.batch_size)
    prepared = [
        prepare_task(each.task, renderer, _options(each, options), each.task_args, each.samples)
        for each in tasks
    ]
    _check_names([handle for handle, _ in prepared])
    natural = mix.batches([len(samples) for _, samples in prepared], options.epochs)
    most = max(natural, batches or 0)
    sources = [
        (handle, samples, Portion(len(samples), handle.options, mix, source, most))
        for source, (handle, samples) in enumerate(prepared)
    ]
    return MixturePlan(sources, mix, most)


def _options(task: MixedTask, of_all: DatasetOptions) -> DatasetOptions:
    own = read_keywords(task.options, function="MixedTask.options")
    if wrong := [name for name in own if name in _OF_ALL]:
        raise ConfigError(
            f"{', '.join(wrong)} cannot be options of one task of a mixture; give them to the "
            "mixture"
        )
    return replace(of_all, **own)


def _check_names(handles: Sequence[TaskHandle]) -> None:
    if not handles:
        raise ConfigError("a mixture needs at least one task")
    names = [handle.name for handle in handles]
    if twice := sorted({name for name in names if names.count(name) > 1}):
        raise ConfigError(
            f"two tasks of the mixture are called {twice[0]!r}, so that logs and metrics could not "
            "tell them apart; give one of them another name (@task(name=...) or Task(name=...))"
        )
