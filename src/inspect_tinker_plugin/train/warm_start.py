"""The imitation before a training: an export of logs, and the cookbook's supervised loop.

It has its own folder in the run's, with the cookbook's metrics and checkpoints. Its last checkpoint
is where the training starts from; a folder that has it never imitates again.
"""

from __future__ import annotations

import hashlib
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from tinker_cookbook.exceptions import TinkerCookbookError
from tinker_cookbook.supervised import train as supervised
from tinker_cookbook.supervised.types import ChatDatasetBuilderCommonConfig

from inspect_tinker_plugin.contracts.errors import ConfigError
from inspect_tinker_plugin.contracts.wording import counted
from inspect_tinker_plugin.train.demonstrations import DemonstrationsBuilder, rows_of
from inspect_tinker_plugin.train.metrics import CHECKPOINTS, IMITATION, read_rows

LONGEST = 32_768
"""Maximum tokens of a conversation, where the model's folder does not say it."""

_BATCH = 16
_SAVES = 5
"""Number of checkpoints on the way, so that an interrupted imitation continues."""

_DATA = (".parquet", ".jsonl", ".arrow")


@dataclass(frozen=True)
class WarmStart:
    """What to imitate, and for how long; checked before anything starts."""

    path: str
    """Folder of the export."""
    digest: str
    """Hash of its files: a run is not continued with others."""
    steps: int
    """Steps of the imitation."""
    config: Any
    """``tinker_cookbook.supervised.train.Config``."""

    @classmethod
    def of(cls, path: str, config: Any, *, epochs: int) -> WarmStart:
        """Read an export, and refuse what the imitation could not use.

        Args:
            path: Folder of an export ``--from-logs``, in the layout ``chat`` or ``tinker``.
            config: The ``tinker_cookbook.rl.train.Config`` of the run.
            epochs: Passes over the export.

        Raises:
            ConfigError: There is no such export; a row is too long for the model, cannot be
                rendered, or has no words to learn.
        """
        folder = Path(path).expanduser().absolute()
        if not folder.is_dir():
            raise ConfigError(
                f"--warm-start {path}: there is no such folder; `inspect rl export --from-logs "
                "LOGS --as sft` makes one"
            )
        rows = rows_of(str(folder), "train", "messages")
        builder = DemonstrationsBuilder(
            path=str(folder),
            common_config=ChatDatasetBuilderCommonConfig(
                model_name_for_tokenizer=config.model_name,
                renderer_name=config.renderer_name,
                max_length=None,
                batch_size=min(_BATCH, len(rows)),
            ),
        )
        dataset, _ = builder()
        from tinker_local import context_length

        _check_rows(path, dataset, len(rows), context_length(config.model_name) or LONGEST)
        steps = epochs * len(dataset)
        return cls(
            path=str(folder),
            digest=_digest(folder),
            steps=steps,
            config=supervised.Config(
                log_path=str(Path(config.log_path) / IMITATION),
                model_name=config.model_name,
                recipe_name=config.recipe_name,
                renderer_name=config.renderer_name,
                dataset_builder=builder,
                learning_rate=config.learning_rate,
                num_epochs=epochs,
                lora_rank=config.lora_rank,
                save_every=max(1, steps // _SAVES),
                eval_every=0,
                infrequent_eval_every=0,
            ),
        )


def imitated(log_dir: Path) -> str | None:
    """Return the checkpoint of a run's finished imitation, ``None`` while there is none."""
    rows = read_rows(log_dir / IMITATION / CHECKPOINTS)
    finals = [row for row in rows if row.get("name") == "final" and row.get("state_path")]
    return str(finals[-1]["state_path"]) if finals else None


def _check_rows(path: str, dataset: Any, rows: int, longest: int) -> None:
    """Render every row: the batches of a dataset leave out the last rows, these do not."""
    for number in range(rows):
        where = f"--warm-start {path}: row {number}"
        try:
            (datum,) = [
                dataset.map_fn(row) for row in dataset.hf_dataset.select([number]).to_list()
            ]
        except (ConfigError, TinkerCookbookError, KeyError, TypeError, ValueError) as error:
            reason = " ".join(str(error).split())
            raise ConfigError(
                f"{where} cannot be rendered: {type(error).__name__}: {reason:.300}"
            ) from error
        tokens = datum.model_input.length + 1
        if tokens > longest:
            raise ConfigError(
                f"{where} has {counted(tokens, 'token')}, more than the model takes ({longest:,}); "
                "export with --max-length"
            )
        if not any(datum.loss_fn_inputs["weights"].data):
            raise ConfigError(f"{where} has no words that are marked to be learned")


def _digest(folder: Path) -> str:
    found = hashlib.sha256()
    for file in sorted(each for each in folder.iterdir() if each.suffix in _DATA):
        found.update(file.name.encode())
        with file.open("rb") as content:
            found.update(hashlib.file_digest(content, "sha256").digest())
    return found.hexdigest()
