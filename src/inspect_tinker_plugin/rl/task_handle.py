"""Task, renderer, options and logs of one dataset, in whatever process its groups run."""

from __future__ import annotations

import pickle
import threading
import uuid
import weakref
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from inspect_ai import Task
from inspect_ai.log import EvalLog
from tinker_cookbook.checkpoint_utils import CHECKPOINTS_BASE_NAME, get_last_checkpoint

from inspect_tinker_plugin import inspect_internals as internals
from inspect_tinker_plugin.contracts.errors import ConfigError, ErrorPolicy, RewardError, TaskError
from inspect_tinker_plugin.contracts.hooks import Memory, ToolExecutor, ToolFunction
from inspect_tinker_plugin.episode.runner import EpisodeRunner
from inspect_tinker_plugin.logs import LogRun, close_run, make_header, open_run
from inspect_tinker_plugin.options import DatasetOptions
from inspect_tinker_plugin.processes.workers import dump, freeze_memory_once
from inspect_tinker_plugin.rewards import (
    MonitorPenalty,
    ResolvedGroupReward,
    ResolvedReward,
    resolve_group_reward,
    resolve_reward,
)
from inspect_tinker_plugin.rewards.group import Ranking
from inspect_tinker_plugin.rl.ending import RewardRules
from inspect_tinker_plugin.rl.hooks import (
    LiveRollouts,
    Observers,
    episode_observers,
    with_plugin_scorers,
)
from inspect_tinker_plugin.rl.models import model_name
from inspect_tinker_plugin.tasks.loading import load_files, loaded_files
from inspect_tinker_plugin.tasks.reference import TaskRef
from inspect_tinker_plugin.tasks.samples import with_samples
from inspect_tinker_plugin.tokens.episode import DatasetRenderer
from inspect_tinker_plugin.tools import resolve_tool_executor

TRAINING_ID = "training.id"
"""File in a trainer's folder with the id that the logs of its training have."""

_BEGUN = ("config.json", "logs.log")
"""What the cookbook writes before it asks for a dataset."""

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
    executor: ToolExecutor | ToolFunction | None
    observers: Observers
    live: LiveRollouts | None
    """Where its running rollouts are shown, if somebody can watch them."""
    memory: Memory
    """What tool executors share in all episodes."""


class TaskHandle:
    """Task, renderer and options of one dataset, shared by all of its group builders.

    It pickles with plain ``pickle``. The receiving process makes the task once: from its
    reference, or from a copy by value without the samples, which the builders carry, when it was
    given as an object.

    Args:
        task: The task; ``None`` to make it from its reference when it is needed.
        ref: How the task was named, ``None`` when it was given as an object.
        renderer: A cookbook renderer.
        options: Options of the dataset.
        name: Name of the task.
        files: Files of other tasks, which may register what the options name.
    """

    def __init__(
        self,
        task: Task | None,
        ref: TaskRef | None,
        renderer: Any,
        options: DatasetOptions,
        name: str,
        files: Sequence[Path] = (),
    ) -> None:
        self.uid = uuid.uuid4().hex
        self.name = name
        self.renderer = renderer
        self.options = options
        self._ref = ref
        self._files = files
        self._task = task
        self._parts: Parts | None = None
        self._payload: bytes | None = None
        self._received = False
        self._announced = False

    @property
    def log_run(self) -> LogRun | None:
        """Where the logs of the dataset are made, if it has some."""
        log_dir = self.options.log_dir
        return None if log_dir is None else LogRun(Path(log_dir), self.uid)

    @property
    def run_folder(self) -> Path | None:
        """The trainer's folder, or else the log folder, if there is one."""
        run = self.log_run
        return None if run is None else trainers_folder(run.log_dir) or run.log_dir

    def parts(self) -> Parts:
        """Return the live objects of this process, made on first use."""
        if self._parts is None:
            self._parts = self._make_parts()
            if self._received:
                freeze_memory_once()  # a worker, which has loaded all that it needs
        return self._parts

    async def announce(self) -> None:
        """Tell Inspect's hooks, once per process, that a run and its task begin."""
        prepared = self.parts().runner
        if prepared.calls_hooks and not self._announced:
            self._announced = True
            header = self.make_header({})
            await internals.announce_run(header.eval, header.plan)

    def make_header(self, metadata: dict[str, Any]) -> EvalLog:
        """Describe the dataset as a log does."""
        return make_header(
            self.parts().runner,
            run_id=self.uid,
            group_size=self.options.group_size,
            model=model_name(self.renderer),
            metadata=metadata,
        )

    def _make_parts(self) -> Parts:
        load_files(self._files)
        options = self.options
        task = with_plugin_scorers(self._resolve())
        context = DatasetRenderer(self.renderer)
        runner = EpisodeRunner(
            task,
            options=options,
            solver=options.solver,
            sandbox=options.sandbox,
            keep_log=options.log_dir is not None,
        )
        runner.count_tokens = context.count_tokens
        runner.context_window = options.context_window
        runner.run_id = self.uid
        return Parts(
            runner=runner,
            context=context,
            outcomes=RewardRules(self._resolve_reward(runner), ErrorPolicy.of(options.on_error)),
            group_reward=self._resolve_group_reward(runner),
            executor=resolve_tool_executor(options.tool_executor),
            observers=episode_observers(task),
            live=LiveRollouts.of(self.run_folder),
            memory={},
        )

    def _resolve_reward(self, runner: EpisodeRunner) -> ResolvedReward:
        """Return the reward, less the penalties of monitors."""
        reward, penalties = resolve_reward(self.options.reward), self.options.monitor_penalty
        if not penalties:
            return reward
        watching = runner.monitors.monitors
        for name in penalties:
            if name not in watching:
                raise RewardError(
                    f"task {runner.name!r}: monitor_penalty names {name!r}, and its "
                    f"sentinel has {', '.join(map(repr, watching)) or 'no monitor'}"
                )
        return resolve_reward(MonitorPenalty(reward.aggregator, weights=penalties))

    def _resolve_group_reward(self, runner: EpisodeRunner) -> ResolvedGroupReward | None:
        if self.options.group_reward is None:
            return None
        resolved = resolve_group_reward(self.options.group_reward)
        role = resolved.aggregator.role if isinstance(resolved.aggregator, Ranking) else None
        if role is not None and role not in runner.model_roles:
            raise RewardError(
                f"task {runner.name!r}: {resolved.name} asks the model role {role!r}, "
                f"which is not set: model_roles={{{role!r}: 'provider/model'}}, or --model-role "
                f"{role}=provider/model"
            )
        return resolved

    def _resolve(self) -> Task:
        if self._task is None:
            assert self._ref is not None
            self._task = self._ref.resolve(self.options.model_roles)
        return self._task

    def __reduce__(self) -> tuple[Any, ...]:
        """Pickle as a payload that is made once, however many builders refer to it."""
        if self._payload is None:
            self._payload = self._dump()
        return _receive, (self.uid, self._payload)

    def _dump(self) -> bytes:
        live = None if self._ref else with_samples(self._resolve(), [])
        own = None if self._ref is None else self._ref.file
        others = [each for each in loaded_files() if each != own]
        try:
            return dump((live, self._ref, self.renderer, self.options, self.name, others))
        except Exception as error:
            raise TaskError(
                f"task {self.name!r} cannot be sent to another process ({error}). Name a @task "
                "function, or give it, so that the process can build its own task, and give the "
                "reward by name and model roles as strings."
            ) from error


def _receive(uid: str, payload: bytes) -> TaskHandle:
    """Unpickle a handle, once per process and dataset."""
    with _lock:
        handle = _received.get(uid)
        if handle is None:
            handle = TaskHandle(*pickle.loads(payload))
            handle.uid, handle._payload, handle._received = uid, payload, True
            _received[uid] = handle
            while len(_received) > _KEEP:
                _received.pop(next(iter(_received)))
        return handle


def trainers_folder(log_dir: Path) -> Path | None:
    """Return the trainer's folder that a log folder is in, if it is in one."""
    for folder in (log_dir, *list(log_dir.parents)[:3]):
        begun = all((folder / name).is_file() for name in _BEGUN)
        if begun or (folder / CHECKPOINTS_BASE_NAME).is_file():
            return folder
    return None


def resumed_at(log_dir: Path) -> int:
    """Return the step at which a trainer resumes, if the log folder is inside its own folder.

    The cookbook does not tell a dataset where it resumes; it reads the same file.
    """
    folder = trainers_folder(log_dir)
    last = None if folder is None else get_last_checkpoint(str(folder))
    return 0 if last is None or last.batch is None else last.batch


def training_id(folder: Path) -> str:
    """Return the id of the training in a trainer's folder: the same one whenever it continues."""
    path = folder / TRAINING_ID
    try:
        with suppress(FileExistsError), path.open("x", encoding="utf-8") as file:
            file.write(uuid.uuid4().hex)
        return path.read_text(encoding="utf-8")
    except OSError as error:
        raise ConfigError(f"the folder {folder} cannot be written ({error})") from error


def open_logs(
    handle: TaskHandle,
    *,
    batches: int,
    first_step: int | None = None,
    asked_every: int | None = None,
) -> None:
    """Prepare the log folder of a new dataset, if it has one.

    Args:
        handle: Shared by the dataset's groups.
        batches: Batches of the dataset; a trainer may go through them more than once.
        first_step: The trainer's step that asks for the first batch; not 0 in a resumed run, and
            ``None`` if it is not known. Logs that the same training left of this step and later
            ones are removed.
        asked_every: Of a test set, the trainer's steps between evaluations; 0 if they are not
            known, ``None`` for batches to train on.
    """
    run, parts, options = handle.log_run, handle.parts(), handle.options
    if run is None:
        return
    folder = None if first_step is None else trainers_folder(run.log_dir)
    group_reward, on_error = parts.group_reward, options.on_error
    header = handle.make_header(
        {
            "reward_expression": resolve_reward(options.reward).name,
            "group_reward_expression": None if group_reward is None else group_reward.name,
            "monitor_penalty": dict(options.monitor_penalty),
            "on_error": dict(on_error) if isinstance(on_error, Mapping) else on_error,
            "renderer": type(handle.renderer).__name__,
            "batch_size": options.batch_size,
            "batches": batches,
            "training": None if folder is None else training_id(folder),
            "first_step": first_step or 0,
            "asked_every": asked_every,
            "dataset_epochs": options.epochs,
            "shuffle": options.shuffle,
            "seed": options.seed,
        }
    )
    open_run(run.log_dir, header)
    weakref.finalize(handle, close_run, run).atexit = False
