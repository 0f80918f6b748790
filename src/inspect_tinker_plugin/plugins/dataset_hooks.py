"""The hooks around a dataset's episodes: executor, observers and scorers."""

from __future__ import annotations

import copy
import uuid
from collections.abc import Sequence

from inspect_ai import Task
from inspect_ai.dataset import Sample
from inspect_ai.scorer import Scorer
from inspect_ai.util import registry_info

from inspect_tinker_plugin.contracts.episodes import EpisodeResult, Outcome, TurnRequest
from inspect_tinker_plugin.contracts.errors import PluginError
from inspect_tinker_plugin.contracts.tools import Memory, ToolExecutor, ToolFunction
from inspect_tinker_plugin.episode.runner import Episode
from inspect_tinker_plugin.plugins.manager import Plugins, default_plugins
from inspect_tinker_plugin.plugins.observers import Observers, episode_observers
from inspect_tinker_plugin.tools import ToolScope, resolve_tool_executor, use_tool_executor
from inspect_tinker_plugin.tools.resolve import ToolExecutorSpec


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
