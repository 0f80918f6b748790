"""Exports of logs as data of the cookbook's supervised and preference loops, and the warm start.

The cookbook's own ``FromConversationFileBuilder`` and ``ComparisonBuilderFromJsonl`` read exports
of plain conversations in the layout ``tinker``. They know of no tools, and a renderer wants tool
calls as objects, so these read the rest as well, in the layouts ``chat`` and ``tinker``.

The imitation before a training has its own folder in the run's, with the cookbook's metrics and
checkpoints. Its last checkpoint is where the training starts from; a folder that has it never
imitates again.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, cast

import chz
import datasets
import tinker
from tinker_cookbook.exceptions import TinkerCookbookError
from tinker_cookbook.preference.preference_datasets import ComparisonDatasetBuilder
from tinker_cookbook.preference.types import Comparison, LabeledComparison
from tinker_cookbook.renderers import (
    Message,
    Renderer,
    TextPart,
    ThinkingPart,
    ToolCall,
    ToolSpec,
    TrainOnWhat,
)
from tinker_cookbook.supervised import train as supervised
from tinker_cookbook.supervised.data import (
    SupervisedDatasetFromHFDataset,
    conversation_to_datum,
)
from tinker_cookbook.supervised.types import (
    ChatDatasetBuilder,
    ChatDatasetBuilderCommonConfig,
    SupervisedDataset,
)

from inspect_tinker_plugin.contracts.errors import ConfigError
from inspect_tinker_plugin.contracts.wording import counted
from inspect_tinker_plugin.evaluate.overlap import IMITATED, TrainingRecord
from inspect_tinker_plugin.export.folder import hide_bars
from inspect_tinker_plugin.processes import read_rows
from inspect_tinker_plugin.tokens.messages import opening
from inspect_tinker_plugin.train.history import CHECKPOINTS, IMITATION
from inspect_tinker_plugin.train.progress import show_progress

Row = Mapping[str, Any]

LONGEST = 32_768
"""Maximum tokens of a conversation, where the model's folder does not say it."""

_BATCH = 16
_SAVES = 5
"""Number of checkpoints on the way, so that an interrupted imitation continues."""

_DATA = (".parquet", ".jsonl", ".arrow")


@chz.chz
class DemonstrationsBuilder(ChatDatasetBuilder):
    """Conversations of an export ``--as sft``, ``rejection`` or ``rewards``, for imitation.

    Trained on are the words that the export marks.
    """

    path: str = chz.field(doc="Folder of the export.")
    held_out: str | None = chz.field(default=None, doc="Its split to evaluate on, if any.")

    def __call__(self) -> tuple[SupervisedDataset, SupervisedDataset | None]:
        """Build both datasets."""
        renderer = self.renderer

        def datum(row: Row) -> tinker.Datum:
            return conversation_to_datum(
                conversation(row["messages"], row["tools"], renderer, marked=True),
                renderer,
                self.common_config.max_length,
                TrainOnWhat.CUSTOMIZED,
            )

        train = rows_of(self.path, "train", "messages")
        size = min(self.common_config.batch_size, len(train))
        test = None
        if self.held_out is not None:
            rows = rows_of(self.path, self.held_out, "messages")
            test = SupervisedDatasetFromHFDataset(rows, len(rows), map_fn=datum)
        return SupervisedDatasetFromHFDataset(train, size, map_fn=datum), test


@chz.chz
class ComparisonsBuilder(ComparisonDatasetBuilder):
    """Pairs of an export ``--as preference``, for the cookbook's preference loops."""

    path: str = chz.field(doc="Folder of the export.")
    renderer: Renderer = chz.field(doc="Describes the tools.")
    held_out: str | None = chz.field(default=None, doc="Its split to evaluate on, if any.")

    def get_train_and_test_datasets(self) -> tuple[datasets.Dataset, datasets.Dataset | None]:
        """Return the rows of the export."""
        train = rows_of(self.path, "train", "tools")
        test = None if self.held_out is None else rows_of(self.path, self.held_out, "tools")
        return train, test

    def example_to_labeled_comparison(self, example: dict[str, Any]) -> LabeledComparison | None:
        """Return a row as the cookbook compares: A is the better."""
        row = example.get("comparison") or {
            "prompt_conversation": example["prompt"],
            "completion_A": example["chosen"],
            "completion_B": example["rejected"],
        }
        prompt = conversation(row["prompt_conversation"], example["tools"], self.renderer)
        better, worse = ([_message(m) for m in row[f"completion_{each}"]] for each in "AB")
        return LabeledComparison(Comparison(prompt, better, worse), label="A")


def rows_of(path: str, split: str, column: str) -> datasets.Dataset:
    """Load a split of an export."""
    try:
        with hide_bars():
            rows = datasets.load_dataset(path, split=split)
    except (OSError, ValueError, datasets.exceptions.DatasetsError) as error:
        reason = str(error).partition("\n")[0]
        raise ConfigError(f"{path} holds no export with a split {split!r}: {reason}") from error
    if column not in rows.column_names:
        raise ConfigError(
            f"{path} is no export of logs that can be used here: it has no column {column!r} but "
            f"{', '.join(rows.column_names)}; export with --from-logs --as ... and the layout chat "
            "or tinker"
        )
    return rows


def conversation(
    messages: Sequence[Row], tools: str | None, renderer: Renderer, *, marked: bool = False
) -> list[Message]:
    """Return an export's messages as a renderer takes them, its tools before them.

    Args:
        messages: The messages of a row.
        tools: The tools on offer, as JSON.
        renderer: Describes the tools; several leading system messages become one.
        marked: Whether each message says if it is to be trained on.
    """
    leading = 0
    while leading < len(messages) and messages[leading]["role"] == "system":
        leading += 1
    specs = [cast(ToolSpec, each["function"]) for each in json.loads(tools or "[]")]
    first = opening(renderer, [message["content"] for message in messages[:leading]], specs)
    if marked:
        for message in first:
            message["trainable"] = False
    return [*first, *(_message(message, marked=marked) for message in messages[leading:])]


def _message(row: Row, *, marked: bool = False) -> Message:
    content: Any = row["content"]
    if row.get("reasoning_content"):
        thought = ThinkingPart(type="thinking", thinking=row["reasoning_content"])
        content = [thought, *([TextPart(type="text", text=content)] if content else [])]
    message = Message(role=row["role"], content=content)
    if row.get("tool_calls"):
        message["tool_calls"] = [
            ToolCall(id=call["id"], function=ToolCall.FunctionBody(**call["function"]))
            for call in row["tool_calls"]
        ]
    for key in ("tool_call_id", "name"):
        if row.get(key):
            message[key] = row[key]
    if marked:
        message["trainable"] = bool(row["trainable"])
    return message


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
        """Read an export, and refuse what the imitation could not use."""
        from tinker_local import context_length

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

    async def imitate(self, config: Any, say: Callable[[str], None]) -> str:
        """Imitate, unless it is done; return the checkpoint to train from."""
        log_dir = Path(config.log_path)
        if (done := find_imitated(log_dir)) is not None:
            say(f"the imitation of {self.path} is done; training starts from its checkpoint")
            return done
        say(f"imitating {self.path}: {counted(self.steps, 'step')}")
        (log_dir / IMITATION).mkdir(exist_ok=True)
        rows = rows_of(self.path, "train", "messages")
        if "sample_hash" in rows.column_names:
            imitated_samples = dict(zip(rows["sample_hash"], rows["id"], strict=True))
            TrainingRecord(log_dir, IMITATED).add(IMITATED, imitated_samples)
        else:
            say(f"{self.path} does not say of which samples it is, so no eval can tell them apart")
        with show_progress(log_dir / IMITATION, say, steps=self.steps):
            await supervised.main(chz.replace(self.config, base_url=config.base_url))
        checkpoint = find_imitated(log_dir)
        assert checkpoint is not None, "the loop ends with the checkpoint `final`"
        return checkpoint


def find_imitated(log_dir: Path) -> str | None:
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
