"""The objects that plugins return for samples and episodes: stages, observers and their events."""

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
