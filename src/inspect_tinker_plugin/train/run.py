"""Runs a training: server, executor, progress and report around the cookbook's own loop."""

from __future__ import annotations

import asyncio
import contextlib
import json
import logging
import os
import shlex
import sys
import time
import warnings
from collections.abc import Iterator, Mapping
from concurrent.futures import Executor
from contextlib import AbstractContextManager, ExitStack, contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import chz
from inspect_ai.log import read_eval_log
from tinker_cookbook.rl import train as cookbook
from tinker_cookbook.rl.rollouts import set_rollout_executor
from tinker_cookbook.utils.ml_log import dump_config

from inspect_tinker_plugin.contracts.errors import ConfigError, InspectRLError
from inspect_tinker_plugin.contracts.policy import TOKENIZER_FOLDER
from inspect_tinker_plugin.contracts.wording import counted, part_of
from inspect_tinker_plugin.evaluate.source import find_window
from inspect_tinker_plugin.logs import RolloutStatus, assemble_pending, figures
from inspect_tinker_plugin.logs.header import count_errors
from inspect_tinker_plugin.logs.rollout import is_masked, trajectory
from inspect_tinker_plugin.processes import alone_in, local_path
from inspect_tinker_plugin.processes.workers import run_in_loop, stopped_like_ctrl_c
from inspect_tinker_plugin.rl.mixture import MixedTask
from inspect_tinker_plugin.rl.models import require_server, require_weights
from inspect_tinker_plugin.tasks.reference import TaskRef
from inspect_tinker_plugin.train.config import (
    build_config,
    check_request,
    local_model,
    split_phases,
)
from inspect_tinker_plugin.train.data import Passes, test_last_weights
from inspect_tinker_plugin.train.history import (
    EVALUATION,
    REPORT,
    REWARD,
    ROLLOUT_LOGS,
    TEST,
    TEST_LOGS,
    check_same_run,
    last_checkpoint,
    last_weights,
    number,
    read_config,
    read_logs,
    read_steps,
    record_run,
)
from inspect_tinker_plugin.train.imitation import WarmStart, find_imitated
from inspect_tinker_plugin.train.progress import show_progress, watchable
from inspect_tinker_plugin.train.report import write_report
from inspect_tinker_plugin.train.request import TrainRequest
from inspect_tinker_plugin.train.scans import scan_batches
from inspect_tinker_plugin.train.strategies import UseFinished, use_finished

if TYPE_CHECKING:
    from tinker_local import LocalServer

LOCK = "run.lock"
"""File in a run's folder that is locked while the run is under way."""
_UNDER_WAY = "is the folder of a run that is under way; choose another --log-dir"

_MOST_AT_ONCE = 64


class InterruptedRun(Exception):
    """The run was stopped from outside; the same command continues from its last checkpoint."""


@dataclass(frozen=True)
class TrainResult:
    """The result of a finished run."""

    log_dir: Path
    """Folder of the run."""

    report: Path
    """The report."""

    steps: Mapping[int, Mapping[str, Any]]
    """Metrics of every step."""

    checkpoint: str | None = None
    """The last weights, for the Tinker API."""

    try_it: str | None = None
    """A command that samples from them."""

    evaluate_it: str | None = None
    """A command that evaluates them."""


@stopped_like_ctrl_c()
def train(request: TrainRequest) -> TrainResult:
    """Train, and leave metrics, checkpoints, ``.eval`` logs and a report in ``log_dir``.

    The report is also written when the run fails or is interrupted.

    Raises:
        ConfigError: An option cannot be used; nothing was started.
        InterruptedRun: Ctrl-C, SIGTERM or SIGHUP. Everything that was started has ended.
        LocalServerError: The local server did not start, or died.
    """
    check_request(request)
    log_dir = local_path(request.log_dir).absolute()
    request = replace(request, log_dir=log_dir)
    if (log_dir / LOCK).exists():  # a run that is under way is not planned again
        with alone_in(log_dir, LOCK, taken=_UNDER_WAY):
            pass
    # Everything that can be refused is refused before a server is started, and before the folder
    # is touched: --local leaves only its tiny model there, which the next command uses.
    run = plan_run(request, models=log_dir)
    with alone_in(log_dir, LOCK, taken=_UNDER_WAY):
        record_run(log_dir, run.identity())
        if run.trained and run.tested:
            request.say(
                f"this run is already done: {log_dir} has the checkpoint of step {run.done}; ask "
                "for more with --steps, or choose another --log-dir"
            )
            with watchable(log_dir):  # removes what a killed command has left
                _finish_logs(log_dir)
        else:
            _train(run)
    weights = last_weights(log_dir)
    try_it = None if weights is None else _rollout_command(request, run.config, weights)
    evaluate_it = None if weights is None else _evaluation_command(request, run.config)
    return TrainResult(log_dir, log_dir / REPORT, read_steps(log_dir), weights, try_it, evaluate_it)


@dataclass(frozen=True)
class Run:
    """What is to be done in a folder."""

    request: TrainRequest
    config: Any
    """The cookbook's configuration."""
    warm: WarmStart | None
    """What to imitate first."""
    steps: int
    """Steps of the whole run."""
    done: int | None
    """Steps behind the last checkpoint."""
    tested: bool
    """Whether nothing is left to test at the end."""
    passes: Passes

    @property
    def trained(self) -> bool:
        """Whether nothing is left to train."""
        return self.done is not None and self.done >= self.steps

    def identity(self) -> dict[str, Any]:
        """Return the options that a run cannot change when it is continued.

        Only what would change the meaning of checkpoints or held-out samples is one of them;
        steps, learning rate and the like may change.
        """
        data = self.config.dataset_builder
        options = data.dataset_options()
        found = {
            "model": self.config.model_name,
            "renderer": self.config.renderer_name,
            "LoRA rank": self.config.lora_rank,
            "task": data.task,
            "shares": data.mix,
            "task arguments": data.task_args,
            "batch size": options.batch_size,
            "seed": options.seed,
            "limit": options.limit,
            "sample ids": options.sample_id or options.sample_ids,
            "shuffled samples": options.sample_shuffle,
            "test task": data.test_task,
            "test split": data.test_split,
            "data to imitate": None if self.warm is None else self.warm.digest,
        }
        as_written: dict[str, Any] = json.loads(json.dumps(found, default=str))
        return as_written


def plan_run(request: TrainRequest, *, models: Path) -> Run:
    """Find out what is to be done for a request, and refuse what cannot work.

    Nothing is started, and nothing is written but the tiny model.

    Args:
        request: The training run; its folder is absolute.
        models: Where the tiny model of a local run is, or is made.
    """
    log_dir = request.log_dir
    config = build_config(request, model=_model(request, models))
    passes = config.dataset_builder.check()
    warm = None
    if request.warm_start is not None:
        if config.load_checkpoint_path is not None:
            raise ConfigError("--warm-start and load_checkpoint_path exclude each other")
        warm = WarmStart.of(request.warm_start, config, epochs=request.warm_epochs)
    batches = passes.batches
    steps = batches if config.max_steps is None else min(config.max_steps, batches)
    further = config.dataset_builder.has_test_set or config.evaluator_builders
    to_test = config.eval_every and further
    tested = any(name.startswith((TEST, EVALUATION)) for name in read_steps(log_dir).get(steps, {}))
    done = last_checkpoint(log_dir)
    run = Run(request, config, warm, steps, done, tested or not to_test, passes)
    check_same_run(log_dir, run.identity())
    return run


def _model(request: TrainRequest, models: Path) -> str:
    if not request.local:
        return str(request.model)
    if request.model is None:
        from tinker_local import make_tiny_model

        return str(make_tiny_model(models / "tiny-model", tokenizer=TOKENIZER_FOLDER))
    return local_model(request.model)


def _train(run: Run) -> None:
    request, log_dir = run.request, run.request.log_dir
    if run.done is not None and not run.trained:
        request.say(f"continuing from the checkpoint of step {run.done}")
        if changed := _changed_options(log_dir, run.config):
            request.say(f"from here on: {', '.join(changed)}")
    with ExitStack() as stack:
        server = _start_server(request, run.config, stack) if request.local else None
        if server is None:
            require_server(run.config.base_url)
        else:
            run = replace(run, config=chz.replace(run.config, base_url=server.url))
        _require_weights(run)
        run = replace(run, config=_within_window(run.config))
        stack.callback(_finish_logs, log_dir)
        stack.enter_context(watchable(log_dir))
        if not request.verbose:
            stack.enter_context(_console(log_dir / "console.log"))
        executor = stack.enter_context(_executor(request))
        penalties = run.config.dataset_builder.dataset_options().monitor_penalty
        stack.enter_context(
            show_progress(log_dir, request.say, steps=run.config.max_steps, penalties=penalties)
        )
        stack.enter_context(scan_batches(request))
        loop = _imitate_train_test(run, executor)
        try:
            run_in_loop(loop if server is None else server.during(loop))
        except (KeyboardInterrupt, asyncio.CancelledError) as stop:
            raise InterruptedRun("interrupted") from stop


_Plain = str | int | float | None

_OF_ONE_COMMAND = {"max_steps", "min_batches", "base_url", "load_checkpoint_path"}
"""Options in which the commands of one run, and the phases of one command, differ."""


def _changed_options(log_dir: Path, config: Any) -> list[str]:
    """Say which options of a continued run are other than those of the command before."""
    if not (before := read_config(log_dir)):
        return []
    now = dump_config(config)
    changed = {}
    for old, new in ((before, now), (before.get("dataset_builder", {}), now["dataset_builder"])):
        for name in old.keys() & new.keys() - _OF_ONE_COMMAND:
            found = name == "context_window" and new[name] is None  # it is the model's own
            is_plain = all(isinstance(each[name], _Plain) for each in (old, new))
            if is_plain and old[name] != new[name] and not found and not name.startswith("kl_"):
                changed[name] = f"{name} {new[name]!r} instead of {old[name]!r}"
    return [changed[name] for name in sorted(changed)]


async def _imitate_train_test(run: Run, executor: Executor | None) -> None:
    config, say, log_dir = run.config, run.request.say, run.request.log_dir
    # Not given to the cookbook's loop, which would shut it down at its end.
    set_rollout_executor(executor)
    try:
        if run.warm is not None:
            # Where training has begun, the episodes of finished groups still depend on it.
            begun = run.done is not None
            start = find_imitated(log_dir) if begun else await run.warm.imitate(config, say)
            config = chz.replace(config, load_checkpoint_path=start)
        done = run.done or 0
        for phase in split_phases(config, run.request):
            if (end := min(phase.max_steps or run.steps, run.steps)) <= done:
                continue
            phase = await use_finished(phase, done)
            if isinstance(using := phase.rollout_error_tolerance, UseFinished):
                groups = counted(len(using.logs), "group")
                say(f"{groups} of step {using.step + 1} had ended before, and are used again")
            try:
                await cookbook.main(phase)
            except (AssertionError, ValueError) as error:
                if problem := await asyncio.to_thread(_nothing_to_train_on, log_dir):
                    raise InspectRLError(problem) from error
                raise
            done = end
            if phase.async_config is not None and (left := _count_missing_steps(log_dir, end)):
                say(
                    f"{part_of(left, end, 'step')} not done: once every sample is taken, the "
                    "asynchronous loop throws away groups that are more than "
                    f"{counted(phase.async_config.max_steps_off_policy, 'step')} old "
                    "(async_config.max_steps_off_policy)"
                )
        if not run.tested:
            await test_last_weights(config, run.steps)
    finally:
        set_rollout_executor(None)


def _count_missing_steps(log_dir: Path, steps: int) -> int:
    """Return how many steps of a finished loop are missing."""
    return steps - sum(number(row, REWARD) is not None for row in read_steps(log_dir).values())


def _nothing_to_train_on(log_dir: Path) -> str | None:
    """Say that no rollout of the last step has a token to train on: the loop cannot take that."""
    assemble_pending(log_dir / ROLLOUT_LOGS)
    logs = read_logs(log_dir, ROLLOUT_LOGS)
    step = max((log.batch for log in logs if log.batch is not None), default=-1)
    paths = [log.path for log in logs if log.batch == step]
    records = [each for path in paths for each in read_eval_log(str(log_dir / path)).samples or []]
    graded = [each for each in records if figures(each).get("status") == RolloutStatus.GRADED]
    made = [trajectory(each) for each in graded]
    if not made or any(each is None or not all(map(is_masked, each.transitions)) for each in made):
        return None
    ids = ", ".join(dict.fromkeys(str(record.id) for record in records))
    causes = ", ".join(f"{cause}: {count}" for cause, count in count_errors(records).items())
    failed = f" ({causes} failed, at the price of --on-error)" if causes else ""
    return (
        f"step {step + 1} has nothing to train on: no rollout of its samples ({ids:.200}) has a "
        f"sampled token that counts{failed}. Prompts that are longer than the context window "
        "(--context-window) have none, nor have solvers that never ask the model. Leave these "
        "samples out, or make batches larger (--batch-size)."
    )


def _require_weights(run: Run) -> None:
    """Check that the weights exist that the run is told to start from, or to stay close to."""
    config, reference = run.config, run.config.kl_reference_config
    for weights in (
        config.load_checkpoint_path if run.done is None else None,
        None if reference is None else reference.load_checkpoint_path,
    ):
        if weights is not None:
            require_weights(weights, base_url=config.base_url)


def _within_window(config: Any) -> Any:
    """Add the model's context window, unless the run states one."""
    data = config.dataset_builder
    if data.dataset_options().context_window is not None:
        return config
    window = find_window(config.model_name, config.base_url)
    return chz.replace(config, dataset_builder=chz.replace(data, context_window=window))


def _rollout_command(request: TrainRequest, config: Any, weights: str) -> str:
    """Write the command that rolls out a group with some weights."""
    first = config.dataset_builder.mixed_tasks()[0]
    words = ["inspect", "rl", "rollout", *_task_words(first)]
    words += ["--model", weights, "--tokenizer", config.model_name]
    words += ["--renderer", config.renderer_name, "--max-tokens", str(config.max_tokens)]
    if request.local:
        words += ["--local", str(request.log_dir)]
    elif request.base_url is not None:
        words += ["--base-url", request.base_url]
    return shlex.join(words)


def _evaluation_command(request: TrainRequest, config: Any) -> str:
    """Write the command that evaluates the run's last weights."""
    first = config.dataset_builder.mixed_tasks()[0]
    model = f"tinker/{request.log_dir}"
    return shlex.join(["inspect", "eval", *_task_words(first), "--model", model])


def _task_words(task: MixedTask) -> list[str]:
    name = str(task.task)
    if os.path.isabs(name):  # `inspect eval` takes no whole path without @task
        name = TaskRef.parse(name).spec
    words = [name]
    for name, value in (task.task_args or {}).items():
        words += ["-T", f"{name}={json.dumps(value) if not isinstance(value, str) else value}"]
    return words


def _start_server(request: TrainRequest, config: Any, stack: ExitStack) -> LocalServer:
    from tinker_local import SERVER_FOLDER, LocalServer, LocalSettings

    data = config.dataset_builder.dataset_options()
    size = min(_MOST_AT_ONCE, max(8, data.batch_size * data.group_size))
    rank = max(LocalSettings().max_lora_rank, config.lora_rank)
    settings = LocalSettings(sample_batch=size, train_batch=size, max_lora_rank=rank)
    request.say("starting the local Tinker API server (about 20 s)")
    started = time.monotonic()
    state = request.log_dir / SERVER_FOLDER
    server = LocalServer(config.model_name, state_dir=state, settings=settings)
    stack.enter_context(server)
    stack.enter_context(server.export_environ())
    request.say(f"the local server is ready after {time.monotonic() - started:.0f} s")
    return server


def _executor(request: TrainRequest) -> AbstractContextManager[Executor | None]:
    if request.workers is not None:
        from inspect_tinker_plugin.processes.workers import worker_pool

        return worker_pool(request.workers)
    if request.ray is not None:
        from inspect_tinker_plugin.processes.ray_executor import ray_pool

        return ray_pool(request.ray)
    return contextlib.nullcontext()


def _finish_logs(log_dir: Path) -> None:
    """Make logs of all parts that wait, and the report; failures of both are only printed."""
    for name in (ROLLOUT_LOGS, TEST_LOGS):
        try:
            if (log_dir / name).is_dir():
                assemble_pending(log_dir / name)
        except OSError as error:
            print(f"some rollout logs cannot be written: {error}", file=sys.stderr)
    try:
        write_report(log_dir)
    except OSError as error:
        print(f"the report cannot be written: {error}", file=sys.stderr)


@contextmanager
def _console(path: Path) -> Iterator[None]:
    """Send what the cookbook prints to a file: its log on stderr, tables and bars."""
    terminal = sys.stderr
    with (
        path.open("a", encoding="utf-8", buffering=1) as file,
        contextlib.redirect_stderr(file),
        contextlib.redirect_stdout(file),
        warnings.catch_warnings(),
    ):
        warnings.simplefilter("ignore", FutureWarning)
        try:
            yield
        finally:  # the cookbook leaves its handler, and sandboxes may warn at the process's end
            for handler in logging.getLogger().handlers:
                if isinstance(handler, logging.StreamHandler) and handler.stream is file:
                    handler.setStream(terminal)
                    handler.setLevel(logging.WARNING)
