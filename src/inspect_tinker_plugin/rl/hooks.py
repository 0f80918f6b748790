"""The hooks around a dataset's episodes: tool executor, observers and scorers."""

from __future__ import annotations

import asyncio
import copy
import inspect
import uuid
from collections.abc import Callable, Sequence
from copy import deepcopy
from logging import getLogger
from typing import Any

from inspect_ai import Task
from inspect_ai.dataset import Sample
from inspect_ai.model import ModelOutput
from inspect_ai.scorer import Scorer
from inspect_ai.util import registry_info

from inspect_tinker_plugin.contracts.episodes import EpisodeResult, Outcome, TurnRequest
from inspect_tinker_plugin.contracts.errors import PluginError
from inspect_tinker_plugin.contracts.observers import (
    EpisodeEnded,
    EpisodeObserver,
    EpisodeStarted,
    TurnTaken,
)
from inspect_tinker_plugin.contracts.tools import Memory, ToolExecutor, ToolFunction
from inspect_tinker_plugin.episode.runner import Episode
from inspect_tinker_plugin.plugins.manager import Plugins, default_plugins
from inspect_tinker_plugin.processes.cancellation import being_cancelled, bounded, contained
from inspect_tinker_plugin.tools import ToolScope, resolve_tool_executor, use_tool_executor
from inspect_tinker_plugin.tools.resolve import ToolExecutorSpec

logger = getLogger(__name__)

TIMEOUT = 10.0
"""Seconds that an async observer may delay an episode at one event."""


def with_plugin_scorers(task: Task, *, plugins: Plugins | None = None) -> Task:
    """Return the task with the scorers that plugins add; the same task if there are none.

    Raises:
        PluginError: a hook raised, or returned something that is not a scorer.
    """
    added = plugin_scorers(task, plugins=plugins)
    if not added:
        return task
    scored = copy.copy(task)
    scored.scorer = [*(task.scorer or []), *added]
    return scored


class DatasetHooks:
    """The hooks that all episodes of a dataset share in one process.

    Args:
        task: the task.
        tool_executor: what ``tool_executor=`` takes.
        plugins: where hooks are looked up; the installed plugins when not given.

    Raises:
        ConfigError: the executor cannot be resolved, or a plugin's hook failed.
    """

    def __init__(
        self, task: Task, *, tool_executor: ToolExecutorSpec = None, plugins: Plugins | None = None
    ) -> None:
        self._task = task.name
        self._executor = resolve_tool_executor(tool_executor, plugins=plugins)
        self._observers = episode_observers(task, plugins=plugins)
        self._memory: Memory = {}

    def group(self) -> GroupHooks:
        """Make the hooks of one group; each ``make_envs()`` gets its own."""
        return GroupHooks(self._task, self._executor, self._observers, self._memory)


class GroupHooks:
    """The hooks that the episodes of one group share."""

    def __init__(
        self,
        task: str,
        executor: ToolExecutor | ToolFunction | None,
        observers: Observers,
        memory: Memory,
    ) -> None:
        self._task = task
        self._executor = executor
        self._observers = observers
        self._of_dataset = memory
        self._of_group: Memory = {}

    def episode(self, sample: Sample, *, epoch: int) -> EpisodeHooks:
        """Make the hooks of one episode of the group."""
        scope = ToolScope(
            task=self._task,
            sample_id=sample.id,
            epoch=epoch,
            group=self._of_group,
            dataset=self._of_dataset,
        )
        return EpisodeHooks(self._executor, scope, self._observers)


class EpisodeHooks:
    """The hooks around one episode; almost free without executor and observers."""

    def __init__(
        self,
        executor: ToolExecutor | ToolFunction | None = None,
        scope: ToolScope | None = None,
        observers: Observers | None = None,
    ) -> None:
        self._executor = executor
        self._scope = scope
        self._observers = Observers() if observers is None else observers
        self._id = uuid.uuid4().hex if self._observers else ""

    @property
    def observed(self) -> bool:
        """Whether anybody is told of what happens."""
        return bool(self._observers)

    async def start(self, episode: Episode) -> Outcome:
        """Start an episode whose tool calls the executor carries out."""
        await self._observers.started(
            episode=self._id,
            task=episode.prepared.name,
            sample=episode.sample,
            epoch=episode.epoch,
        )
        if self._executor is None or self._scope is None:
            return await episode.start()
        # The episode's own task starts with a copy of this context.
        with use_tool_executor(self._executor, self._scope):
            return await episode.start()

    async def turn(self, request: TurnRequest, output: object) -> None:
        """Tell observers the answer to a model call."""
        await self._observers.turn(episode=self._id, request=request, output=output)

    async def ended(self, result: EpisodeResult, reward: float | None) -> None:
        """Tell observers how the episode ended."""
        await self._observers.ended(episode=self._id, result=result, reward=reward)


def plugin_scorers(task: Task, *, plugins: Plugins | None = None) -> list[Scorer]:
    """Collect the scorers that plugins add to a task, to be run after its own.

    Raises:
        PluginError: a hook raised, or returned something that cannot be called.
    """
    added: list[Scorer] = []
    for plugin, scorers in (plugins or default_plugins()).call("inspect_rl_scorers", task=task):
        if not isinstance(scorers, Sequence) or not all(_is_scorer(scorer) for scorer in scorers):
            raise PluginError(
                f"hook inspect_rl_scorers of plugin {plugin.name!r} ({plugin.label}) gave "
                f"{scorers!r:.80}, not a sequence of scorers (made by functions with @scorer)"
            )
        added.extend(scorers)
    return added


def _is_scorer(made: object) -> bool:
    try:
        return registry_info(made).type == "scorer"
    except ValueError:  # not made by a function with @scorer
        return False


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
