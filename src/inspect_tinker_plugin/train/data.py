"""The dataset builder of a training run: enough batches, and a test set that is held out."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from typing import Any

import chz
from inspect_ai.dataset import Sample
from tinker_cookbook.rl.types import RLDataset

from inspect_tinker_plugin.errors import ConfigError
from inspect_tinker_plugin.rl.builder import InspectRLDatasetBuilder
from inspect_tinker_plugin.rl.dataset import InspectRLDataset, NumberedSamples
from inspect_tinker_plugin.samples import plugin_samples
from inspect_tinker_plugin.tasks import resolve_task
from inspect_tinker_plugin.train.split import check_overlap, split_samples


@chz.chz
class TrainingDataBuilder(InspectRLDatasetBuilder):
    """Adds to ``InspectRLDatasetBuilder`` what a run wants of its data as a whole."""

    min_batches: int | None = chz.field(
        default=None, doc="Go through the samples again until there are so many batches."
    )
    test_split: str | None = chz.field(
        default=None, doc="Part of the task to hold out: 0.1, 10% or a number of samples."
    )
    test_samples: int | None = chz.field(
        default=None, doc="Use only the first so many test samples."
    )
    allow_overlap: bool = chz.field(
        default=False, doc="Allow test samples that are also trained on."
    )

    async def __call__(self) -> tuple[RLDataset, RLDataset | None]:
        """Build both datasets.

        Raises:
            ConfigError: A task, an option or the renderer is not usable, or training and test
                samples overlap.
        """
        plain = _replaced(self, **self._changes())
        train, test = await InspectRLDatasetBuilder.__call__(plain)
        if test is not None and not self.allow_overlap:
            check_overlap(_samples(train), _samples(test))
        return train, test

    def _changes(self) -> dict[str, Any]:
        changes: dict[str, Any] = {}
        if self.test_split is not None:
            if self.test_task is not None:
                raise ConfigError("--test-task and --test-split exclude each other")
            split = split_samples(self._chosen(), self.test_split, seed=self.seed or 0)
            changes = {
                "max_samples": None,
                "options": {**self.options, "sample_ids": split.train},
                "test_task": self.task,
                "test_task_args": self.task_args,
                "test_options": {"sample_ids": split.test[: self.test_samples]},
            }
        elif self.test_task is not None:
            changes = {"test_options": {"max_samples": self.test_samples}}
        if "test_options" in changes:
            # One batch, so that an evaluation is one log.
            changes["test_options"].update({"batch_size": 1_000_000, **self.test_options})
        if self.min_batches is not None:
            ids = changes.get("options", self.options).get("sample_ids")
            size = len(self._chosen()) if ids is None else len(ids)
            an_epoch = math.ceil(size / self.batch_size)
            if an_epoch:
                changes["epochs"] = max(self.epochs, math.ceil(self.min_batches / an_epoch))
        return changes

    def _chosen(self) -> Sequence[Sample]:
        """Return the task's samples up to ``max_samples``."""
        resolved = resolve_task(self.task, self.task_args)
        samples = plugin_samples(resolved.task, NumberedSamples(resolved.task.dataset))
        if self.max_samples is None or self.max_samples >= len(samples):
            return samples
        return [samples[position] for position in range(self.max_samples)]


def _replaced(builder: TrainingDataBuilder, **changes: Any) -> TrainingDataBuilder:
    return chz.replace(builder, **changes)


def _samples(dataset: RLDataset) -> Iterator[Sample]:
    """Go once through the samples of a dataset."""
    assert isinstance(dataset, InspectRLDataset)
    for batch in range(len(dataset) // dataset.options.epochs):
        for builder in dataset.get_batch(batch):
            yield builder.sample
