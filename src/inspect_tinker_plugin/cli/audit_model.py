"""Attempts of a real model for an audit: rolled out as the trainer does, into logs."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from inspect_tinker_plugin.audit.run import spread
from inspect_tinker_plugin.cli.group_rollout import roll_groups
from inspect_tinker_plugin.cli.policies import tinker_policy

if TYPE_CHECKING:
    from tinker_cookbook.completers import TokenCompleter

    from inspect_tinker_plugin.options import DatasetOptions
    from inspect_tinker_plugin.rl.dataset import InspectRLDataset
    from inspect_tinker_plugin.tasks.reference import ResolvedTask


def roll_out(
    choices: dict[str, Any], options: DatasetOptions, resolved: ResolvedTask, folder: Path
) -> Path:
    """Roll out ``--episodes`` attempts at each of the chosen samples.

    Returns:
        The folder with the logs; those of an earlier run of the same audit are kept.
    """
    from inspect_tinker_plugin.logs import assemble_pending

    if folder.is_dir() and any(folder.glob("*.eval")):
        return folder
    with _model(choices, folder.parent) as (model, base_url):
        dataset = _dataset(choices, options, resolved, folder, model)
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
            *(
                roll_groups([group], lambda env, sample, n: policy, lambda failed: None)
                for group in groups
            )
        )


def _dataset(
    choices: dict[str, Any],
    options: DatasetOptions,
    resolved: ResolvedTask,
    folder: Path,
    model: str,
) -> InspectRLDataset:
    from inspect_tinker_plugin.memory import freeze_memory_once
    from inspect_tinker_plugin.rl.dataset import build_dataset
    from inspect_tinker_plugin.rl.renderer import make_renderer
    from inspect_tinker_plugin.tasks.samples import select_samples

    name = choices["renderer"] or ("qwen3_instruct" if choices["local"] else None)
    renderer = make_renderer(name, model=model, option="--renderer")
    samples = select_samples(resolved.task, options.selection)
    indices = spread(range(len(samples)), choices["samples"])
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
        samples=samples.subset(indices),
    )
    freeze_memory_once()
    return dataset


@contextmanager
def _model(choices: dict[str, Any], folder: Path) -> Iterator[tuple[str, str | None]]:
    """Yield the model, and its server's address; with ``--local`` a server is started meanwhile."""
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
    server = LocalServer(model, state_dir=folder / "local-server", settings=settings)
    with server, server.exported():
        yield model, server.url
