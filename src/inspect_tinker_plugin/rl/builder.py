"""Datasets from plain configuration: the builder for the cookbook's ``rl.train.Config``."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import chz
from tinker_cookbook.model_info import get_recommended_renderer_name
from tinker_cookbook.renderers import Renderer, get_renderer
from tinker_cookbook.rl.types import RLDataset, RLDatasetBuilder
from tinker_cookbook.tokenizer_utils import get_tokenizer

from inspect_tinker_plugin.errors import ConfigError
from inspect_tinker_plugin.rl.dataset import InspectRLDataset, as_rl_dataset


@chz.chz
class InspectRLDatasetBuilder(RLDatasetBuilder):
    """Builds train and test datasets of Inspect tasks; every field is plain data.

    Use it as ``dataset_builder`` of ``tinker_cookbook.rl.train.Config``. Options that have no
    field of their own go into ``options`` (and ``test_options``), under the names that
    ``as_rl_dataset`` gives them.
    """

    task: str = chz.field(doc="Registered name (pkg/task) or file (file.py@task).")
    model_name: str = chz.field(doc="Model under training; decides about the tokenizer.")
    renderer_name: str | None = chz.field(
        default=None, doc="Cookbook renderer; the model's recommended one when None."
    )
    task_args: dict[str, Any] = chz.field(default_factory=dict, doc="Arguments of the task.")
    batch_size: int = chz.field(default=1, doc="Groups a batch (P).")
    group_size: int = chz.field(default=1, doc="Episodes a group (G).")
    max_samples: int | None = chz.field(default=None, doc="Use only the first so many samples.")
    epochs: int = chz.field(default=1, doc="Passes over the samples.")
    shuffle: bool = chz.field(default=True, doc="Another order in every epoch.")
    seed: int | None = chz.field(default=None, doc="Seed of that order.")
    max_turns: int | None = chz.field(default=None, doc="Model calls an episode may make.")
    sandbox: str | None = chz.field(default=None, doc="Replaces the task's sandbox provider.")
    reward: str = chz.field(default="mean", doc="Reward expression.")
    group_reward: str | None = chz.field(default=None, doc="Reward expression of a whole group.")
    tool_executor: str | None = chz.field(default=None, doc="Who carries out tool calls.")
    log_dir: str | None = chz.field(
        default=None, doc="Folder for one .eval log a batch, in `train` and `test` below it."
    )
    options: dict[str, Any] = chz.field(
        default_factory=dict, doc="Further options of as_rl_dataset, by name."
    )
    test_task: str | None = chz.field(default=None, doc="Task of the test dataset, if any.")
    test_task_args: dict[str, Any] = chz.field(
        default_factory=dict, doc="Arguments of the test task."
    )
    test_group_size: int = chz.field(default=1, doc="Episodes a group of the test dataset.")
    test_options: dict[str, Any] = chz.field(
        default_factory=dict, doc="Options of the test dataset, over those of the train dataset."
    )

    async def __call__(self) -> tuple[RLDataset, RLDataset | None]:
        """Build both datasets.

        Raises:
            ConfigError: A task, an option or the renderer is not usable.
        """
        renderer = self._renderer()
        train = self._dataset(self.task, self.task_args, renderer, self._logs("train"))
        if self.test_task is None:
            return train, None
        changes = {
            "group_size": self.test_group_size,
            "epochs": 1,
            "shuffle": False,
            **self._logs("test"),
            **self.test_options,
        }
        return train, self._dataset(self.test_task, self.test_task_args, renderer, changes)

    def _logs(self, part: str) -> dict[str, Any]:
        return {} if self.log_dir is None else {"log_dir": Path(self.log_dir) / part}

    def _renderer(self) -> Renderer:
        name = self.renderer_name
        if name is None:
            try:
                name = get_recommended_renderer_name(self.model_name)
            except (KeyError, ValueError) as error:
                raise ConfigError(
                    f"tinker_cookbook recommends no renderer for the model {self.model_name!r}; "
                    "give renderer_name, e.g. 'qwen3'"
                ) from error
        return get_renderer(name, get_tokenizer(self.model_name), model_name=self.model_name)

    def _dataset(
        self, task: str, task_args: dict[str, Any], renderer: Renderer, changes: dict[str, Any]
    ) -> InspectRLDataset:
        named = {
            "batch_size": self.batch_size,
            "group_size": self.group_size,
            "max_samples": self.max_samples,
            "epochs": self.epochs,
            "shuffle": self.shuffle,
            "seed": self.seed,
            "max_turns": self.max_turns,
            "sandbox": self.sandbox,
            "reward": self.reward,
            "group_reward": self.group_reward,
            "tool_executor": self.tool_executor,
        }
        try:
            return as_rl_dataset(
                task, renderer, task_args=task_args, **{**named, **self.options, **changes}
            )
        except TypeError as error:
            if "unexpected keyword argument" in str(error):
                raise ConfigError(f"InspectRLDatasetBuilder.options: {error}") from error
            raise
