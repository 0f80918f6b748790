"""Attempts of a real model for an audit: rolled out as the trainer does, into logs."""

from __future__ import annotations

import asyncio
import os
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any

from inspect_tinker_plugin.audit.run import spread
from inspect_tinker_plugin.cli.group_rollout import roll_groups
from inspect_tinker_plugin.cli.options import parse_args, parse_sandbox
from inspect_tinker_plugin.cli.policies import tinker_policy

if TYPE_CHECKING:
    from tinker_cookbook.completers import TokenCompleter

    from inspect_tinker_plugin.rl.dataset import InspectRLDataset
    from inspect_tinker_plugin.tasks import ResolvedTask


def roll_out(
    choices: dict[str, Any], resolved: ResolvedTask, folder: Path, runner: dict[str, Any]
) -> Path:
    """Roll out ``--episodes`` attempts at each of the chosen samples.

    Returns:
        The folder with the logs; those of an earlier run of the same audit are kept.
    """
    from inspect_tinker_plugin.logs import assemble_pending

    if folder.is_dir() and any(folder.glob("*.eval")):
        return folder
    with _model(choices, folder.parent) as (model, base_url):
        dataset = _dataset(choices, resolved, folder, runner, model)
        policy = tinker_policy(
            model, base_url=base_url, max_tokens=choices["max_tokens"], temperature=1.0
        )
        try:
            asyncio.run(_roll(dataset, policy))
        finally:
            assemble_pending(folder)
    return folder


async def _roll(dataset: InspectRLDataset, policy: TokenCompleter) -> None:
    for batch in range(len(dataset)):
        groups = dataset.get_batch(batch)
        await asyncio.gather(
            *(roll_groups([group], lambda env, sample, n: policy, _nothing) for group in groups)
        )


def _nothing() -> None:
    """What is called after each rollout."""


def _dataset(
    choices: dict[str, Any],
    resolved: ResolvedTask,
    folder: Path,
    runner: dict[str, Any],
    model: str,
) -> InspectRLDataset:
    from tinker_cookbook.model_info import get_recommended_renderer_name
    from tinker_cookbook.renderers import get_renderer
    from tinker_cookbook.tokenizer_utils import get_tokenizer

    from inspect_tinker_plugin.episode.task import with_ids
    from inspect_tinker_plugin.errors import ConfigError
    from inspect_tinker_plugin.rl.dataset import as_rl_dataset

    name = choices["renderer"] or ("qwen3_instruct" if choices["local"] else None)
    try:
        name = name or get_recommended_renderer_name(model)
        renderer = get_renderer(name, get_tokenizer(model))
    except (ValueError, KeyError, OSError) as error:
        raise ConfigError(f"no renderer {name or 'recommended'} for {model}: {error}") from error
    samples = resolved.task.dataset
    numbered = [with_ids(samples[n], n) for n in range(len(samples))]
    ids = [sample.id for sample in spread(numbered, choices["samples"]) if sample.id is not None]
    return as_rl_dataset(
        resolved.ref or resolved.task,
        renderer,
        sample_ids=ids,
        batch_size=4,
        group_size=choices["episodes"],
        solver=runner.get("solver"),
        sandbox=parse_sandbox(choices["sandbox"]),
        model_roles=parse_args(choices["model_roles"]),
        max_sandboxes=choices["max_sandboxes"],
        reward=choices["reward"],
        on_error=0.0,
        log_dir=folder,
    )


@contextmanager
def _model(choices: dict[str, Any], folder: Path) -> Iterator[tuple[str, str | None]]:
    """The model, and the address of its server; with ``--local`` one is started for the while."""
    if not choices["local"]:
        yield choices["model"], choices["base_url"]
        return
    from inspect_tinker_plugin.errors import ConfigError
    from inspect_tinker_plugin.local import LocalServer, LocalSettings, make_tiny_model
    from inspect_tinker_plugin.local import settings as local

    if reason := local.missing():
        raise ConfigError(reason)
    model = choices["model"] or str(make_tiny_model(folder / "tiny-model"))
    size = min(64, max(8, 4 * choices["episodes"]))
    settings = LocalSettings(sample_batch=size, train_batch=size)
    with LocalServer(model, state_dir=folder / "local-server", settings=settings) as server:
        before = {name: os.environ.get(name) for name in server.environ}
        os.environ.update(server.environ)
        try:
            yield model, server.url
        finally:
            for name, value in before.items():
                if value is None:
                    os.environ.pop(name, None)
                else:
                    os.environ[name] = value
