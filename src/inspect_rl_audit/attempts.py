"""Attempts of a real model: read from ``.eval`` logs, or rolled out here as the trainer does."""

from __future__ import annotations

import asyncio
import hashlib
import json
import shutil
from collections import Counter
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click
from inspect_ai.log import EvalSample, read_eval_log

from inspect_rl_audit.records import ModelAttempt, name_value
from inspect_rl_audit.stage import spread
from inspect_tinker_plugin import ConfigError
from inspect_tinker_plugin.cli import progress_bar, roll_groups, run_in_loop
from inspect_tinker_plugin.logs import RolloutStatus, figures, find_logs, reward_of
from inspect_tinker_plugin.plugins import counted
from inspect_tinker_plugin.tasks import select_samples, task_digest
from inspect_tinker_plugin.train import cost_of

if TYPE_CHECKING:
    from tinker_cookbook.completers import TokenCompleter

    from inspect_tinker_plugin.options import DatasetOptions
    from inspect_tinker_plugin.rl import InspectRLDataset
    from inspect_tinker_plugin.tasks import ResolvedTask
    from tinker_local import LocalServer

ATTEMPTS = "attempts"
"""Folder of the attempts that the audit sampled, below the audit's."""


def read_attempts(paths: Sequence[str | Path], task: str) -> list[ModelAttempt]:
    """Read all attempts at a task from log files, and from folders of them.

    Raises:
        ConfigError: A path does not exist, or no log has an attempt at the task.
    """
    found: list[ModelAttempt] = []
    others: set[str] = set()
    for file in find_logs([str(path) for path in paths]):
        log = read_eval_log(file)
        if log.eval.task.rpartition("/")[2] == task.rpartition("/")[2]:
            found += [_attempt(sample, file, log.eval.model) for sample in log.samples or []]
        else:
            others.add(log.eval.task)
    if not found:
        seen = f"; there are logs of {', '.join(sorted(others))}" if others else ""
        raise ConfigError(f"no log in {', '.join(map(str, paths))} is of task {task!r}{seen}")
    return found


def _attempt(sample: EvalSample, log: str, model: str) -> ModelAttempt:
    seen = figures(sample)
    reward = seen.get("reward")
    if "reward" not in seen and sample.error is None:
        reward = reward_of(sample.scores or {})
    return ModelAttempt(
        sample=sample.id,
        group=f"{log.rpartition('/')[2]}/{sample.id}",
        reward=None if reward is None else float(reward),
        stop=str(seen.get("stop_reason") or _stop(sample)),
        cost=cost_of(sample, model),
        failed=sample.error is not None or seen.get("error_cause") is not None,
        log=log,
        epoch=sample.epoch,
        cut=seen.get("status") == RolloutStatus.CUT,
    )


def _stop(sample: EvalSample) -> str:
    if sample.limit is not None:
        return f"{sample.limit.type} limit"
    return sample.output.stop_reason if sample.output.choices else "error"


_OF_ATTEMPTS = ("model", "local", "base_url", "tokenizer", "renderer", "max_tokens")
"""Options that change what attempts say."""


def roll_out(
    choices: dict[str, Any], options: DatasetOptions, resolved: ResolvedTask, folder: Path
) -> Path:
    """Roll out ``--episodes`` attempts at each of the chosen samples; return the folder of logs.

    It is below ``folder``, by model and options. What is in its logs already is not sampled again.

    Raises:
        ConfigError: The model cannot be sampled from.
    """
    from inspect_tinker_plugin import freeze_memory
    from inspect_tinker_plugin.logs import assemble_pending
    from inspect_tinker_plugin.rl import build_dataset, make_renderer, no_key, tinker_policy

    samples = select_samples(resolved.task, options.selection)
    logs = folder / _digest(choices, options, resolved)
    done: Counter[int | str] = Counter()
    if any(logs.glob("*.eval")):
        seen = read_attempts([logs], resolved.task.name)
        done.update(attempt.sample for attempt in seen if not attempt.cut)
    chosen = spread(range(len(samples)), choices["samples"])
    wanted = [n for n in chosen if done[samples[n].id or 0] < choices["episodes"]]
    if not wanted:
        return logs
    if not choices["local"]:
        problem = no_key("sample from", "add --local to sample from a model on this machine")
        if problem is not None:
            raise ConfigError(problem)
    with _model(choices, folder) as (model, server):
        name = choices["renderer"] or ("qwen3_instruct" if choices["local"] else None)
        tokenizer = choices["tokenizer"]
        renderer = make_renderer(name, model=model, tokenizer=tokenizer, option="--renderer")
        own = replace(
            options,
            batch_size=len(wanted),
            group_size=choices["episodes"],
            on_error=0.0,
            log_dir=logs,
        )
        dataset = build_dataset(resolved, renderer, own, samples=samples.subset(wanted))
        freeze_memory()
        base_url = choices["base_url"] if server is None else server.url
        policy = tinker_policy(
            model, base_url=base_url, max_tokens=choices["max_tokens"], temperature=1.0
        )
        rolling = _roll(dataset, policy)
        try:
            errors = run_in_loop(rolling if server is None else server.during(rolling))
        finally:
            assemble_pending(logs)
    if errors:
        problem = f"cannot sample from {choices['model'] or model}: {errors[-1]}"
        if len(errors) == len(wanted) * choices["episodes"]:
            raise ConfigError(problem)
        cut = counted(len(errors), "attempt")
        click.echo(f"{cut} ended early, {problem}; the same command tries again", err=True)
    return logs


def _digest(choices: dict[str, Any], options: DatasetOptions, resolved: ResolvedTask) -> str:
    """Return a name for the attempts of one model with these options."""
    asked = [
        *(choices[name] for name in _OF_ATTEMPTS),
        task_digest(resolved.task),
        *(name_value(value) for value in (resolved.ref, options)),
    ]
    return hashlib.sha256(json.dumps(asked, default=str).encode()).hexdigest()[:12]


async def _roll(dataset: InspectRLDataset, policy: TokenCompleter) -> list[str]:
    """Roll out all groups at once; return the errors of the attempts that could not be sampled."""
    groups = dataset.get_batch(0)
    ended: list[bool] = []
    with progress_bar("attempts") as show:

        def count(failed: bool) -> None:
            ended.append(failed)
            show(len(ended), len(groups) * dataset.options.group_size, sum(ended))

        rolled = await asyncio.gather(
            *(roll_groups([group], lambda env, sample, n: policy, count) for group in groups)
        )
    reports = [report for [group] in rolled for report in group]
    return [str(report.error) for report in reports if report.reward is None]


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

    tiny = folder / "tiny-model"
    model = choices["model"] or str(make_tiny_model(tiny, tokenizer=tokenizer_path()))
    check_reply_length(model, choices["max_tokens"])
    settings = LocalSettings(sample_batch=min(64, max(8, 4 * choices["episodes"])))
    state = folder / SERVER_FOLDER
    with LocalServer(model, state_dir=state, settings=settings) as server, server.export_environ():
        yield model, server
    shutil.rmtree(state)  # kept after a failure, for its log
