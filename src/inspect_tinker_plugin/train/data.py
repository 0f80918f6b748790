"""The dataset builder of a training run: enough batches, and a held-out test set."""

from __future__ import annotations

import math
from typing import Any

import chz
from tinker_cookbook.rl.types import RLDataset

from inspect_tinker_plugin.errors import ConfigError
from inspect_tinker_plugin.memory import freeze_memory_once
from inspect_tinker_plugin.rl.builder import InspectRLDatasetBuilder
from inspect_tinker_plugin.rl.dataset import check_dataset
from inspect_tinker_plugin.tasks.reference import resolve_task
from inspect_tinker_plugin.tasks.samples import SelectedSamples, select_samples
from inspect_tinker_plugin.tasks.selection import Selection
from inspect_tinker_plugin.tasks.split import check_overlap, split_samples

_ONE_BATCH = 1_000_000
"""Groups in a batch of the test set, so that an evaluation is one log."""


@chz.chz
class TrainingDataBuilder(InspectRLDatasetBuilder):
    """Adds to ``InspectRLDatasetBuilder`` the number of batches and the held-out test set."""

    min_batches: int | None = chz.field(
        default=None, doc="Repeat the samples until there are this many batches."
    )
    test_split: str | None = chz.field(
        default=None, doc="Part of the task to hold out: 0.1, 10% or a number of samples."
    )
    test_samples: int | None = chz.field(default=None, doc="Use only this many test samples.")
    allow_overlap: bool = chz.field(
        default=False, doc="Allow test samples that are also trained on."
    )

    async def __call__(self) -> tuple[RLDataset, RLDataset | None]:
        """Build both datasets.

        Raises:
            ConfigError: A task, an option or the renderer is not usable, or training and test
                samples overlap.
        """
        if self.test_split is not None and self.test_task is not None:
            raise ConfigError("--test-task and --test-split exclude each other")
        samples, held_out = self._samples()
        renderer = self.renderer()
        train = self.train_dataset(renderer, samples=samples, **self._passes(len(samples)))
        if held_out is not None:
            test = self.test_dataset(
                renderer, self.task, self.task_args, samples=held_out, batch_size=_ONE_BATCH
            )
        elif self.test_task is not None:
            changes = self._changes_of_test_task()
            test = self.test_dataset(renderer, self.test_task, self.test_task_args, **changes)
        else:
            freeze_memory_once()
            return train, None
        if not self.allow_overlap:
            check_overlap(train.samples, test.samples)
        freeze_memory_once()
        return train, test

    def check(self) -> int:
        """Find out what building would refuse, without starting a log or a sandbox.

        Returns:
            Batches of the train dataset.
        """
        if self.test_split is not None and self.test_task is not None:
            raise ConfigError("--test-task and --test-split exclude each other")
        samples, held_out = self._samples()
        renderer = self.renderer()
        options = self.dataset_options(**self._passes(len(samples)))
        check_dataset(self.task, renderer, options, task_args=self.task_args, samples=samples)
        if self.test_task is not None:
            of_test = self.options_of_test(**self._changes_of_test_task())
            held_out = check_dataset(
                self.test_task, renderer, of_test, task_args=self.test_task_args
            )
        if held_out is not None and not self.allow_overlap:
            check_overlap(samples, held_out)
        return math.ceil(len(samples) / options.batch_size) * options.epochs

    def _changes_of_test_task(self) -> dict[str, Any]:
        choice = dict.fromkeys(("sample_id", "sample_ids", "sample_shuffle"))
        return {**choice, "limit": self.test_samples, "batch_size": _ONE_BATCH}

    def selection(self) -> Selection:
        """Return the choice of samples, with a fixed seed if they are shuffled.

        A run that is continued must have the same samples as before.
        """
        options = self.dataset_options()
        if options.sample_shuffle is True:
            return self.dataset_options(sample_shuffle=options.seed or 1).selection
        return options.selection

    def _samples(self) -> tuple[SelectedSamples, SelectedSamples | None]:
        """Return the samples to train on, and those that a split holds out."""
        chosen = select_samples(resolve_task(self.task, self.task_args).task, self.selection())
        if self.test_split is None:
            return chosen, None
        split = split_samples(chosen, self.test_split, seed=self.seed or 0)
        return chosen.subset(split.train), chosen.subset(split.test)[: self.test_samples]

    def _passes(self, size: int) -> dict[str, Any]:
        options = self.dataset_options()
        if self.min_batches is None:
            return {}
        per_pass = math.ceil(size / options.batch_size)
        return {"epochs": max(options.epochs, math.ceil(self.min_batches / per_pass))}
