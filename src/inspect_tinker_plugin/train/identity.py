"""The identity of a folder's run: a folder is never continued with another run."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from inspect_tinker_plugin.errors import ConfigError
from inspect_tinker_plugin.train.metrics import read_steps

FILE = "run.json"


def check_same_run(log_dir: Path, config: Any) -> None:
    """Record the identity of a folder's run, or compare it with the recorded one.

    Only what would change the meaning of checkpoints or held-out samples is compared;
    steps, learning rate and the like may change when a run is continued.

    Raises:
        ConfigError: The folder holds another run that has begun.
    """
    path = log_dir / FILE
    wanted = identity(config)
    try:
        found = json.loads(path.read_text(encoding="utf-8"))
    except FileNotFoundError:
        found = None
    except ValueError as error:
        raise ConfigError(f"{path} is damaged ({error}); choose another --log-dir") from error
    if found is None or not has_begun(log_dir):
        path.write_text(json.dumps(wanted, indent=2, default=str) + "\n", encoding="utf-8")
        return
    wanted = json.loads(json.dumps(wanted, default=str))
    changed = [name for name in wanted if found.get(name) != wanted[name]]
    if changed:
        name = changed[0]
        raise ConfigError(
            f"{log_dir} holds a run with {name} {found.get(name)!r}, not {wanted[name]!r}; give "
            "the same options to continue it, or choose another --log-dir"
        )


def has_begun(log_dir: Path) -> bool:
    """Whether a run has left a step or a checkpoint; one that has not does not lock its folder."""
    checkpoints = log_dir / "checkpoints.jsonl"
    return bool(read_steps(log_dir)) or (checkpoints.is_file() and checkpoints.stat().st_size > 0)


def identity(config: Any) -> dict[str, Any]:
    """Return the options that a run cannot change when it is continued."""
    data = config.dataset_builder
    options = data.dataset_options()
    return {
        "model": config.model_name,
        "renderer": config.renderer_name,
        "LoRA rank": config.lora_rank,
        "task": data.task,
        "task arguments": data.task_args,
        "batch size": options.batch_size,
        "seed": options.seed,
        "limit": options.limit,
        "sample ids": options.sample_id or options.sample_ids,
        "shuffled samples": options.sample_shuffle,
        "test task": data.test_task,
        "test split": data.test_split,
    }
