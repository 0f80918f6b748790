"""Runs a training: server, executor, progress and report around the cookbook's own loop."""

from __future__ import annotations

import asyncio
import contextlib
import json
import os
import shlex
import sys
import time
import warnings
from collections.abc import Coroutine, Iterator, Mapping
from concurrent.futures import Executor
from contextlib import AbstractContextManager, ExitStack, contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import chz
import tinker
from filelock import FileLock, Timeout
from tinker_cookbook.rl import train as cookbook
from tinker_cookbook.rl.metric_util import RLTestSetEvaluator
from tinker_cookbook.rl.rollouts import set_rollout_executor
from tinker_cookbook.supervised import train as supervised

from inspect_tinker_plugin.contracts.errors import ConfigError
from inspect_tinker_plugin.contracts.policy import TOKENIZER_FOLDER
from inspect_tinker_plugin.contracts.wording import counted
from inspect_tinker_plugin.logs import assemble_pending
from inspect_tinker_plugin.processes.stopping import stopped_like_ctrl_c
from inspect_tinker_plugin.rl.models import context_window, require_server, require_weights
from inspect_tinker_plugin.train.config import build_config, check_same_run
from inspect_tinker_plugin.train.history import (
    CHECKPOINTS,
    IMITATION,
    METRICS,
    REWARD,
    ROLLOUT_LOGS,
    TEST,
    TEST_LOGS,
    last_checkpoint,
    last_saved,
    last_weights,
    number,
    read_steps,
)
from inspect_tinker_plugin.train.imitation import WarmStart, imitated
from inspect_tinker_plugin.train.progress import show_progress
from inspect_tinker_plugin.train.report import REPORT, write_report
from inspect_tinker_plugin.train.request import TrainRequest, check_request

if TYPE_CHECKING:
    from tinker_local import LocalServer

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
    log_dir = request.log_dir.expanduser().absolute()
    try:
        log_dir.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise ConfigError(f"--log-dir {log_dir} cannot be made ({error.strerror})") from error
    request = replace(request, log_dir=log_dir)
    with _alone_in(log_dir):
        return _train_in(log_dir, request)


@contextmanager
def _alone_in(log_dir: Path) -> Iterator[None]:
    """Keep other processes from training in a folder; the lock goes with this process."""
    lock = FileLock(log_dir / "run.lock", timeout=0)
    first = not Path(lock.lock_file).exists()
    try:
        lock.acquire()
    except Timeout as error:
        raise ConfigError(
            f"{log_dir} is the folder of a run that is under way; choose another --log-dir"
        ) from error
    except OSError as error:
        raise ConfigError(f"{log_dir} cannot be written ({error.strerror})") from error
    try:
        yield
    except ValueError:  # bad input, to us or to the local server: nothing was started
        if first:
            Path(lock.lock_file).unlink(missing_ok=True)
        raise
    finally:
        lock.release()


def _train_in(log_dir: Path, request: TrainRequest) -> TrainResult:
    # Everything that can be refused is refused before a server is started.
    run = _plan(log_dir, request)
    if run.trained and run.tested:
        request.say(
            f"this run is already done: {log_dir} has the checkpoint of step {run.done}; ask for "
            "more with --steps, or choose another --log-dir"
        )
        _finish_logs(log_dir)
        return _result(request, run.config)
    if run.done is not None and not run.trained:
        _require_saved(request)
        request.say(f"continuing from the checkpoint of step {run.done}")
    if not request.local:
        require_server(run.config.base_url)
        _require_weights(run)
    with ExitStack() as stack:
        server = None
        if request.local:
            server = _start_server(request, run.config, stack)
            run = replace(run, config=chz.replace(run.config, base_url=server.url))
            _require_weights(run)
        run = replace(run, config=_within_window(run.config, local=request.local))
        stack.callback(_finish_logs, log_dir)
        if not request.verbose:
            stack.enter_context(_console(log_dir / "console.log"))
        if run.warm is not None:
            (log_dir / IMITATION).mkdir(exist_ok=True)
        executor = stack.enter_context(_executor(request))
        _run_until_done(_imitate_train_test(request, run, executor), server)
    return _result(request, run.config)


@dataclass(frozen=True)
class _Run:
    """What is to be done in a folder."""

    config: Any
    """The cookbook's configuration."""
    warm: WarmStart | None
    """What to imitate first."""
    steps: int
    done: int | None
    """Steps behind the last checkpoint."""
    tested: bool
    """Whether nothing is left to test at the end."""

    @property
    def trained(self) -> bool:
        return self.done is not None and self.done >= self.steps


def _plan(log_dir: Path, request: TrainRequest) -> _Run:
    config = build_config(request, model=_model(request))
    batches = config.dataset_builder.check()
    warm = _warm_start(request, config)
    check_same_run(log_dir, config, warm_start=None if warm is None else warm.digest)
    steps = batches if config.max_steps is None else min(config.max_steps, batches)
    for folder in (log_dir, log_dir / IMITATION):
        _complete_last_line(folder / CHECKPOINTS)
    to_test = config.eval_every and config.dataset_builder.has_test_set
    tested = number(read_steps(log_dir).get(steps, {}), TEST + REWARD) is not None
    return _Run(config, warm, steps, last_checkpoint(log_dir), tested or not to_test)


async def _imitate_train_test(request: TrainRequest, run: _Run, executor: Executor | None) -> None:
    config = run.config
    # Not given to the cookbook's loop, which would shut it down at its end.
    set_rollout_executor(executor)
    try:
        if run.warm is not None and run.done is None:
            checkpoint = await _imitate(request, run.warm, config.base_url)
            config = chz.replace(config, load_checkpoint_path=checkpoint)
        with show_progress(request.log_dir, request.say, steps=config.max_steps):
            if not run.trained:
                await cookbook.main(config)
            if not run.tested:
                await _test(config, run.steps)
    finally:
        set_rollout_executor(None)


def _require_weights(run: _Run) -> None:
    """Check that the weights exist that the run is told to start from, or to stay close to."""
    config, reference = run.config, run.config.kl_reference_config
    for weights in (
        config.load_checkpoint_path if run.done is None else None,
        None if reference is None else reference.load_checkpoint_path,
    ):
        if weights is not None:
            require_weights(weights, base_url=config.base_url)


def _within_window(config: Any, *, local: bool) -> Any:
    """Add the model's context window, unless the run states one."""
    data, model = config.dataset_builder, config.model_name
    if data.dataset_options().context_window is not None:
        return config
    if local:
        from tinker_local import context_length

        window = context_length(model)
    else:
        window = context_window(model, base_url=config.base_url)
    return chz.replace(config, dataset_builder=chz.replace(data, context_window=window))


def _result(request: TrainRequest, config: Any) -> TrainResult:
    folder = request.log_dir
    weights = last_weights(folder)
    command = None if weights is None else _rollout_command(request, config, weights)
    return TrainResult(folder, folder / REPORT, read_steps(folder), weights, command)


def _rollout_command(request: TrainRequest, config: Any, weights: str) -> str:
    """Write the command that rolls out a group with some weights."""
    first = config.dataset_builder.mixed_tasks()[0]
    words = ["inspect", "rl", "rollout", str(first.task)]
    for name, value in (first.task_args or {}).items():
        words += ["-T", f"{name}={json.dumps(value) if not isinstance(value, str) else value}"]
    words += ["--model", weights, "--tokenizer", config.model_name]
    words += ["--renderer", config.renderer_name, "--max-tokens", str(config.max_tokens)]
    if request.local:
        words += ["--local", str(request.log_dir)]
    elif request.base_url is not None:
        words += ["--base-url", request.base_url]
    return shlex.join(words)


def _complete_last_line(path: Path) -> None:
    """Cut off a last line that a killed process left unfinished: the cookbook's loop reads all."""
    if not path.is_file():
        return
    *_, last = path.read_bytes().rpartition(b"\n")
    try:
        json.loads(last)
    except ValueError:
        os.truncate(path, path.stat().st_size - len(last))
    else:
        with path.open("ab") as file:
            file.write(b"\n")


def _require_saved(request: TrainRequest) -> None:
    """Check that the local server still has the checkpoint that a run continues from.

    Raises:
        ConfigError: It has not.
    """
    row = last_saved(request.log_dir, "batch", "state_path")
    if not request.local or row is None:
        return
    from tinker_local import SERVER_FOLDER, has_training_checkpoint

    state = request.log_dir / SERVER_FOLDER
    if not has_training_checkpoint(state, str(row["state_path"])):
        raise ConfigError(
            f"the checkpoint of step {row['batch']} that {request.log_dir / CHECKPOINTS} names is "
            f"gone from {state}; bring it back, or choose another --log-dir to start again"
        )


def _model(request: TrainRequest) -> str:
    if not request.local:
        return str(request.model)
    if request.model is None:
        from tinker_local import make_tiny_model

        return str(make_tiny_model(request.log_dir / "tiny-model", tokenizer=TOKENIZER_FOLDER))
    return str(Path(request.model).expanduser().absolute())


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
    stack.enter_context(server.exported())
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


async def _test(config: Any, steps: int) -> None:
    """Roll the test set out with the last weights, which the cookbook's loop does not."""
    weights = last_weights(Path(config.log_path))
    dataset = config.dataset_builder.test_set(steps)
    if weights is None or dataset is None:
        return
    client = tinker.ServiceClient(base_url=config.base_url)
    sampler = await client.create_sampling_client(model_path=weights)
    strategy = config.effective_rollout_strategy()
    evaluator = RLTestSetEvaluator(dataset, max_tokens=config.max_tokens, strategy=strategy)
    metrics = await evaluator(sampler)
    with (Path(config.log_path) / METRICS).open("a", encoding="utf-8") as file:
        file.write(json.dumps({"step": steps, **metrics}) + "\n")


def _warm_start(request: TrainRequest, config: Any) -> WarmStart | None:
    if request.warm_start is None:
        return None
    if config.load_checkpoint_path is not None:
        raise ConfigError("--warm-start and load_checkpoint_path exclude each other")
    return WarmStart.of(request.warm_start, config, epochs=request.warm_epochs)


async def _imitate(request: TrainRequest, warm: WarmStart, base_url: str | None) -> str:
    """Imitate, unless it is done; return the checkpoint to train from."""
    if (done := imitated(request.log_dir)) is not None:
        request.say(f"the imitation of {warm.path} is done; training starts from its checkpoint")
        return done
    request.say(f"imitating {warm.path}: {counted(warm.steps, 'step')}")
    with show_progress(request.log_dir / IMITATION, request.say, steps=warm.steps):
        await supervised.main(chz.replace(warm.config, base_url=base_url))
    checkpoint = imitated(request.log_dir)
    assert checkpoint is not None, "the loop ends with the checkpoint `final`"
    return checkpoint


def _run_until_done(loop: Coroutine[Any, Any, None], server: LocalServer | None) -> None:
    try:
        asyncio.run(loop if server is None else server.during(loop))
    except (KeyboardInterrupt, asyncio.CancelledError) as stop:
        raise InterruptedRun("interrupted") from stop


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
    with (
        path.open("a", encoding="utf-8", buffering=1) as file,
        contextlib.redirect_stderr(file),
        contextlib.redirect_stdout(file),
        warnings.catch_warnings(),
    ):
        warnings.simplefilter("ignore", FutureWarning)
        yield
