"""The objects that plugins return: stages of samples, observers with their events, samplers."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from inspect_ai.dataset import Sample
from inspect_ai.model import ChatMessage, ModelOutput
from inspect_ai.scorer import SampleScore

from inspect_tinker_plugin.contracts.episodes import Metrics


@dataclass(frozen=True)
class SampleStage:
    """How one plugin changes the samples of a task: it drops some, then transforms the rest."""

    keep: Callable[[Sample], bool] | None = None
    """Decides whether a sample stays; ``None`` keeps all. It needs one pass over the dataset."""

    transform: Callable[[Sample], Sample] | None = None
    """Returns the sample to use, from a copy of the task's; called when a sample is needed."""


@dataclass(frozen=True, kw_only=True)
class EpisodeStarted:
    """An episode is about to run."""

    task: str
    """Name of the task."""

    sample: Sample
    """A copy of the sample."""

    epoch: int
    """Epoch of the sample, from 1."""

    episode: str
    """Id of the episode, the same in all of its events."""


@dataclass(frozen=True, kw_only=True)
class TurnTaken:
    """The policy has answered a model call."""

    episode: str
    """Id of the episode."""

    index: int
    """Number of the model call, from 0."""

    messages: Sequence[ChatMessage]
    """A copy of the conversation that the policy saw."""

    output: ModelOutput | None
    """A copy of the policy's answer; ``None`` when the call was ended with an error instead."""


@dataclass(frozen=True, kw_only=True)
class EpisodeEnded:
    """An episode has ended, with or without a failure."""

    episode: str
    """Id of the episode."""

    task: str
    """Name of the task."""

    sample_id: int | str | None
    """Id of the sample."""

    epoch: int
    """Epoch of the sample, from 1."""

    messages: Sequence[ChatMessage]
    """A copy of the final conversation."""

    scores: Mapping[str, SampleScore]
    """Copies of the scores."""

    reward: float | None
    """The reward; ``None`` when there is none."""

    limit: str | None
    """Type of the limit that ended the episode, if there was one."""

    error: str | None
    """What failed, in words, if anything did."""

    cause: str | None
    """The cause of a failure, as in ``on_error``."""

    turns: int
    """Model calls that the policy answered."""

    metrics: Metrics = field(default_factory=dict)
    """Metrics of the episode."""


class EpisodeObserver:
    """Base class of observers: override the methods of interest, plain or async.

    Plain methods run inline and should be quick. An exception in a method is logged once.
    """

    def on_episode_start(self, event: EpisodeStarted, /) -> Any:
        """An episode is about to run."""

    def on_turn(self, event: TurnTaken, /) -> Any:
        """The policy has answered a model call."""

    def on_episode_end(self, event: EpisodeEnded, /) -> Any:
        """An episode has ended, with or without a failure."""


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
