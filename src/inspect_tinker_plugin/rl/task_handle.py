"""Makes a task picklable: by its reference, or by value when it has none."""

from __future__ import annotations

import copy
import pickle
import threading
import uuid
from dataclasses import dataclass, field
from typing import Any

from inspect_ai import Task
from inspect_ai.dataset import MemoryDataset

from inspect_tinker_plugin.contracts.errors import ErrorPolicy, TaskError
from inspect_tinker_plugin.episode.runner import EpisodeRunner
from inspect_tinker_plugin.options import DatasetOptions
from inspect_tinker_plugin.processes.memory import freeze_memory_once
from inspect_tinker_plugin.processes.workers import dump
from inspect_tinker_plugin.rewards import resolve_group_reward, resolve_reward
from inspect_tinker_plugin.rewards.resolve import ResolvedGroupReward
from inspect_tinker_plugin.rl.ending import RewardRules
from inspect_tinker_plugin.rl.hooks import DatasetHooks, with_plugin_scorers
from inspect_tinker_plugin.tasks.loading import with_roles
from inspect_tinker_plugin.tasks.reference import TaskRef, task_reference
from inspect_tinker_plugin.tasks.sandboxes import choose_sandbox
from inspect_tinker_plugin.tokens.episode import DatasetRenderer

_KEEP = 8
_received: dict[str, TaskHandle] = {}
_lock = threading.Lock()


@dataclass(frozen=True)
class Parts:
    """The live objects that all episodes of a dataset share within one process."""

    runner: EpisodeRunner
    context: DatasetRenderer
    outcomes: RewardRules
    group_reward: ResolvedGroupReward | None
    hooks: DatasetHooks


class TaskHandle:
    """Task, renderer and options of one dataset, shared by all of its group builders.

    It pickles with plain ``pickle``. The receiving process builds the task once and keeps it
    for all later builders of the same dataset: from its reference, or from a by-value copy
    (``cloudpickle``, without the samples, which the builders carry) when it was made ad hoc,
    or changed after a function had made it.

    Args:
        task: The task.
        ref: How the task was named, ``None`` when it was given as an object.
        renderer: A cookbook renderer.
        options: Options of the dataset.
    """

    def __init__(
        self, task: Task, ref: TaskRef | None, renderer: Any, options: DatasetOptions
    ) -> None:
        self.uid = uuid.uuid4().hex
        self.name = task.name
        self.renderer = renderer
        self.options = options
        self._ref = ref
        self._task: Task | None = task
        self._parts: Parts | None = None
        self._payload: bytes | None = None
        self._received = False

    def parts(self) -> Parts:
        """Return the live objects of this process, made on first use."""
        if self._parts is None:
            self._parts = self._make_parts()
            if self._received:
                freeze_memory_once()  # a worker, which has loaded all that it needs
        return self._parts

    def _make_parts(self) -> Parts:
        options = self.options
        task = with_plugin_scorers(self._resolve())
        sandbox = choose_sandbox(options.sandbox)
        group_reward = options.group_reward
        context = DatasetRenderer(self.renderer)
        runner = EpisodeRunner(
            task,
            options=options,
            solver=options.solver,
            sandbox=sandbox.for_inspect,
            sandbox_mapping=sandbox.mapping,
            keep_log=options.log_dir is not None,
        )
        runner.prepared.count_tokens = context.count_tokens
        return Parts(
            runner=runner,
            context=context,
            outcomes=RewardRules(resolve_reward(options.reward), ErrorPolicy.of(options.on_error)),
            group_reward=None if group_reward is None else resolve_group_reward(group_reward),
            hooks=DatasetHooks(task, tool_executor=options.tool_executor),
        )

    def _resolve(self) -> Task:
        if self._task is None:
            assert self._ref is not None
            with with_roles(self.options.model_roles):
                self._task = self._ref.resolve()
        return self._task

    def __reduce__(self) -> tuple[Any, ...]:
        """Pickle as a payload that is made once, however many builders refer to it."""
        if self._payload is None:
            self._payload = self._dump()
        return _receive, (self.uid, self._payload)

    def _dump(self) -> bytes:
        task = self._resolve()
        ref = self._ref or task_reference(task, verify=True)
        live = _without_samples(task) if ref is None else None
        try:
            return dump(_Payload(self.name, ref, live, self.renderer, self.options))
        except Exception as error:
            raise TaskError(
                f"task {self.name!r} cannot be sent to another process ({error}). Make it with a "
                "@task function in a file or package, so that the process can build its own, and "
                "give the reward by name and model roles as strings."
            ) from error


@dataclass(frozen=True)
class _Payload:
    name: str
    ref: TaskRef | None
    task: Task | None
    renderer: Any
    options: DatasetOptions = field(repr=False)


def _without_samples(task: Task) -> Task:
    bare = copy.copy(task)
    bare.dataset = MemoryDataset([], name=task.dataset.name, location=task.dataset.location)
    return bare


def _receive(uid: str, payload: bytes) -> TaskHandle:
    """Unpickle a handle, once per process and dataset."""
    with _lock:
        handle = _received.get(uid)
        if handle is None:
            received: _Payload = pickle.loads(payload)
            handle = TaskHandle.__new__(TaskHandle)
            handle.uid = uid
            handle.name = received.name
            handle.renderer = received.renderer
            handle.options = received.options
            handle._ref = received.ref
            handle._task = received.task
            handle._parts = None
            handle._payload = payload
            handle._received = True
            _received[uid] = handle
            while len(_received) > _KEEP:
                _received.pop(next(iter(_received)))
        return handle
