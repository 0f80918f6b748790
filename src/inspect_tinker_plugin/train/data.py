"""What a run is trained and evaluated on: enough batches, a held-out test set, evaluators."""

from __future__ import annotations

import asyncio
import json
import math
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from itertools import chain
from logging import getLogger
from pathlib import Path
from typing import Any
from uuid import uuid4

import chz
import tinker
from inspect_ai import eval_async
from inspect_ai.dataset import Sample
from inspect_ai.log import EvalLog
from inspect_ai.model import GenerateConfig
from tinker_cookbook.eval.evaluators import SamplingClientEvaluator
from tinker_cookbook.renderers import Renderer
from tinker_cookbook.rl.metric_util import RLTestSetEvaluator
from tinker_cookbook.rl.types import RLDataset

from inspect_tinker_plugin import inspect_internals as internals
from inspect_tinker_plugin.contracts.errors import ConfigError, InspectRLError
from inspect_tinker_plugin.episode.task import resolve_roles
from inspect_tinker_plugin.evaluate.overlap import RecordedDataset, TrainingRecord
from inspect_tinker_plugin.evaluate.provider import connected_model
from inspect_tinker_plugin.evaluate.source import Connection, Source, find_window
from inspect_tinker_plugin.logs.header import evaluated_at
from inspect_tinker_plugin.logs.writer import remove_before
from inspect_tinker_plugin.options import Selection
from inspect_tinker_plugin.processes import local_path
from inspect_tinker_plugin.processes.workers import freeze_memory_once
from inspect_tinker_plugin.rl.builder import InspectRLDatasetBuilder
from inspect_tinker_plugin.rl.dataset import InspectRLDataset, prepare_task
from inspect_tinker_plugin.rl.mixture import InspectRLMixture, plan_mixture
from inspect_tinker_plugin.rl.models import make_renderer
from inspect_tinker_plugin.rl.task_handle import resumed_at, training_id
from inspect_tinker_plugin.tasks.reference import resolve_task
from inspect_tinker_plugin.tasks.samples import (
    SelectedSamples,
    held_out_hashes,
    sample_hash,
    select_samples,
)
from inspect_tinker_plugin.train.history import (
    EVALUATION,
    EVALUATION_LOGS,
    METRICS,
    last_weights,
    read_config,
)

_ONE_BATCH = 1_000_000
"""Groups in a batch of the test set, so that an evaluation is one log."""


@dataclass(frozen=True, kw_only=True)
class Passes:
    """How a training goes over its samples."""

    groups: int
    """Groups of a pass; a mixture, which has no passes, takes each batch for one."""

    batch_size: int
    batches: int
    """Batches of all passes."""

    @property
    def largest(self) -> int:
        """Groups of the largest batch."""
        return min(self.batch_size, self.groups)

    def count_groups(self, steps: int) -> int:
        """Count the groups of the first steps: the last batch of a pass may have fewer."""
        passes, rest = divmod(steps, math.ceil(self.groups / self.batch_size))
        return passes * self.groups + rest * self.batch_size


@chz.chz
class TrainingDataBuilder(InspectRLDatasetBuilder):
    """Adds to ``InspectRLDatasetBuilder`` the number of batches and the held-out test set."""

    min_batches: int | None = chz.field(
        default=None, doc="Repeat the samples until there are this many batches."
    )
    test_split: str | None = chz.field(
        default=None, doc="Part of the task to hold out: 0.1, 10% or a number of samples."
    )
    eval_every: int = chz.field(
        default=0, doc="Steps between evaluations, for the logs; 0 if they are not known."
    )
    test_samples: int | None = chz.field(default=None, doc="Use only this many test samples.")
    allow_overlap: bool = chz.field(
        default=False, doc="Allow test samples that are also trained on."
    )
    run: str | None = chz.field(
        default=None, doc="Folder of the run, for the record of what it is trained on."
    )
    takes_ahead: bool = chz.field(
        default=False, doc="Whether the trainer takes batches before the step that trains on them."
    )

    async def __call__(self) -> tuple[RLDataset, RLDataset | None]:
        """Build both datasets."""
        self._check_test_set()
        samples, held_out = self._samples()
        renderer = self.renderer()
        train = self.train_dataset(
            renderer, samples=samples, batches=self.min_batches, **self._passes(samples)
        )
        first = None if self.log_dir is None else resumed_at(local_path(self.log_dir).absolute())
        test = self._test_dataset(renderer, held_out, first, self.eval_every)
        if test is not None and not self.allow_overlap:
            check_overlap(_all_samples(train), _all_samples(test))
        freeze_memory_once()
        return self._record(train), test

    def _record(self, train: InspectRLDataset | InspectRLMixture) -> RLDataset:
        if self.run is None:
            return train
        run = Path(self.run)
        first = resumed_at(run)
        metrics = run / METRICS if self.takes_ahead else None
        record = TrainingRecord(run, first)
        return RecordedDataset(train, record, metrics=metrics, first_step=first)

    @property
    def has_test_set(self) -> bool:
        """Whether there is a test set."""
        return self.test_task is not None or self.test_split is not None

    def test_set(self, step: int) -> RLDataset | None:
        """Build the test dataset alone, to be rolled out once, after so many training steps."""
        _, held_out = self._samples()
        return self._test_dataset(self.renderer(), held_out, step, 1)

    def check(self) -> Passes:
        """Find out what building would refuse, without starting a log or a sandbox.

        Returns:
            The batches of the train dataset.
        """
        self._check_test_set()
        samples, held_out = self._samples()
        renderer = self.renderer()
        options = self.dataset_options(**self._passes(samples))
        tasks = self.mixed_tasks(samples)
        plan = plan_mixture(tasks, renderer, options, batches=self.min_batches)
        of_test: Iterable[Sample] | None = None if held_out is None else chain(*held_out)
        if self.test_task is not None:
            changes = self.options_of_test(**self._changes_of_test_task())
            _, of_test = prepare_task(self.test_task, renderer, changes, self.test_task_args)
        if of_test is not None and not self.allow_overlap:
            check_overlap(chain(*samples), of_test)
        size = options.batch_size
        if len(tasks) > 1:
            return Passes(groups=size, batch_size=size, batches=plan.batches)
        groups = len(samples[0])
        batches = math.ceil(groups / size) * options.epochs
        return Passes(groups=groups, batch_size=size, batches=batches)

    def _check_test_set(self) -> None:
        if self.test_split is not None and self.test_task is not None:
            raise ConfigError("--test-task and --test-split exclude each other")

    def _test_dataset(
        self,
        renderer: Renderer,
        held_out: Sequence[SelectedSamples] | None,
        first_step: int | None,
        asked_every: int,
    ) -> InspectRLDataset | InspectRLMixture | None:
        """Build the test dataset; the held-out samples of several tasks are one batch."""
        when: dict[str, Any] = {"first_step": first_step, "asked_every": asked_every}
        if self.test_task is not None:
            changes = {**self._changes_of_test_task(), **when}
            return self.test_dataset(renderer, self.test_task, self.test_task_args, **changes)
        if held_out is None:
            return None
        parts = [
            self.test_dataset(
                renderer,
                str(each.task),
                dict(each.task_args or {}),
                samples=each.samples,
                batch_size=_ONE_BATCH,
                **when,
            )
            for each in self.mixed_tasks(held_out)
        ]
        return parts[0] if len(parts) == 1 else InspectRLMixture(parts)

    def _changes_of_test_task(self) -> dict[str, Any]:
        choice = dict.fromkeys(("sample_id", "sample_ids", "sample_shuffle"))
        return {**choice, "limit": self.test_samples, "batch_size": _ONE_BATCH}

    def selection(self, **changes: Any) -> Selection:
        """Return the choice of samples, with a fixed seed if they are shuffled.

        A run that is continued must have the same samples as before.
        """
        options = self.dataset_options(**changes)
        if options.sample_shuffle is True:
            changes = {**changes, "sample_shuffle": options.seed or 1}
            return self.dataset_options(**changes).selection
        return options.selection

    def _samples(self) -> tuple[list[SelectedSamples], list[SelectedSamples] | None]:
        """Return, per task, the samples to train on, and those that a split holds out."""
        chosen = []
        roles = self.dataset_options().model_roles
        for each in self.mixed_tasks():
            task = resolve_task(each.task, each.task_args, roles=roles).task
            chosen.append(select_samples(task, self.selection(**each.options)))
        if self.test_split is None:
            return chosen, None
        splits = [split_samples(each, self.test_split, seed=self.seed or 0) for each in chosen]
        pairs = list(zip(chosen, splits, strict=True))
        return (
            [each.subset(split.train) for each, split in pairs],
            [each.subset(split.test)[: self.test_samples] for each, split in pairs],
        )

    def _passes(self, samples: Sequence[SelectedSamples]) -> dict[str, Any]:
        """Return as many epochs as one task needs for the batches that are asked for."""
        options = self.dataset_options()
        if self.min_batches is None or len(samples) > 1:
            return {}
        per_pass = math.ceil(len(samples[0]) / options.batch_size)
        return {"epochs": max(options.epochs, math.ceil(self.min_batches / per_pass))}


def _all_samples(dataset: InspectRLDataset | InspectRLMixture) -> Iterator[Sample]:
    sources = dataset.sources if isinstance(dataset, InspectRLMixture) else [dataset]
    return chain(*(source.samples for source in sources))


@dataclass(frozen=True)
class Split:
    """Indices of the samples on each side, in the order in which they were given."""

    train: list[int]
    test: list[int]


def split_samples(samples: Sequence[Sample], share: str, *, seed: int = 0) -> Split:
    """Hold out a part of a dataset.

    Which samples are held out depends on their content and the seed only, so it is the same
    in every process and after a resume. Samples of the same content go to the same side.

    Args:
        samples: All samples.
        share: A fraction below 1 (``"0.1"``), a percentage (``"10%"``), or a number of
            samples (``"50"``).
        seed: Another seed holds out other samples.
    """
    hashes = [sample_hash(sample) for sample in samples]
    held = held_out_hashes(Counter(hashes), share, seed=seed)
    return Split(
        train=[index for index, each in enumerate(hashes) if each not in held],
        test=[index for index, each in enumerate(hashes) if each in held],
    )


_SHOWN = 3


def check_overlap(train: Iterable[Sample], test: Iterable[Sample]) -> None:
    """Refuse test samples that are also trained on."""
    held = {sample_hash(sample): sample.id for sample in test}
    shared = {held[each]: sample.id for sample in train if (each := sample_hash(sample)) in held}
    if shared:
        shown = ", ".join(f"{test!r} = {train!r}" for test, train in list(shared.items())[:_SHOWN])
        more = ", …" if len(shared) > _SHOWN else ""
        raise ConfigError(
            f"{len(shared)} of {len(held)} test samples are also trained on (test id = train "
            f"id: {shown}{more}); hold some out with --test-split, or say --allow-overlap"
        )


@chz.chz
class EvaluatorBuilder:
    """A further evaluation, whose figures have names that begin with ``eval/``."""

    builder: Callable[[], SamplingClientEvaluator]

    def at_every_step(self) -> EvaluatorBuilder:
        """Return the builder for a trainer that evaluates now, whatever its step is."""
        if not isinstance(self.builder, EvalTasksBuilder):
            return self
        return chz.replace(self, builder=chz.replace(self.builder, eval_every=1))

    def __call__(self) -> SamplingClientEvaluator:
        """Build the evaluator."""
        return _NamedEvaluator(self.builder())


class _NamedEvaluator(SamplingClientEvaluator):
    def __init__(self, evaluator: SamplingClientEvaluator) -> None:
        self._evaluator = evaluator

    async def __call__(self, sampling_client: tinker.SamplingClient) -> dict[str, float]:
        figures = await self._evaluator(sampling_client)
        return {EVALUATION + name.removeprefix(EVALUATION): n for name, n in figures.items()}


def keep_in_run(builder: Any, log_dir: Path) -> EvaluatorBuilder:
    """Have an evaluator leave its logs in the run's folder, unless it names another."""
    if getattr(builder, "log_dir", "") is None:
        builder = chz.replace(builder, log_dir=str(log_dir / EVALUATION_LOGS))
    return EvaluatorBuilder(builder=builder)


async def test_last_weights(config: Any, steps: int) -> None:
    """Evaluate the last weights, which the cookbook's loop does not."""
    folder = Path(config.log_path)
    weights, dataset = last_weights(folder), config.dataset_builder.test_set(steps)
    if weights is None:
        return
    client = tinker.ServiceClient(base_url=config.base_url)
    sampler = await client.create_sampling_client(model_path=weights)
    evaluators = [each.at_every_step()() for each in config.evaluator_builders]
    if dataset is not None:
        strategy = config.effective_rollout_strategy()
        test = RLTestSetEvaluator(dataset, max_tokens=config.max_tokens, strategy=strategy)
        evaluators.append(test)
    metrics: dict[str, float] = {}
    for evaluator in evaluators:
        metrics |= await evaluator(sampler)
    with (folder / METRICS).open("a", encoding="utf-8") as file:
        file.write(json.dumps({"step": steps, **metrics}) + "\n")


logger = getLogger(__name__)


@chz.chz
class EvalTasksBuilder:
    """Evaluates tasks as ``inspect eval --model tinker/RUN`` does, with the weights of the moment.

    One of the ``evaluator_builders`` of ``tinker_cookbook.rl.train.Config``.
    """

    tasks: list[str] = chz.field(doc="Registered names (pkg/task) or files (file.py@task).")
    model_name: str = chz.field(doc="Model under training; determines the tokenizer.")
    renderer_name: str = chz.field(doc="Renderer of the training.")
    task_args: dict[str, Any] = chz.field(default_factory=dict, doc="Arguments of the tasks.")
    model_roles: dict[str, Any] | None = chz.field(
        default=None, doc="Models by role, such as a grader."
    )
    limit: int | None = chz.field(default=None, doc="Use only this many samples of each.")
    max_tokens: int = chz.field(doc="Tokens per reply.")
    temperature: float = chz.field(default=1.0, doc="Sampling temperature.")
    context_window: int | None = chz.field(
        default=None, doc="Tokens that the model takes; the server is asked when None."
    )
    base_url: str | None = chz.field(default=None, doc="Tinker API server, if not the hosted one.")
    run: str | None = chz.field(default=None, doc="Folder of the run, which says its samples.")
    log_dir: str | None = chz.field(default=None, doc="Folder of the logs.")
    eval_every: int = chz.field(
        default=0, doc="Steps between evaluations, for the logs; 0 if they are not known."
    )

    def __call__(self) -> SamplingClientEvaluator:
        """Build the evaluator."""
        return EvalTasks(self)


class EvalTasks(SamplingClientEvaluator):
    """Runs tasks, and returns the metrics of their scorers."""

    def __init__(self, config: EvalTasksBuilder) -> None:
        self._config = config
        self._first_step = resumed_at(Path(config.run)) if config.run else 0
        self._done = 0

    async def __call__(self, sampling_client: tinker.SamplingClient) -> dict[str, float]:
        """Run the tasks with some weights.

        Logs that the run has left of this step and later ones are removed: it does them again.

        Raises:
            CancelledError: The training is being ended; figures would be of a part of the samples.
            InspectRLError: A task cannot be run; samples that fail are counted.

        Returns:
            By ``task/metric`` the metrics, with the scorer before the metric where a task has
            several, and the reducer of epochs where it has several; and the samples that failed, if
            any, as ``task/failed``.
        """
        config = self._config
        step = evaluated_at(self._first_step, self._done, config.eval_every)
        self._done += 1
        connection = await asyncio.to_thread(self._connect, sampling_client, step)
        known = {} if config.run is None else {"training": training_id(Path(config.run))}
        try:
            logs = await eval_async(
                config.tasks,
                task_args=config.task_args,
                model=connected_model(connection, GenerateConfig()),
                model_roles=resolve_roles({}, config.model_roles or {}) or None,
                limit=config.limit,
                log_dir=config.log_dir,
                log_realtime=False,
                fail_on_error=False,
                metadata={**known, "policy_step": step},
            )
        except Exception as error:  # of the tasks' files, or of Inspect, which refuses a task
            reason, tasks = internals.in_one_line(error), ", ".join(config.tasks)
            raise InspectRLError(f"the evaluation of {tasks} cannot run: {reason}") from error
        if len(logs) < len(config.tasks) or any(log.status == "cancelled" for log in logs):
            raise asyncio.CancelledError  # which an eval may keep to itself
        if step is not None:
            await asyncio.to_thread(_forget_earlier, logs, step)
        # In a thread: a log that loads its samples in a running loop exchanges asyncio's functions.
        return await asyncio.to_thread(
            lambda: {name: value for log in logs for name, value in _figures(log)}
        )

    def _connect(self, sampler: tinker.SamplingClient, step: int | None) -> Connection:
        config = self._config
        source = Source(
            weights=self._weights(step),
            base_model=config.model_name,
            renderer=config.renderer_name,
            context_window=config.context_window,
            base_url=config.base_url,
            max_tokens=config.max_tokens,
            temperature=config.temperature,
            run=None if config.run is None else Path(config.run),
            step=step or None,  # what is sampled from before the first one may be imitated
        )
        renderer = make_renderer(source.renderer, model=source.base_model)
        window = config.context_window or find_window(config.model_name, config.base_url)
        return Connection(source=source, sampler=sampler, renderer=renderer, window=window)

    def _weights(self, step: int | None) -> str | None:
        """Name weights that run and step do not name: Inspect caches replies by the model's name.

        Returns:
            A new name if the step is not known; before the first step the weights that the run
            started from, ``None`` if that was the base model.
        """
        run = self._config.run
        if step is None:
            return f"{run or self._config.model_name}@{uuid4().hex}"
        if step > 0 or run is None:
            return None
        return read_config(Path(run)).get("load_checkpoint_path")


def _forget_earlier(logs: Iterable[EvalLog], step: int) -> None:
    for log in logs:
        folder = Path(log.location).parent
        remove_before(folder, log.eval, "*.eval", lambda earlier, _: earlier >= step)


def _figures(log: EvalLog) -> Iterator[tuple[str, float]]:
    """Yield the figures of a log; the log says more of what has failed."""
    name = log.eval.task.rpartition("/")[2]
    failed = [sample for sample in log.samples or [] if sample.error is not None]
    if failed:
        yield f"{name}/failed", len(failed)
    if log.error is not None or failed:
        reason = log.error or failed[0].error
        message = "" if reason is None else reason.message
        logger.warning("the evaluation of %s failed (%s): %s", name, message, log.location)
    scores = [] if log.results is None else log.results.scores
    several = len({score.name for score in scores}) > 1
    for score in scores:
        reduced = sum(each.name == score.name for each in scores) > 1
        parts = [name, score.name if several else None, score.reducer if reduced else None]
        prefix = "/".join(part for part in parts if part)
        for metric in score.metrics.values():
            yield f"{prefix}/{metric.name}", float(metric.value)
