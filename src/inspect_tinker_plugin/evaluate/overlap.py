"""The record of what a run was trained on, and the samples of an eval that are in it."""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping
from functools import cache
from logging import getLogger
from pathlib import Path
from typing import Any

import anyio
from inspect_ai.dataset import Sample
from inspect_ai.hooks import Hooks, SampleStart, TaskEnd, hooks
from inspect_ai.log import (
    EvalSample,
    MetadataEdit,
    ProvenanceData,
    edit_eval_log,
    write_eval_log_async,
)
from tinker_cookbook.rl.types import EnvGroupBuilder, RLDataset

from inspect_tinker_plugin import inspect_internals as internals
from inspect_tinker_plugin.contracts.errors import ConfigError
from inspect_tinker_plugin.processes import read_rows, write_whole
from inspect_tinker_plugin.rl.dataset import InspectRLDataset
from inspect_tinker_plugin.rl.group import InspectGroupBuilder
from inspect_tinker_plugin.rl.mixture import InspectRLMixture
from inspect_tinker_plugin.tasks.samples import logged_hash, sample_hash

logger = getLogger(__name__)

TRAINED = "trained.jsonl"
"""File of a run's folder: the step of a sample's first use, with its hash and id."""

IMITATED = -1
"""Step of what was imitated before the first step of the training."""

METADATA = "trained_on"
"""Key of a log's metadata with the overlap."""

Ids = Mapping[str, str | int]
"""Ids of samples, by their hash."""


class TrainingRecord:
    """The file that says what a run was trained on; each sample is in it once.

    Args:
        run: Folder of the run.
        first_step: The step that comes next: what an interrupted run took for later ones is
            forgotten.
    """

    def __init__(self, run: Path, first_step: int) -> None:
        self._path = run / TRAINED
        rows = [row for row in _read_record(self._path) if row["step"] < first_step]
        write_whole(self._path, "".join(json.dumps(row) + "\n" for row in rows))
        self._known = {each for row in rows for each in row["samples"]}

    def add(self, step: int, samples: Ids) -> None:
        """Record the samples of a step before they are used."""
        new = {each: id for each, id in samples.items() if each not in self._known}
        if not new:
            return
        with self._path.open("a", encoding="utf-8") as file:
            file.write(json.dumps({"step": step, "samples": new}) + "\n")
        self._known |= new.keys()


def read_trained(run: Path, step: int | None = None) -> dict[str, str | int]:
    """Return hashes and ids of the samples that a run was trained on, imitated ones too.

    Args:
        run: Folder of the run.
        step: Count only what the weights after so many steps have learned; all if ``None``.
    """
    found: dict[str, str | int] = {}
    if step == 0:  # the base model
        return found
    if not (run / TRAINED).is_file():
        raise ConfigError(
            f"the run {run} has no {TRAINED}, so it is not known what it was trained on"
        )
    for row in _read_record(run / TRAINED):
        if step is None or row["step"] < step:
            found |= row["samples"]
    return found


def _read_record(path: Path) -> list[dict[str, Any]]:
    rows = read_rows(path)
    for row in rows:
        if not (isinstance(row.get("step"), int) and isinstance(row.get("samples"), dict)):
            raise ConfigError(f"{path} has a line that is no record of what was trained on: {row}")
    return rows


def was_trained_on(sample: Sample | EvalSample, trained: Ids) -> bool:
    """Whether a sample of a task or of a log is among those of a run."""
    hashes = {sample_hash(sample)}
    if isinstance(sample, Sample):
        hashes.add(logged_hash(sample))  # what is imitated comes from logs
    return not hashes.isdisjoint(trained)


class RecordedDataset(RLDataset):
    """A dataset whose batches are recorded as the trainer takes them."""

    def __init__(
        self,
        dataset: InspectRLDataset | InspectRLMixture,
        record: TrainingRecord,
        *,
        metrics: Path | None = None,
        first_step: int = 0,
    ) -> None:
        self.dataset = dataset
        self._record = record
        self._metrics = metrics
        self._first_step = first_step
        self._before = 0 if metrics is None else len(read_rows(metrics))
        self._originals: dict[str, str] = {}
        """Hashes of the samples as they are in the task, by those of what plugins make of them."""
        sources = dataset.sources if isinstance(dataset, InspectRLMixture) else [dataset]
        for source in sources:
            for original, sample in source.samples.transform_each():
                self._originals[sample_hash(sample)] = sample_hash(original)

    def get_batch(self, index: int) -> list[EnvGroupBuilder]:
        """Return the group builders of one batch, and record their samples."""
        groups = self.dataset.get_batch(index)
        self._record.add(self._first_use(index), self._ids(groups))
        return list(groups)

    def __len__(self) -> int:
        return len(self.dataset)

    def _ids(self, groups: Iterable[InspectGroupBuilder]) -> Ids:
        found = {sample_hash(group.sample): group.sample.id or "" for group in groups}
        originals = {
            self._originals[each]: id for each, id in found.items() if each in self._originals
        }
        return {**found, **originals}

    def _first_use(self, index: int) -> int:
        """Return the first step that may train on a batch: if in doubt, an earlier one."""
        if self._metrics is None:
            return index
        steps = [row["step"] for row in read_rows(self._metrics)[self._before :] if "step" in row]
        return min([index, max(steps, default=self._first_step)])


class Firewall(Hooks):
    """Warns of samples that the evaluated model was trained on, and writes them into the log."""

    def __init__(self) -> None:
        self._found: dict[str, list[str | int]] = {}
        """Ids of the samples that were trained on, by eval."""

    def enabled(self) -> bool:
        """Whether the model of this eval comes from a run that says what it was trained on."""
        return bool(_find_trained())

    async def on_sample_start(self, data: SampleStart) -> None:
        """Look at a sample with the contents of its files, which logs do not have."""
        running = internals.current_sample()
        if running is not None:
            self._look(data.eval_id, running.sample, running.task)

    async def on_task_end(self, data: TaskEnd) -> None:
        """Look also at samples that come from an earlier log, and write what was found."""
        # In a thread: a log that loads its samples in a running loop exchanges asyncio's functions.
        for sample in await anyio.to_thread.run_sync(lambda: list(data.log.samples or ())):
            self._look(data.eval_id, sample, data.log.eval.task)
        found = self._found.pop(data.eval_id, None)
        if found is None:
            return
        said = {"model": data.log.eval.model, "samples": len(found), "ids": found}
        reason = "Samples of this eval that the model was trained on."
        edited = edit_eval_log(
            data.log,
            [MetadataEdit(metadata_set={METADATA: said})],
            ProvenanceData(author="inspect-tinker-plugin", reason=reason),
        )
        data.log.log_updates = edited.log_updates  # of the log that eval() returns
        data.log.recompute_tags_and_metadata()
        await write_eval_log_async(data.log, header_only=True)

    def _look(self, eval_id: str, sample: Sample | EvalSample, task: str) -> None:
        if not was_trained_on(sample, _find_trained()):
            return
        if eval_id not in self._found:
            model = internals.active_model()
            logger.warning(
                "task %r: sample %r was trained on by %s, so its score does not show what the "
                "model does with new samples. The log's metadata (%s) has all such samples, as "
                "does `inspect rl overlap`",
                task,
                sample.id,
                model,
                METADATA,
            )
        found = self._found.setdefault(eval_id, [])
        if sample.id is not None and sample.id not in found:
            found.append(sample.id)


@cache
def watch_evals() -> None:
    """Register the firewall, once a model needs it: Inspect announces hooks that it starts with."""
    hooks(name="trained_on", description="Tells which samples of an eval its model has seen.")(
        Firewall
    )


def _find_trained() -> Ids:
    """Return what the model of the running eval was trained on; nothing outside of evals."""
    model: Any = internals.active_model()
    found: Ids = getattr(model.api, METADATA, {}) if model is not None else {}
    return found
