"""The hooks around a dataset's episodes: executor, observers, scorers, and what a watcher sees."""

from __future__ import annotations

import asyncio
import copy
import inspect
import json
import os
import socket
import time
import uuid
from collections import deque
from collections.abc import Callable, Sequence
from contextlib import suppress
from copy import deepcopy
from logging import getLogger
from pathlib import Path
from typing import Any

from inspect_ai import Task
from inspect_ai.dataset import Sample
from inspect_ai.model import ModelOutput
from inspect_ai.util import registry_info
from pydantic import BaseModel, Field

from inspect_tinker_plugin.contracts.episodes import EpisodeResult, Outcome, TurnRequest
from inspect_tinker_plugin.contracts.errors import PluginError
from inspect_tinker_plugin.contracts.hooks import (
    EpisodeEnded,
    EpisodeObserver,
    EpisodeStarted,
    ToolExecutor,
    ToolFunction,
    TurnTaken,
)
from inspect_tinker_plugin.episode.runner import Episode
from inspect_tinker_plugin.plugins.manager import default_plugins
from inspect_tinker_plugin.processes import write_whole
from inspect_tinker_plugin.processes.loops import (
    contain,
    is_being_cancelled,
    run_bounded,
    running_loop,
)
from inspect_tinker_plugin.tools import ToolScope, use_tool_executor

logger = getLogger(__name__)

TIMEOUT = 10.0
"""Seconds that an async observer may delay an episode at one event."""


def with_plugin_scorers(task: Task) -> Task:
    """Return the task with the scorers that plugins add; the same task if there are none.

    Raises:
        PluginError: A hook raised, or returned something that is not a scorer.
    """
    wanted = "scorers (made by functions with @scorer)"
    added = _collect("inspect_rl_scorers", task, _is_scorer, wanted)
    if not added:
        return task
    scored = copy.copy(task)
    scored.scorer = [*(task.scorer or []), *added]
    return scored


def episode_observers(task: Task) -> Observers:
    """Collect the observers that plugins attach to the episodes of a task."""
    hook = "inspect_rl_episode_observers"
    found = _collect(hook, task, lambda made: isinstance(made, EpisodeObserver), "EpisodeObserver")
    return Observers(found)


def _collect(hook: str, task: Task, fits: Callable[[object], bool], wanted: str) -> list[Any]:
    found: list[Any] = []
    for plugin, given in default_plugins().call(hook, task=task):
        if not isinstance(given, Sequence) or not all(map(fits, given)):
            raise PluginError(
                f"hook {hook} of plugin {plugin.name!r} ({plugin.label}) gave {given!r:.80}, "
                f"not a sequence of {wanted}"
            )
        found.extend(given)
    return found


def _is_scorer(made: object) -> bool:
    try:
        return registry_info(made).type == "scorer"
    except ValueError:  # not made by a function with @scorer
        return False


class EpisodeHooks:
    """The hooks around one episode; almost free without executor and observers.

    Attributes:
        observed: Whether somebody observes or watches it.
    """

    def __init__(
        self,
        executor: ToolExecutor | ToolFunction | None = None,
        scope: ToolScope | None = None,
        observers: Observers | None = None,
        live: LiveRollouts | None = None,
    ) -> None:
        self._executor = executor
        self._scope = scope
        self._observers = observers
        self._live = live
        self.observed = bool(observers) or live is not None
        self._id = uuid.uuid4().hex if self.observed else ""

    async def start(self, episode: Episode) -> Outcome:
        """Start an episode whose tool calls the executor carries out."""
        await self.report_start(episode.prepared.name, episode.sample, episode.epoch)
        if self._executor is None or self._scope is None:
            return await episode.start()
        # The episode's own task starts with a copy of this context.
        with use_tool_executor(self._executor, self._scope):
            return await episode.start()

    async def report_start(self, task: str, sample: Sample, epoch: int) -> None:
        """Tell observers that an episode is about to run."""
        if self._live:
            self._live.start(self._id, task=task, sample=sample.id, epoch=epoch)
        if self._observers:
            await self._observers.tell(
                "on_episode_start",
                lambda: EpisodeStarted(
                    episode=self._id, task=task, sample=deepcopy(sample), epoch=epoch
                ),
            )

    async def report_turn(self, request: TurnRequest, output: ModelOutput) -> None:
        """Tell observers the answer to a model call."""
        if self._live:
            self._live.count_turn(self._id)
        if self._observers:
            await self._observers.tell(
                "on_turn",
                lambda: TurnTaken(
                    episode=self._id,
                    index=request.index,
                    messages=deepcopy(list(request.messages)),
                    output=deepcopy(output),
                ),
            )

    async def report_end(self, result: EpisodeResult, reward: float | None) -> None:
        """Tell observers how the episode ended."""
        if self._live:
            self._live.end(self._id, reward, None if result.error is None else str(result.error))
        if self._observers:
            await self._observers.tell(
                "on_episode_end", lambda: _describe_end(self._id, result, reward)
            )

    def note_closed(self) -> None:
        """Note that the episode was closed, whether or not it had come to an end."""
        if self._live:
            self._live.end(self._id)


class Observers:
    """The observers of a task's episodes."""

    def __init__(self, observers: Sequence[EpisodeObserver] = ()) -> None:
        self._observers = tuple(observers)
        self._complained: set[tuple[int, str]] = set()

    def __bool__(self) -> bool:
        return bool(self._observers)

    async def tell(self, method: str, make_event: Callable[[], Any]) -> None:
        """Call every observer with its own event, so that none can change another's."""
        for observer in self._observers:
            try:
                answer = getattr(observer, method)(make_event())
                if inspect.isawaitable(answer):
                    await run_bounded(contain("it", answer), TIMEOUT)
            except (KeyboardInterrupt, GeneratorExit):
                raise
            except BaseException as ex:  # SystemExit, or what test frameworks raise
                if isinstance(ex, asyncio.CancelledError) and is_being_cancelled():
                    raise
                if (id(observer), method) not in self._complained:
                    self._complained.add((id(observer), method))
                    logger.warning(
                        "observer %s.%s failed in %s, reported once; the episode is unaffected: %r",
                        type(observer).__module__,
                        type(observer).__qualname__,
                        method,
                        ex,
                        exc_info=ex,
                    )


def _describe_end(episode: str, result: EpisodeResult, reward: float | None) -> EpisodeEnded:
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


LIVE = "live"
"""Folder of these files, in the folder of the run."""

_DELAY = 1.0
"""Seconds from a change until it is written, with those that came meanwhile."""

_RECENT = 10
"""Rollouts that are kept after their end."""


class LiveRollout(BaseModel):
    """A rollout that runs, or has ended."""

    task: str
    sample: Any  # an id; like the text of an error, not always what a strict reader takes
    epoch: int
    turns: int = 0
    started: float
    ended: float = 0.0
    reward: float | None = None
    error: Any = None


class LiveFile(BaseModel):
    """What a process of a run has written."""

    host: str = Field(default_factory=socket.gethostname)
    pid: int = Field(default_factory=os.getpid)
    running: list[LiveRollout] = []
    ended: list[LiveRollout] = []


class LiveRollouts:
    """The rollouts of this process, written about once per second while they change."""

    def __init__(self, folder: Path) -> None:
        self._path = folder / f"{socket.gethostname()}-{os.getpid()}.json"
        self._running: dict[str, LiveRollout] = {}
        self._ended: deque[LiveRollout] = deque(maxlen=_RECENT)
        self._planned: asyncio.AbstractEventLoop | None = None

    @classmethod
    def of(cls, run: Path | None) -> LiveRollouts | None:
        """Return those of a run that is being trained; ``None`` if nobody can watch it."""
        folder = None if run is None else run / LIVE
        return None if folder is None or not folder.is_dir() else cls(folder)

    def start(self, episode: str, *, task: str, sample: int | str | None, epoch: int) -> None:
        """Note that an episode has begun."""
        self._running[episode] = LiveRollout(
            task=task, sample=sample, epoch=epoch, started=time.time()
        )
        self._plan()

    def count_turn(self, episode: str) -> None:
        """Note that the policy has answered a call."""
        if (rollout := self._running.get(episode)) is not None:
            rollout.turns += 1
            self._plan()

    def end(self, episode: str, reward: float | None = None, error: str | None = None) -> None:
        """Note that an episode has ended, with a reward or an error; or was only closed."""
        if (rollout := self._running.pop(episode, None)) is None:
            return
        if reward is not None or error is not None:
            rollout.reward, rollout.error, rollout.ended = reward, error, time.time()
            self._ended.append(rollout)
        self._plan()

    def _plan(self) -> None:
        loop = running_loop()
        if not self._running or loop is None:  # a worker's loop may end now; a thread may have none
            self._write()
            return
        if self._planned is not loop:
            self._planned = loop
            loop.call_later(_DELAY, self._write)

    def _write(self) -> None:
        self._planned = None
        about = LiveFile(running=list(self._running.values()), ended=list(self._ended))
        with suppress(OSError):  # the training has ended
            write_whole(self._path, json.dumps(about.model_dump(), default=str))
