"""The request for a training run: plain data, as a command line provides it."""

from __future__ import annotations

import os
import sys
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any, TextIO

from inspect_tinker_plugin.contracts.errors import ConfigError
from inspect_tinker_plugin.rl.models import no_key

RECIPE = "inspect_rl_train"
"""How the cookbook and the service name runs of this package."""

_RAY_NAMES = ("auto", "local")
"""Addresses that Ray resolves itself."""


def to(stream: TextIO) -> Callable[[str], None]:
    """Return a function that prints lines to a stream, even if stdout is replaced later."""
    return partial(print, file=stream, flush=True)


@dataclass(frozen=True, kw_only=True)
class TrainRequest:
    """A training run. Options that are ``None`` take the default of where the model runs."""

    task: str | Sequence[str]
    """Registered name (``pkg/task``) or file (``file.py@task``); several are mixed."""
    log_dir: Path
    """Folder of the run; one that holds an interrupted run continues it."""
    mix: Sequence[float] | None = None
    """Shares of several tasks, in their order; equal ones when ``None``."""
    task_args: Mapping[str, Any] = field(default_factory=dict)
    """Arguments of the task; of several tasks each gets all, but ``NAME.KEY`` only task NAME."""
    model: str | None = None
    """Model under training; with ``local``, a model folder, or ``None`` for the tiny model."""
    renderer: str | None = None
    """Cookbook renderer."""
    local: bool = False
    """Start a Tinker API server on this machine for the duration of the run."""
    base_url: str | None = None
    """Address of another Tinker API server."""
    batch_size: int | None = None
    """Groups per step."""
    group_size: int | None = None
    """Episodes per group."""
    steps: int | None = None
    """Training steps; one pass over the samples when ``None``."""
    epochs: int = 1
    """Passes over the samples."""
    seed: int | None = None
    """Seed of the order of the samples and of the test split."""
    limit: int | tuple[int, int] | None = None
    """Use only the first samples, or a range of them."""
    max_tokens: int | None = None
    """Maximum number of tokens per reply."""
    learning_rate: float | None = None
    """Learning rate of Adam."""
    lora_rank: int | None = None
    """Rank of the adapter."""
    save_every: int | None = None
    """Steps between checkpoints."""
    eval_every: int | None = None
    """Steps between measurements on the test set."""
    reward: str | None = None
    """Reward expression; that of ``options``, or the mean of the scores, when ``None``."""
    sandbox: str | tuple[str, str] | None = None
    """Replaces the task's sandbox."""
    options: Mapping[str, Any] = field(default_factory=dict)
    """Further options of ``as_rl_dataset``, by name."""
    test_task: str | None = None
    """Task of the test set."""
    test_task_args: Mapping[str, Any] = field(default_factory=dict)
    """Arguments of the test task."""
    test_split: str | None = None
    """Part of the task to hold out as test set."""
    test_samples: int | None = None
    """Use only this many test samples."""
    allow_overlap: bool = False
    """Allow test samples that are also trained on."""
    warm_start: str | None = None
    """Folder of an export of logs to imitate before the training."""
    warm_epochs: int = 1
    """Passes over that export."""
    workers: int | None = None
    """Roll out in this many processes of this machine."""
    ray: str | None = None
    """Roll out on Ray: the address of a cluster, or ``""`` for one on this machine."""
    overrides: Sequence[str] = ()
    """``key=value`` pairs for the cookbook's ``rl.train.Config``; they override everything else."""
    verbose: bool = False
    """Leave the cookbook's own output on the terminal."""
    say: Callable[[str], None] = field(default_factory=lambda: to(sys.stdout))
    """Where lines of progress go."""


def missing_key(request: TrainRequest) -> str | None:
    """Return why the Tinker service would refuse the run, ``None`` if it would not."""
    if request.local:
        return None
    return no_key("train on", "add --local to train a tiny model on this machine")


def check_request(request: TrainRequest, *, key: bool = True) -> None:
    """Refuse a request that cannot work, without importing anything heavy.

    Args:
        request: The request.
        key: Also refuse it if the Tinker service needs a key and there is none.

    Raises:
        ConfigError: One line that says what is missing.
    """
    _check_folder(request.log_dir.expanduser().absolute())
    _check_test_set(request)
    if request.warm_epochs != 1 and request.warm_start is None:
        raise ConfigError("--warm-epochs needs --warm-start")
    if request.workers is not None and request.ray is not None:
        raise ConfigError("--workers and --ray exclude each other; give one of them")
    if request.ray is not None:
        if request.ray and ":" not in request.ray and request.ray not in _RAY_NAMES:
            raise ConfigError(
                f"--ray takes the address of a cluster (HOST:PORT, ray://HOST:PORT or auto), not "
                f"{request.ray!r}; to start one here, put --ray last or before another option"
            )
        from inspect_tinker_plugin.processes import ray_executor

        if reason := ray_executor.missing():
            raise ConfigError(reason)
    if request.local:
        from tinker_local import settings as local

        if request.base_url is not None:
            raise ConfigError("--local starts its own server; leave --base-url out")
        if request.model is not None and not Path(request.model).expanduser().is_dir():
            raise ConfigError(
                f"--local trains a model of this machine, and {request.model} is no folder here; "
                "leave --model out for the tiny model, or --local to train on the Tinker service"
            )
        if reason := local.missing():  # last: what cannot work anywhere is refused first
            raise ConfigError(reason)
        return
    if key and (problem := missing_key(request)):
        raise ConfigError(problem)
    if request.model is None:
        raise ConfigError("--model is missing: name the model to train, e.g. Qwen/Qwen3-8B")


def _check_test_set(request: TrainRequest) -> None:
    """Refuse options of a test set that have no effect."""
    if request.test_task is None and request.test_task_args:
        raise ConfigError("--test-arg needs --test-task")
    if request.test_task is not None or request.test_split is not None:
        return
    for name, given in (
        ("--test-samples", request.test_samples is not None),
        ("--allow-overlap", request.allow_overlap),
    ):
        if given:
            raise ConfigError(f"{name} needs --test-task or --test-split")


def _check_folder(folder: Path) -> None:
    """Refuse a folder that cannot be made or written."""
    there = next(each for each in (folder, *folder.parents) if each.exists())
    if not there.is_dir():
        raise ConfigError(f"--log-dir {folder}: {there} is a file, not a folder")
    if not os.access(there, os.W_OK | os.X_OK):
        raise ConfigError(f"--log-dir {folder}: {there} cannot be written")
