"""The contract of samplers: what they are told, and what they choose."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

from inspect_ai.dataset import Sample


@dataclass(frozen=True, kw_only=True)
class SamplePool:
    """The samples that a sampler chooses from."""

    task: str
    """Name of the task."""

    samples: Sequence[Sample]
    """The samples; one is looked up when it is asked for."""

    group_size: int
    """Episodes per group."""

    seed: int
    """The dataset's seed, 0 if it has none."""


@dataclass(frozen=True, kw_only=True)
class GroupOutcome:
    """How a group ended that was returned to the trainer, or was found in a log."""

    position: int
    """Position of its sample in the pool, from 0."""

    rewards: tuple[float, ...]
    """Rewards of its episodes, as the trainer got them; fewer than a group's if some failed."""

    step: int | None = None
    """Step of the batch that it belongs to, from 0; ``None`` for attempts from logs."""


class Sampler:
    """Base class of samplers: override ``choose``, and what else is of interest.

    What a sampler chooses may depend on the pool, on the outcomes that it was told, in their order,
    and on the step; not on chance without a fixed seed, and not on earlier choices. Then nothing
    of it needs to be saved: a run that is continued makes a new sampler, and tells it the outcomes
    up to its checkpoint.
    """

    def begin(self, pool: SamplePool, /) -> None:
        """Get to know the samples; called once, before everything else."""

    def learn(self, outcome: GroupOutcome, /) -> None:
        """Take note of a group's rewards: first of those in logs, then of the run's own."""

    def choose(self, step: int, count: int, /) -> Sequence[int]:
        """Choose the samples of a batch.

        Args:
            step: The step that the batch is for, from 0.
            count: Groups of the batch.

        Returns:
            ``count`` positions in the pool; one may be there more than once.
        """
        raise NotImplementedError

    def figures(self) -> Mapping[str, float]:
        """Return figures about the current state, kept beside each choice; none by default."""
        return {}


SamplerSpec = str | Callable[[], Sampler]
"""What ``sampler=`` takes: an expression, or a function that makes a new sampler."""
