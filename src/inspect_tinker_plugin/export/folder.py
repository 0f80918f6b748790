"""The folder of an export: claimed, filled unit by unit, finished in one step, and uploaded.

While it is unfinished, everything is inside ``.inspect-rl-export``: a journal with each row and the
end of each unit (a sample, or the logged runs of one). An export that continues keeps the units
that the journal has whole. At the end, the files are written from the journal through ``datasets``:
``train-00000-of-00003.parquet`` and so on, which ``datasets.load_dataset(folder)`` finds by itself,
with ``README.md`` and ``export.json`` beside them. A finished export that is being replaced stays
as it is until then.
"""

from __future__ import annotations

import json
import os
import platform
import shutil
import time
import uuid
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from datetime import UTC, datetime
from importlib.metadata import version
from pathlib import Path
from typing import TYPE_CHECKING, Any

from filelock import FileLock, Timeout

from inspect_tinker_plugin.contracts.errors import ExportError
from inspect_tinker_plugin.export.layouts import Row, Schema
from inspect_tinker_plugin.export.options import FolderOptions, Format
from inspect_tinker_plugin.processes import Journal, write_whole

if TYPE_CHECKING:
    from datasets import Features


CARD = "README.md"
SUMMARY = "export.json"
WORK = ".inspect-rl-export"
HELD_BYTES = 512 * 1024
HELD_SECONDS = 1.0
"""Rows are written to the journal when there are as many in memory, or for as long."""

FILE_BYTES = 256 * 1024 * 1024
"""Size of the rows of a file, before they are compressed; with more, there are several files."""

CHUNK_ROWS = 100
"""Rows that are converted together."""


@dataclass(frozen=True)
class Failure:
    """A sample that could not be exported."""

    id: str
    reason: str


class ExportFolder:
    """An export in progress; made by :meth:`claim`.

    Attributes:
        path: The folder.
        seed: The seed of this export's order, chosen at random when none was given.
        units: Units that are done.
        rows: Their rows, by split.
        failures: What of them failed.
        left_out: Number of samples left out after they were read, by reason.
    """

    def __init__(self, path: Path, format: Format, schema: Schema, created: bool) -> None:
        self.path = path
        self.seed: int | None = None
        self.units = 0
        self.last_row: Row | None = None
        self.rows: Counter[str] = Counter()
        self.failures: list[Failure] = []
        self.left_out: Counter[str] = Counter()
        self._format = format
        self._schema = schema
        self._created = created
        self._rich = False
        self._work = path / WORK
        self._lock = FileLock(self._work / "lock", timeout=0)
        self._journal = Journal(self._work / "journal.jsonl")
        self._written = time.monotonic()
        self._open_rows: Counter[str] = Counter()
        self._data: str | None = None

    @classmethod
    def claim(
        cls,
        path: Path,
        options: FolderOptions,
        *,
        identity: Mapping[str, Any],
        seed: int | None,
        schema: Schema,
    ) -> ExportFolder:
        """Take a folder for an export, to continue an unfinished one or to start a new one.

        Args:
            path: The folder; created if missing.
            options: How it is written.
            identity: What is exported.
            seed: Seed of the order, when this export starts from the beginning.
            schema: Columns of the files.
        """
        try:
            check_target(path, overwrite=options.overwrite)
            created = not path.exists()
            (path / WORK).mkdir(parents=True, exist_ok=True)
            folder = cls(path, options.format, schema, created)
            try:
                folder._lock.acquire()
                what = json.loads(json.dumps(dict(identity)))
                folder._open_journal(what, seed, options.overwrite)
            except Timeout as error:
                raise ExportError(f"{path} is being written by another export.") from error
            except BaseException:
                folder._lock.release()
                raise
        except OSError as error:
            raise _unwritable(path, error) from error
        return folder

    def _open_journal(self, identity: Mapping[str, Any], seed: int | None, fresh: bool) -> None:
        path = self._journal.path
        begun = not fresh and path.is_file() and path.stat().st_size > 0
        head, end = next(self._journal.read(), (None, 0)) if begun else (None, 0)
        if head is None and begun:
            raise ExportError(
                f"{path} is damaged, so the export cannot be continued: start again with "
                "--overwrite."
            )
        if head is None:
            self.seed = seed
            self._journal.replace([{"identity": identity, "seed": seed}])
            return
        known = head["identity"]
        differing = [key for key in identity if identity[key] != known.get(key)]
        if differing:
            raise ExportError(
                f"{self.path} holds an unfinished export that differs in "
                + ", ".join(f"{k} ({known.get(k)!r}, now {identity[k]!r})" for k in differing)
                + ". Finish that one, choose another folder, or use --overwrite."
            )
        self.seed = head["seed"]
        self._journal.cut(self._count_units(end))

    def _count_units(self, end: int) -> int:
        """Count what the journal has; returns its size up to the last unit that is whole."""
        rich = False
        row = None
        for record, size in self._journal.read():
            if "row" in record:
                row = record["row"]
                self._open_rows[record["split"]] += 1
                rich = rich or self._schema.is_rich(record["row"])
            elif "data" in record:
                self._data, end = record["data"], size
            elif "failures" in record:
                self._count_unit([Failure(**each) for each in record["failures"]])
                self.left_out.update(record["left_out"])
                self._rich, end = self._rich or rich, size
                self.last_row, row = row, None
        self._open_rows.clear()
        return end

    def _count_unit(self, failures: Sequence[Failure]) -> None:
        self.units += 1
        self.failures += failures
        self.rows.update(self._open_rows)
        self._open_rows.clear()

    def check_data(self, digest: str, *, changed: str) -> None:
        """Check that an export that continues has the same data as when it began."""
        if self._data is None:
            self._journal.write({"data": digest})
        elif self._data != digest:
            raise ExportError(
                f"{self.path} holds an unfinished export, but {changed}. Use --overwrite to "
                "start again."
            )

    def add_row(self, split: str, row: Row) -> None:
        """Add a row of the current unit."""
        self._rich = self._rich or self._schema.is_rich(row)
        self._open_rows[split] += 1
        self._hold({"split": split, "row": row})

    def end_unit(
        self, failures: Sequence[Failure] = (), left_out: Mapping[str, int] | None = None
    ) -> None:
        """End the current unit: from now on an export that continues has it.

        Args:
            failures: What of it failed.
            left_out: How many of its samples were left out after they were read, by reason.
        """
        self.left_out.update(left_out or {})
        self._count_unit(failures)
        failed = [asdict(each) for each in failures]
        self._hold({"failures": failed, "left_out": dict(left_out or {})})

    def _hold(self, record: Mapping[str, Any]) -> None:
        held = self._journal.hold(record)
        if held >= HELD_BYTES or time.monotonic() - self._written >= HELD_SECONDS:
            self._write_held()

    def _write_held(self) -> None:
        try:
            self._journal.write()
        except OSError as error:
            raise _unwritable(self.path, error) from error
        self._written = time.monotonic()

    def finish(
        self,
        title: str,
        about: str,
        *,
        source: Mapping[str, Any],
        counts: Mapping[str, Any],
        failures: Sequence[Failure],
    ) -> list[str]:
        """Write the files, the card and ``export.json``.

        A finish that was interrupted is repeated by the next call.

        Returns:
            Names of the files.
        """
        self._write_held()
        try:
            names = self._write_files()
            summary = {
                **source,
                "columns": list(self._schema.columns),
                "counts": counts,
                "failures": [asdict(failure) for failure in failures],
                "packages": _packages(),
                "finished": datetime.now(UTC).isoformat(timespec="seconds"),
                "files": list(names),
            }
            self._remove_old()
            for name, path in names.items():
                path.replace(self.path / name)
            patterns = {split: f"{split}-*.{self._format}" for split in self.rows}
            features = self._schema.features(rich=self._rich)
            card = write_card(title, about, features=features, files=patterns)
            write_whole(self.path / CARD, card)
            text = json.dumps(summary, indent=2, ensure_ascii=False)
            write_whole(self.path / SUMMARY, f"{text}\n")
            self._drop_work()
        except OSError as error:
            raise _unwritable(self.path, error) from error
        return list(names)

    def _write_files(self) -> dict[str, Path]:
        """Write the rows into files; returns these by their names in the finished export."""
        names: dict[str, Path] = {}
        features = self._schema.features(rich=self._rich)
        for split, count in self.rows.items():
            paths, written = write_split(self._journal, split, features, self._format)
            if written != count:
                raise ExportError(
                    f"{self._journal.path} was damaged while the export ran; run the same "
                    "command again to continue."
                )
            for number, path in enumerate(paths):
                names[f"{split}-{number:05d}-of-{len(paths):05d}.{self._format}"] = path
        return names

    def abandon(self) -> None:
        """Remove what this export wrote, and the folder if it was made for it."""
        self._drop_work()
        if self._created and self.path.is_dir() and not any(self.path.iterdir()):
            self.path.rmdir()

    def close(self) -> None:
        """Release the folder; an unfinished export can be continued after its last whole unit."""
        if self._work.is_dir():
            self._write_held()
        self._lock.release()

    def _remove_old(self) -> None:
        """Remove the finished export that this one replaces; its summary is removed last."""
        summary = self.path / SUMMARY
        if summary.exists():
            for name in [CARD, *read_summary(self.path).get("files", [])]:
                (self.path / Path(name).name).unlink(missing_ok=True)
            summary.unlink()

    def _drop_work(self) -> None:
        shutil.rmtree(self._work, ignore_errors=True)


def _unwritable(path: Path, error: OSError) -> ExportError:
    """Make a one-line error that says why a folder cannot be written."""
    return ExportError(f"cannot write to {path}: {error.strerror or error}.")


def check_target(path: Path, *, overwrite: bool) -> None:
    """Refuse a folder that an export must not touch."""
    if not path.exists():
        return
    if not path.is_dir():
        raise ExportError(f"{path} is a file; an export needs a folder.")
    if (path / WORK).is_dir():
        return
    if (path / SUMMARY).exists():
        if not overwrite:
            raise ExportError(
                f"{path} holds a finished export of {read_summary(path).get('task')!r}; use "
                "--overwrite to replace it."
            )
        return
    if any(path.iterdir()):
        raise ExportError(f"{path} is not empty and holds no export; choose another folder.")


def read_summary(path: Path) -> dict[str, Any]:
    """Read the ``export.json`` of a folder."""
    try:
        summary = json.loads((path / SUMMARY).read_text(encoding="utf-8"))
    except ValueError as error:
        raise ExportError(f"{path / SUMMARY} cannot be read: {error}.") from error
    if not isinstance(summary, dict):
        raise ExportError(f"{path / SUMMARY} is not the summary of an export.")
    return summary


def _packages() -> dict[str, str]:
    """Return the releases of packages that determine what is written."""
    names = ("inspect-tinker-plugin", "inspect-ai", "datasets", "pyarrow")
    return {"python": platform.python_version(), **{name: version(name) for name in names}}


def push_to_hub(folder: Path, repository: str) -> None:
    """Upload an export through ``datasets``, all of its splits.

    Args:
        folder: The export; it stays as it is.
        repository: Name of the dataset, as ``user/name``. A new one is private.
    """
    from datasets import load_dataset

    try:
        load_dataset(str(folder)).push_to_hub(repository, private=True)
    except Exception as error:  # of the network, of the Hub, of its client
        reason = " ".join(str(error).split()) or type(error).__name__
        raise ExportError(
            f"{folder} is complete, but was not uploaded to {repository!r} ({reason:.300}). Log in "
            "with `hf auth login`, or set HF_TOKEN, and upload it with "
            f'datasets.load_dataset("{folder}").push_to_hub("{repository}").'
        ) from error


def write_split(
    journal: Journal, split: str, features: Features, format: Format
) -> tuple[list[Path], int]:
    """Write the rows of a split into files beside the journal, and return these and the rows."""
    from datasets import Dataset
    from datasets.exceptions import DatasetGenerationError

    folder = journal.path.parent
    cache = folder / "cache"
    shutil.rmtree(cache, ignore_errors=True)
    with hide_bars():
        try:
            rows: Any = Dataset.from_generator(
                _read_rows,
                gen_kwargs={"path": journal.path, "split": split},
                features=features,
                cache_dir=str(cache),
                writer_batch_size=CHUNK_ROWS,
            )
        except DatasetGenerationError as error:
            if isinstance(error.__cause__, OSError):  # a full disk
                raise error.__cause__ from error
            raise
        total = min(len(rows), -(-rows.data.nbytes // FILE_BYTES))
        paths = [folder / f"file-{split}-{number}" for number in range(total)]
        for number, path in enumerate(paths):
            _write_file(rows.shard(total, number, contiguous=True), path, format)
    return paths, len(rows)


def _read_rows(path: Path, split: str) -> Iterator[Row]:
    """Yield the rows of a split; ``datasets`` calls this once more for each split."""
    for record, _ in Journal(path).read():
        if record.get("split") == split:
            yield record["row"]


def _write_file(rows: Any, path: Path, format: Format) -> None:
    with path.open("wb") as file:
        if format == "parquet":
            rows.to_parquet(file)
        elif format == "jsonl":
            rows.to_json(file, batch_size=CHUNK_ROWS, lines=True, force_ascii=False)
        else:
            import pyarrow

            # The stream format of Arrow, which `load_dataset` reads from a folder.
            with pyarrow.ipc.new_stream(file, rows.features.arrow_schema) as tables:
                for table in rows.with_format("arrow").iter(CHUNK_ROWS):
                    tables.write_table(table)
        file.flush()
        os.fsync(file.fileno())


@contextmanager
def hide_bars() -> Iterator[None]:
    """Keep ``datasets`` from showing progress bars of its own."""
    from datasets import disable_progress_bars, enable_progress_bars, is_progress_bar_enabled

    shown = is_progress_bar_enabled()
    disable_progress_bars()
    try:
        yield
    finally:
        if shown:
            enable_progress_bars()


def write_card(title: str, about: str, *, features: Features, files: Mapping[str, str]) -> str:
    """Write the card of an export, which tells ``load_dataset`` (and the Hub) the schema.

    JSON lines need it: their reader guesses types from the first lines, and a key that is null
    there would have no type for the lines that follow.
    """
    from datasets import DatasetInfo
    from datasets.info import DatasetInfosDict
    from huggingface_hub import DatasetCardData

    splits = [{"split": split, "path": pattern} for split, pattern in files.items()]
    # `load_dataset` keeps what it read of a folder under the folder's last name and a hash of this
    # card, and would take another export of that name for the same.
    config = {"data_files": splits, "description": f"export {uuid.uuid4().hex}"}
    head = DatasetCardData(configs=[{"config_name": "default", **config}])
    DatasetInfosDict({"default": DatasetInfo(features=features)}).to_dataset_card_data(head)
    return f"---\n{head}\n---\n\n# {title}\n\n{about}\n`export.json` says how it was made.\n"
