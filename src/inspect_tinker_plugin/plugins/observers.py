"""Observers watch episodes start, take turns and end; they cannot change an outcome."""

from __future__ import annotations

import asyncio
import inspect
from collections.abc import Callable, Sequence
from copy import deepcopy
from logging import getLogger
from typing import Any

from inspect_ai import Task
from inspect_ai.dataset import Sample
from inspect_ai.model import ModelOutput

from inspect_tinker_plugin.contracts.episodes import EpisodeResult, TurnRequest
from inspect_tinker_plugin.contracts.errors import PluginError
from inspect_tinker_plugin.contracts.observers import (
    EpisodeEnded,
    EpisodeObserver,
    EpisodeStarted,
    TurnTaken,
)
from inspect_tinker_plugin.episode.cancellation import being_cancelled, bounded, contained
from inspect_tinker_plugin.plugins.manager import Plugins, default_plugins

logger = getLogger(__name__)

TIMEOUT = 10.0
"""Seconds that an async observer may delay an episode at one event."""


class Observers:
    """The observers of a task; without any, every call returns immediately."""

    def __init__(self, observers: Sequence[EpisodeObserver] = ()) -> None:
        self._observers = tuple(observers)
        self._complained: set[tuple[int, str]] = set()

    def __bool__(self) -> bool:
        return bool(self._observers)

    async def started(self, *, episode: str, task: str, sample: Sample, epoch: int) -> None:
        """Report that an episode is about to run."""
        if self._observers:
            await self._tell(
                "on_episode_start",
                lambda: EpisodeStarted(
                    episode=episode, task=task, sample=deepcopy(sample), epoch=epoch
                ),
            )

    async def turn(self, *, episode: str, request: TurnRequest, output: object) -> None:
        """Report that a model call was answered, with an output or an exception."""
        if self._observers:
            answer = output if isinstance(output, ModelOutput) else None
            await self._tell(
                "on_turn",
                lambda: TurnTaken(
                    episode=episode,
                    index=request.index,
                    messages=deepcopy(list(request.messages)),
                    output=deepcopy(answer),
                ),
            )

    async def ended(self, *, episode: str, result: EpisodeResult, reward: float | None) -> None:
        """Report that an episode has ended."""
        if self._observers:
            await self._tell("on_episode_end", lambda: _ended(episode, result, reward))

    async def _tell(self, method: str, make_event: Callable[[], Any]) -> None:
        """Call every observer with its own event, so that none can change another's."""
        for observer in self._observers:
            try:
                answer = getattr(observer, method)(make_event())
                if inspect.isawaitable(answer):
                    await bounded(contained("it", answer), TIMEOUT)
            except asyncio.CancelledError as ex:
                if being_cancelled():
                    raise
                self._complain(observer, method, ex)
            except (KeyboardInterrupt, GeneratorExit):
                raise
            except BaseException as ex:  # SystemExit, or what test frameworks raise
                self._complain(observer, method, ex)

    def _complain(self, observer: EpisodeObserver, method: str, ex: BaseException) -> None:
        if (id(observer), method) in self._complained:
            return
        self._complained.add((id(observer), method))
        logger.warning(
            "observer %s failed in %s; the episode is unaffected (reported once): %r",
            type(observer).__qualname__,
            method,
            ex,
            exc_info=ex,
        )


def episode_observers(task: Task, *, plugins: Plugins | None = None) -> Observers:
    """Collect the observers that plugins attach to the episodes of a task.

    Raises:
        PluginError: a hook raised, or returned something that is not an observer.
    """
    found: list[EpisodeObserver] = []
    hook = "inspect_rl_episode_observers"
    for plugin, observers in (plugins or default_plugins()).call(hook, task=task):
        if not isinstance(observers, Sequence) or not all(
            isinstance(observer, EpisodeObserver) for observer in observers
        ):
            raise PluginError(
                f"hook {hook} of plugin {plugin.name!r} ({plugin.label}) gave {observers!r:.80}, "
                "not a sequence of EpisodeObserver"
            )
        found.extend(observers)
    return Observers(found)


def _ended(episode: str, result: EpisodeResult, reward: float | None) -> EpisodeEnded:
    return EpisodeEnded(
        episode=episode,
        task=result.task,
        sample_id=result.sample.id,
        epoch=result.epoch,
        messages=deepcopy(result.state.messages),
        scores=deepcopy(dict(result.scores)),
        reward=reward,
        limit=None if result.limit is None else result.limit.type,
        error=None if result.error is None else str(result.error),
        cause=None if result.error is None else str(result.error.cause),
        turns=result.turns,
        metrics=dict(result.metrics),
    )
