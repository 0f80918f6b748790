"""The cookbook's evaluator that runs Inspect tasks by the provider, beside a training."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator
from logging import getLogger
from pathlib import Path
from typing import Any

import chz
import tinker
from inspect_ai import eval_async
from inspect_ai.log import EvalLog
from inspect_ai.model import GenerateConfig
from tinker_cookbook.eval.evaluators import SamplingClientEvaluator

from inspect_tinker_plugin.evaluate.provider import connected_model
from inspect_tinker_plugin.evaluate.source import Connection, Source, find_window
from inspect_tinker_plugin.rl.models import make_renderer

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
    limit: int | None = chz.field(default=None, doc="Use only this many samples of each.")
    max_tokens: int = chz.field(doc="Tokens per reply.")
    temperature: float = chz.field(default=1.0, doc="Sampling temperature.")
    context_window: int | None = chz.field(
        default=None, doc="Tokens that the model takes; the server is asked when None."
    )
    base_url: str | None = chz.field(default=None, doc="Tinker API server, if not the hosted one.")
    run: str | None = chz.field(default=None, doc="Folder of the run, which says its samples.")
    log_dir: str | None = chz.field(default=None, doc="Folder of the logs.")

    def __call__(self) -> SamplingClientEvaluator:
        """Build the evaluator."""
        return EvalTasks(self)


class EvalTasks(SamplingClientEvaluator):
    """Runs tasks, and returns the metrics of their scorers."""

    def __init__(self, config: EvalTasksBuilder) -> None:
        self._config = config

    async def __call__(self, sampling_client: tinker.SamplingClient) -> dict[str, float]:
        """Run the tasks with some weights.

        Returns:
            By ``task/metric``, or by ``task/scorer/metric`` where a task has several scorers, the
            metrics; and the samples that failed, if any, as ``task/failed``.
        """
        config = self._config
        connection = await asyncio.to_thread(self._connect, sampling_client)
        logs = await eval_async(
            config.tasks,
            task_args=config.task_args,
            model=connected_model(connection, GenerateConfig()),
            limit=config.limit,
            log_dir=config.log_dir,
            log_realtime=False,
            fail_on_error=False,
        )
        return {name: value for log in logs for name, value in _figures(log)}

    def _connect(self, sampler: tinker.SamplingClient) -> Connection:
        config = self._config
        source = Source(
            base_model=config.model_name,
            renderer=config.renderer_name,
            context_window=config.context_window,
            base_url=config.base_url,
            max_tokens=config.max_tokens,
            temperature=config.temperature,
            run=None if config.run is None else Path(config.run),
        )
        renderer = make_renderer(source.renderer, model=source.base_model)
        window = find_window(source, source.base_url)
        return Connection(source=source, sampler=sampler, renderer=renderer, window=window)


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
    for score in scores:
        prefix = name if len(scores) == 1 else f"{name}/{score.name}"
        for metric in score.metrics.values():
            yield f"{prefix}/{metric.name}", float(metric.value)
