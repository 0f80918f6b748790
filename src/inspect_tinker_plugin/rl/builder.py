"""Builds datasets for the cookbook's ``rl.train.Config``."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import chz
from tinker_cookbook.renderers import Renderer
from tinker_cookbook.rl.types import RLDataset, RLDatasetBuilder

from inspect_tinker_plugin.contracts.errors import ConfigError
from inspect_tinker_plugin.contracts.wording import counted
from inspect_tinker_plugin.options import DatasetOptions, declared_options, read_keywords
from inspect_tinker_plugin.processes import local_path
from inspect_tinker_plugin.rl.dataset import (
    InspectRLDataset,
    build_dataset,
)
from inspect_tinker_plugin.rl.mixture import InspectRLMixture, MixedTask, build_mixture
from inspect_tinker_plugin.rl.models import make_renderer
from inspect_tinker_plugin.rl.task_handle import resumed_at
from inspect_tinker_plugin.tasks.samples import SelectedSamples

_DECLARED = {each.name: each for each in declared_options()}


def short_name(task: str) -> str:
    """Return a task's own name: the part after the file or the package."""
    file, at, name = task.rpartition("@")
    if at and file:
        return name
    return Path(task).stem if task.endswith((".py", ".ipynb")) else Path(task).name


def _arguments_by_task(names: Sequence[str], given: dict[str, Any]) -> list[dict[str, Any]]:
    """Give each task its arguments: ``NAME.KEY`` is for one of several tasks, ``KEY`` for all."""
    if len(names) == 1:
        return [given]
    found: list[dict[str, Any]] = [{} for _ in names]
    own = [short_name(name) for name in names]
    for key, value in given.items():
        name, dot, rest = key.rpartition(".")
        if dot and name not in own:
            raise ConfigError(
                f"the task argument {key!r} is for a task {name!r}, and the tasks are "
                f"{', '.join(own)}"
            )
        for arguments, each in zip(found, own, strict=True):
            # What is for one task takes precedence over what is for all.
            if each == name if dot else f"{each}.{key}" not in given:
                arguments[rest] = value
    return found


def _option(name: str, **changes: Any) -> Any:
    """Make the field of a declared option, with its default and its help text."""
    option = _DECLARED[name]
    return chz.field(**{"default": option.default, "doc": option.help, **changes})


@chz.chz
class InspectRLDatasetBuilder(RLDatasetBuilder):
    """Builds train and test datasets of Inspect tasks; every field is plain data.

    Use it as ``dataset_builder`` of ``tinker_cookbook.rl.train.Config``. The options of
    ``as_rl_dataset`` are fields of the same names; ``options`` (and ``test_options``) may hold
    them as well, and take precedence.
    """

    task: str | list[str] = chz.field(
        doc="Registered name (pkg/task) or file (file.py@task); several are mixed."
    )
    mix: list[float] | None = chz.field(
        default=None, doc="Shares of several tasks, in their order; equal ones when None."
    )
    model_name: str = chz.field(doc="Model under training; determines the tokenizer.")
    renderer_name: str | None = chz.field(
        default=None, doc="Cookbook renderer; the model's recommended one when None."
    )
    task_args: dict[str, Any] = chz.field(
        default_factory=dict,
        doc="Arguments of the task; of several tasks each gets all, but NAME.KEY only task NAME.",
    )
    limit: int | tuple[int, int] | None = _option("limit")
    sample_id: str | int | list[str | int] | None = _option("sample_id")
    sample_ids: list[str | int] | None = _option("sample_ids")
    sample_shuffle: bool | int | None = _option("sample_shuffle")
    batch_size: int = _option("batch_size")
    group_size: int = _option("group_size")
    epochs: int = _option("epochs")
    shuffle: bool = _option("shuffle", default=True)
    seed: int | None = _option("seed")
    sampler: Any = _option("sampler")
    sampler_logs: list[str] | None = _option("sampler_logs")
    solver: Any = _option("solver")
    sandbox: Any = _option("sandbox")
    sandbox_config: Any = _option("sandbox_config")
    tool_executor: Any = _option("tool_executor")
    reward: Any = _option("reward")
    group_reward: Any = _option("group_reward")
    monitor_penalty: dict[str, float] | None = _option("monitor_penalty", default=None)
    on_error: Any = _option("on_error")
    rollout_limits: Any = _option("rollout_limits")
    context_window: int | None = _option("context_window")
    log_dir: str | None = _option(
        "log_dir", doc="Folder for one .eval log per batch, in `train` and `test` below it."
    )
    max_turns: int | None = _option("max_turns")
    message_limit: int | None = _option("message_limit")
    token_limit: int | str | None = _option("token_limit")
    time_limit: int | None = _option("time_limit")
    working_limit: int | None = _option("working_limit")
    cost_limit: float | None = _option("cost_limit")
    score_on_error: bool = _option("score_on_error")
    score_sandbox: str | None = _option("score_sandbox")
    score_files: list[str] | None = _option("score_files")
    sentinel: Any = _option("sentinel")
    max_sandboxes: int | None = _option("max_sandboxes")
    max_subprocesses: int | None = _option("max_subprocesses")
    stop_timeout: float = _option("stop_timeout")
    model_roles: dict[str, Any] | None = _option("model_roles", default=None)
    side_models: dict[str, str] | None = _option("side_models", default=None)
    interleaved: bool = chz.field(
        default=False,
        doc="Another dataset takes single groups out of its batches, as the cookbook's "
        "interleaving does: logs then name no step.",
    )
    options: dict[str, Any] = chz.field(
        default_factory=dict, doc="Options of as_rl_dataset by name, over the fields."
    )
    test_task: str | None = chz.field(default=None, doc="Task of the test dataset, if any.")
    test_task_args: dict[str, Any] = chz.field(
        default_factory=dict, doc="Arguments of the test task."
    )
    test_group_size: int = chz.field(default=1, doc="Episodes per group of the test dataset.")
    test_options: dict[str, Any] = chz.field(
        default_factory=dict, doc="Options of the test dataset, over those of the train dataset."
    )

    async def __call__(self) -> tuple[RLDataset, RLDataset | None]:
        """Build both datasets.

        Raises:
            ConfigError: A task, an option or the renderer is not usable.
        """
        renderer = self.renderer()
        train = self.train_dataset(renderer)
        if isinstance(train, InspectRLDataset):
            train.interleaved = self.interleaved
        if self.test_task is None:
            return train, None
        return train, self.test_dataset(renderer, self.test_task, self.test_task_args)

    def renderer(self) -> Renderer:
        """Make the renderer of the model."""
        return make_renderer(self.renderer_name, model=self.model_name, option="renderer_name")

    def train_dataset(
        self,
        renderer: Renderer,
        *,
        samples: Sequence[SelectedSamples] | None = None,
        batches: int | None = None,
        **changes: Any,
    ) -> InspectRLDataset | InspectRLMixture:
        """Build the train dataset: of one task, or a mixture of several.

        Args:
            renderer: The renderer of the model.
            samples: Per task, samples that were chosen before.
            batches: Minimum number of batches of a mixture.
            changes: Options that take precedence.
        """
        options = self.dataset_options(**changes)
        first = (
            None if options.log_dir is None else resumed_at(local_path(options.log_dir).absolute())
        )
        tasks = self.mixed_tasks(samples)
        if len(tasks) > 1:
            return build_mixture(tasks, renderer, options, batches=batches, first_step=first)
        (only,) = tasks
        return build_dataset(
            only.task,
            renderer,
            options,
            task_args=only.task_args,
            samples=only.samples,
            first_step=first,
        )

    def mixed_tasks(self, samples: Sequence[SelectedSamples] | None = None) -> list[MixedTask]:
        """Return the tasks with their shares, arguments and samples.

        Raises:
            ConfigError: The number of shares is not that of the tasks, or an argument is for a
                task that is not there.
        """
        names = [self.task] if isinstance(self.task, str) else list(self.task)
        if not names:
            raise ConfigError("task names no task; give at least one")
        shares = [1.0] * len(names) if self.mix is None else self.mix
        if len(shares) != len(names):
            raise ConfigError(
                f"mix has {counted(len(shares), 'share')} for {counted(len(names), 'task')}; give "
                "one per task, in their order"
            )
        arguments = _arguments_by_task(names, self.task_args)
        tasks = [
            MixedTask(name, share, args)
            for name, share, args in zip(names, shares, arguments, strict=True)
        ]
        if len(names) > 1 and self.dataset_options().sample_id is not None:
            tasks = [replace(each, options=self._own_ids(each, names)) for each in tasks]
        if samples is not None:
            tasks = [replace(each, samples=own) for each, own in zip(tasks, samples, strict=True)]
        return tasks

    def _own_ids(self, task: MixedTask, names: Sequence[str]) -> dict[str, Any]:
        """Return the sample ids for one task of several: its own, written NAME:ID, and bare ones.

        A task for which there is none is used as a whole.
        """
        ids = self.dataset_options().selection.patterns
        known = {short_name(name) for name in names}
        own = []
        for each in ids:
            name, colon, rest = str(each).partition(":")
            if not colon or name not in known:
                own.append(each)
            elif name == short_name(str(task.task)):
                own.append(rest)
        return {"sample_id": own or None}

    def test_dataset(
        self,
        renderer: Renderer,
        task: str,
        task_args: dict[str, Any],
        *,
        samples: SelectedSamples | None = None,
        first_step: int | None = None,
        asked_every: int = 0,
        **changes: Any,
    ) -> InspectRLDataset:
        """Build a test dataset: one pass over the samples in their order."""
        return build_dataset(
            task,
            renderer,
            self.options_of_test(**changes),
            task_args=task_args,
            samples=samples,
            first_step=first_step,
            asked_every=asked_every,
        )

    def options_of_test(self, **changes: Any) -> DatasetOptions:
        """Merge the options of the test dataset: ``test_options`` take precedence."""
        log_dir = {} if self.log_dir is None else {"log_dir": Path(self.log_dir) / "test"}
        return self.dataset_options(
            **{
                "group_size": self.test_group_size,
                "epochs": 1,
                "shuffle": False,
                "sampler": None,
                "sampler_logs": None,
                **log_dir,
                **changes,
                **self._read(self.test_options, "test_options"),
            }
        )

    def dataset_options(self, **changes: Any) -> DatasetOptions:
        """Merge the options: the fields, overridden by ``options``, overridden by ``changes``.

        Raises:
            ConfigError: An option is unknown or has an impossible value.
        """
        given = {name: getattr(self, name) for name in _DECLARED}
        given["model_roles"] = given["model_roles"] or {}
        given["side_models"] = given["side_models"] or {}
        given["monitor_penalty"] = given["monitor_penalty"] or {}
        if self.log_dir is not None:
            given["log_dir"] = Path(self.log_dir) / "train"
        return DatasetOptions(**{**given, **self._read(self.options, "options"), **changes})

    def _read(self, options: dict[str, Any], field: str) -> dict[str, Any]:
        try:
            return read_keywords(options, function=f"InspectRLDatasetBuilder.{field}")
        except TypeError as error:
            raise ConfigError(str(error)) from error
