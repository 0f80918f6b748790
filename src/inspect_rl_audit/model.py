"""Attempts of a real model for an audit: rolled out as the trainer does, into logs."""

from __future__ import annotations

import asyncio
import hashlib
import json
import shutil
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, cast

import click

from inspect_rl_audit.attempts import read_attempts
from inspect_rl_audit.run import named, source_digest, spread
from inspect_tinker_plugin.cli.group_rollout import roll_groups
from inspect_tinker_plugin.cli.reporting import progress_bar
from inspect_tinker_plugin.contracts.errors import ConfigError
from inspect_tinker_plugin.contracts.wording import counted
from inspect_tinker_plugin.rl.service import no_key, tinker_policy

if TYPE_CHECKING:
    from tinker_cookbook.completers import TokenCompleter

    from inspect_tinker_plugin.options import DatasetOptions
    from inspect_tinker_plugin.rl.dataset import InspectRLDataset
    from inspect_tinker_plugin.tasks.reference import ResolvedTask
    from inspect_tinker_plugin.tasks.samples import SelectedSamples
    from tinker_local import LocalServer
_OF_ATTEMPTS = ("model", "local", "base_url", "tokenizer", "renderer", "max_tokens")
"""Options that change what attempts say."""


def roll_out(
    choices: dict[str, Any], options: DatasetOptions, resolved: ResolvedTask, folder: Path
) -> Path:
    """Roll out ``--episodes`` attempts at each of the chosen samples.

    Samples whose attempts are in the logs of an earlier run, with the same model and options, are
    not sampled again.

    Args:
        choices: The command's options.
        options: How episodes are made.
        resolved: The task.
        folder: Folder for attempts; each choice of model and options has its own below it.

    Returns:
        The folder with the logs.

    Raises:
        ConfigError: The model cannot be sampled from.
    """
    from inspect_tinker_plugin.logs import assemble_pending
    from inspect_tinker_plugin.tasks.samples import select_samples

    samples = select_samples(resolved.task, options.selection)
    logs = folder / _digest(choices, options, resolved)
    wanted = _missing(samples, choices, logs, resolved)
    if not wanted:
        return logs
    if not choices["local"]:
        problem = no_key("sample from", "add --local to sample from a model on this machine")
        if problem is not None:
            raise ConfigError(problem)
    with _model(choices, folder) as (model, server):
        base_url = choices["base_url"] if server is None else server.url
        dataset = _dataset(choices, options, resolved, logs, model, samples.subset(wanted))
        policy = _Watched(
            tinker_policy(
                model, base_url=base_url, max_tokens=choices["max_tokens"], temperature=1.0
            )
        )
        try:
            rolling = _roll(dataset, policy)
            finished = asyncio.run(rolling if server is None else server.during(rolling))
        finally:
            assemble_pending(logs)
    if policy.error is not None:
        problem = f"cannot sample from {choices['model'] or model}: {policy.error}"
        if not finished:
            raise ConfigError(problem)
        cut = counted(policy.failed, "attempt")
        click.echo(f"{cut} ended early, {problem}; the same command tries again", err=True)
    return logs


class _Watched:
    """A policy that keeps the last error of its sampler."""

    def __init__(self, policy: TokenCompleter) -> None:
        self._policy = policy
        self.error: Exception | None = None
        self.failed = 0

    async def __call__(self, *args: Any, **kwargs: Any) -> Any:
        try:
            return await self._policy(*args, **kwargs)
        except Exception as error:
            self.error = error
            self.failed += 1
            raise


def _digest(choices: dict[str, Any], options: DatasetOptions, resolved: ResolvedTask) -> str:
    """Return a name for the attempts of one model with these options."""
    asked = [
        *(choices[name] for name in _OF_ATTEMPTS),
        source_digest(resolved.task),
        *(named(value) for value in (resolved.ref, options)),
    ]
    return hashlib.sha256(json.dumps(asked, default=str).encode()).hexdigest()[:12]


def _missing(
    samples: SelectedSamples, choices: dict[str, Any], logs: Path, resolved: ResolvedTask
) -> list[int]:
    """Return the positions of the chosen samples that have fewer attempts than asked for."""
    done: Counter[int | str] = Counter()
    if any(logs.glob("*.eval")):
        seen = read_attempts([logs], resolved.task.name)
        done.update(attempt.sample for attempt in seen if not attempt.cut)
    chosen = spread(range(len(samples)), choices["samples"])
    return [n for n in chosen if done[samples[n].id or 0] < choices["episodes"]]


async def _roll(dataset: InspectRLDataset, policy: _Watched) -> int:
    """Roll out all groups; returns how many episodes came to an end."""
    size = dataset.options.group_size
    total = size * sum(len(dataset.get_batch(batch)) for batch in range(len(dataset)))
    done = failed = 0
    completer = cast("TokenCompleter", policy)  # only called
    with progress_bar("attempts") as show:
        show(0, total)

        def count(this_failed: bool) -> None:
            nonlocal done, failed
            done, failed = done + 1, failed + this_failed
            show(done, total, failed)

        for batch in range(len(dataset)):
            groups = dataset.get_batch(batch)
            await asyncio.gather(
                *(roll_groups([group], lambda env, sample, n: completer, count) for group in groups)
            )
    return done - failed


def _dataset(
    choices: dict[str, Any],
    options: DatasetOptions,
    resolved: ResolvedTask,
    folder: Path,
    model: str,
    samples: SelectedSamples,
) -> InspectRLDataset:
    from inspect_tinker_plugin.processes.memory import freeze_memory_once
    from inspect_tinker_plugin.rl.dataset import build_dataset
    from inspect_tinker_plugin.rl.renderer import make_renderer

    name = choices["renderer"] or ("qwen3_instruct" if choices["local"] else None)
    tokenizer = choices["tokenizer"]
    renderer = make_renderer(name, model=model, tokenizer=tokenizer, option="--renderer")
    dataset = build_dataset(
        resolved.ref or resolved.task,
        renderer,
        replace(
            options,
            batch_size=4,
            group_size=choices["episodes"],
            on_error=0.0,
            log_dir=folder,
        ),
        samples=samples,
    )
    freeze_memory_once()
    return dataset


@contextmanager
def _model(choices: dict[str, Any], folder: Path) -> Iterator[tuple[str, LocalServer | None]]:
    """Yield the model; with ``--local`` a server is started for it."""
    if not choices["local"]:
        yield choices["model"], None
        return
    from inspect_tinker_plugin.testing import tokenizer_path
    from tinker_local import (
        SERVER_FOLDER,
        LocalServer,
        LocalSettings,
        check_reply_length,
        make_tiny_model,
    )
    from tinker_local import settings as local

    if reason := local.missing():
        raise ConfigError(reason)
    model = choices["model"] or str(
        make_tiny_model(folder / "tiny-model", tokenizer=tokenizer_path())
    )
    check_reply_length(model, choices["max_tokens"])
    size = min(64, max(8, 4 * choices["episodes"]))
    settings = LocalSettings(sample_batch=size, train_batch=size)
    state = folder / SERVER_FOLDER
    server = LocalServer(model, state_dir=state, settings=settings)
    with server, server.exported():
        yield model, server
    shutil.rmtree(state)  # kept after a failure, for its log
