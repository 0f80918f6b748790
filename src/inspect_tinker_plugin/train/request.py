"""The request for a training run; its fields are the options of ``inspect rl train``, too."""

from __future__ import annotations

import sys
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any

from inspect_tinker_plugin.options import option


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
    model: str | None = option(None, "Model to train (with --local, a model folder).")
    renderer: str | None = option(None, "Renderer, if not the model's own.")
    local: bool = option(
        False,
        "Train on this machine's CPU, with a local server and, without --model, a tiny random "
        "model: to try things out, without a key.",
    )
    base_url: str | None = option(None, "Tinker API server, if not the hosted one.")
    steps: int | None = option(
        None, "Training steps; one pass over the samples if not given (15 with --local)."
    )
    batch_size: int | None = None
    """Groups per step."""
    group_size: int | None = None
    """Episodes per group."""
    epochs: int = 1
    """Passes over the samples."""
    options: Mapping[str, Any] = field(default_factory=dict)
    """Further options of ``as_rl_dataset``, by name: ``limit``, ``seed``, ``reward`` and others."""
    learning_rate: float | None = option(
        None, "Learning rate of Adam; by default the cookbook's for the model."
    )
    lora_rank: int | None = option(None, "Rank of the adapter (32; 16 with --local).")
    max_tokens: int | None = option(None, "Tokens per reply (1024; 16 with --local).")
    save_every: int | None = option(None, "Steps between checkpoints (10; 5 with --local).")
    eval_every: int | None = option(None, "Steps between evaluations (10; 5 with --local).")
    test_task: str | None = None
    """Task of the test set."""
    test_task_args: Mapping[str, Any] = field(default_factory=dict)
    """Arguments of the test task."""
    test_split: str | None = option(
        None, "Hold out a part of TASK instead: 0.1, 10% or a number of samples."
    )
    test_samples: int | None = option(None, "Use only this many test samples.")
    allow_overlap: bool = option(False, "Allow test samples that are also trained on.")
    eval_task: Sequence[str] = option(
        (), "Evaluate this task every --eval-every steps, as `inspect eval` does; may be repeated."
    )
    eval_args: Mapping[str, Any] = field(default_factory=dict)
    """Arguments of these tasks."""
    eval_limit: int | None = option(None, "Evaluate only this many samples of each --eval-task.")
    warm_start: str | None = option(
        None,
        "First imitate an export of logs (`inspect rl export --from-logs`, layout chat or tinker), "
        "then train.",
    )
    warm_epochs: int = option(1, "Passes over that export.")
    teacher: str | None = option(
        None,
        "Learn from a teacher's probabilities of the sampled tokens, beside the reward (on-policy "
        "distillation): a checkpoint (tinker://...), a base model or a run's folder.",
    )
    teacher_weight: float = option(1.0, "Weight of the teacher beside the advantages.")
    teacher_only: bool = option(False, "Learn from the teacher alone; rewards are only measured.")
    teacher_steps: int | None = option(
        None, "Learn from the teacher in the first N steps, and from rewards alone after them."
    )
    scan: Sequence[str] = option(
        (),
        "Scan each batch's rollouts with the scanners of Inspect Scout in this file, beside the "
        "training.",
    )
    scan_limit: int = option(16, "Rollouts per batch that are scanned, chosen at random.")
    scan_tokens: int | None = option(None, "Tokens of all scans together; then they stop.")
    scan_model: str | None = option(None, "Model of scanners that ask one.")
    rollout_timeout: float | None = option(
        None,
        "Seconds after which a rollout is cancelled and run again, up to three per group (3600 in "
        "the asynchronous loop, else never); 0 for never.",
    )
    workers: int | None = option(None, "Roll out in N processes.")
    ray: str | None = option(
        None, "Roll out on a Ray cluster, or on one that is started here (an empty address)."
    )
    overrides: Sequence[str] = ()
    """``key=value`` pairs for the cookbook's ``rl.train.Config``; they override everything else."""
    verbose: bool = option(False, "Show the cookbook's own output, too.")
    say: Callable[[str], None] = field(
        default_factory=lambda: partial(print, file=sys.stdout, flush=True)
    )
    """Shows lines of progress; by default on the stdout of now, also if that is replaced later."""
