"""What a folder's run is a run of: a folder is never continued as another run."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from inspect_tinker_plugin.errors import ConfigError

FILE = "run.json"


def check_same_run(log_dir: Path, config: Any) -> None:
    """Note what the run in a folder is, or compare with what was noted.

    Only what would make checkpoints or held-out samples mean something else is compared;
    steps, learning rate and the like may change when a run is continued.

    Raises:
        ConfigError: The folder holds another run.
    """
    path = log_dir / FILE
    wanted = identity(config)
    try:
        found = json.loads(path.read_text(encoding="utf-8"))
    except FileNotFoundError:
        path.write_text(json.dumps(wanted, indent=2, default=str) + "\n", encoding="utf-8")
        return
    except ValueError as error:
        raise ConfigError(f"{path} is damaged ({error}); choose another --log-dir") from error
    wanted = json.loads(json.dumps(wanted, default=str))
    changed = [name for name in wanted if found.get(name) != wanted[name]]
    if changed:
        name = changed[0]
        raise ConfigError(
            f"{log_dir} holds a run with {name} {found.get(name)!r}, not {wanted[name]!r}; give "
            "the same options to continue it, or choose another --log-dir"
        )


def identity(config: Any) -> dict[str, Any]:
    """Return what makes a run the run it is."""
    data = config.dataset_builder
    return {
        "model": config.model_name,
        "renderer": config.renderer_name,
        "LoRA rank": config.lora_rank,
        "task": data.task,
        "task arguments": data.task_args,
        "batch size": data.batch_size,
        "seed": data.seed,
        "limit": data.max_samples,
        "test task": data.test_task,
        "test split": data.test_split,
    }
