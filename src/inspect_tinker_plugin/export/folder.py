"""The folder of an export: claimed, filled part by part, finished in one step, and uploaded.

While it is unfinished, everything is inside ``.inspect-rl-export``: the journal and one file
per part. At the end the parts get their final names, ``train-00000-of-00003.parquet`` and so on
(which ``datasets.load_dataset(folder)`` finds by itself), and ``README.md`` and
``export.json`` appear beside them. A finished export that is being replaced stays as it is
until then.

``README.md`` tells ``load_dataset`` (and the Hugging Face Hub) its schema. JSON lines need it:
their reader guesses types from the first lines, and a key that is null there would have no type for
the lines that follow.
"""

from __future__ import annotations

import json
import platform
import shutil
import uuid
from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import asdict, replace
from datetime import UTC, datetime
from importlib.metadata import version
from itertools import takewhile
from pathlib import Path
from typing import IO, TYPE_CHECKING, Any

from inspect_tinker_plugin.contracts.errors import ExportError
from inspect_tinker_plugin.export.parts import (
    Failure,
    Journal,
    OpenPart,
    Part,
    checksum,
    unwritable,
)
from inspect_tinker_plugin.export.schema import Format, PartWriter, Schema, read_chunks

if TYPE_CHECKING:
    from datasets import Features

CARD = "README.md"


def card(title: str, about: str, *, features: Features, files: Mapping[str, str]) -> str:
    """Write the card.

    Args:
        title: Its heading.
        about: What the rows are.
        features: Types of the columns.
        files: A pattern of file names for each split.
    """
    import yaml

    splits = [{"split": split, "path": pattern} for split, pattern in files.items()]
    head: dict[str, Any] = {
        "configs": [
            {
                "config_name": "default",
                "data_files": splits,
                # `load_dataset` keeps what it read of a folder under the folder's last name and a
                # hash of this card, and would take another export of that name for the same.
                "description": f"export {uuid.uuid4().hex}",
            }
        ],
        "dataset_info": {"features": _fields(features)},
    }
    return (
        f"---\n{yaml.safe_dump(head, sort_keys=False)}---\n\n# {title}\n\n{about}\n"
        "`export.json` says how it was made.\n"
    )


def _fields(struct: Any) -> list[dict[str, Any]]:
    return [{"name": name, **_type(of)} for name, of in struct.items()]


def _type(of: Any) -> dict[str, Any]:
    from datasets import List

    if isinstance(of, List):
        inner = of.feature
        return {"list": _fields(inner)} if isinstance(inner, dict) else {"list": inner.dtype}
    if isinstance(of, dict):
        return {"struct": _fields(of)}
    return {"dtype": getattr(of, "dtype", None) or type(of).__name__.lower()}  # Json has none


SUMMARY = "export.json"
WORK = ".inspect-rl-export"
TRAIN = "train"
"""The split of rows that are not held out."""

Digest = Callable[[int, int], str]
"""Hashes the units of an export from one position to another: samples, or the runs of each."""


class ExportFolder:
    """An export in progress; made by :meth:`claim`."""

    def __init__(self, path: Path, format: Format, schema: Schema, created: bool) -> None:
        self.path = path
        self._format = format
        self._schema = schema
        self._created = created
        self._work = path / WORK
        self._lock: IO[str] | None = None
        self._open: OpenPart | None = None
        self.journal = Journal(self._work / "journal.jsonl", {}, None)

    @classmethod
    def claim(
        cls,
        path: Path,
        *,
        identity: Mapping[str, Any],
        seed: int | None,
        format: Format,
        schema: Schema,
        overwrite: bool,
    ) -> ExportFolder:
        """Take a folder for an export, to continue an unfinished one or to start a new one.

        Args:
            path: The folder; created if missing.
            identity: What is exported.
            seed: Seed of the order, when this export starts from the beginning.
            format: File format.
            schema: Columns of the files.
            overwrite: Start again, whatever export the folder holds.

        Raises:
            ExportError: The folder cannot be written, is being written by another process,
                holds a finished export or the beginning of another one, or holds other files.
        """
        try:
            check_target(path, overwrite=overwrite)
            created = not path.exists()
            (path / WORK).mkdir(parents=True, exist_ok=True)
            folder = cls(path, format, schema, created)
            try:
                folder._take_lock()
                folder._open_journal(identity, seed, overwrite)
            except BaseException:
                folder.close()
                raise
        except OSError as error:
            raise unwritable(path, error) from error
        return folder

    def _take_lock(self) -> None:
        try:
            import fcntl
        except ImportError:  # not on Windows; two exports into one folder go unnoticed there
            return
        self._lock = (self._work / "lock").open("w")
        try:
            fcntl.flock(self._lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError as error:
            raise ExportError(f"{self.path} is being written by another export.") from error

    def _open_journal(self, identity: Mapping[str, Any], seed: int | None, fresh: bool) -> None:
        path = self._work / "journal.jsonl"
        found = None if fresh else Journal.read(path)
        if found is None:
            for old in self._work.glob("part-*"):
                old.unlink()
            self.journal = Journal(path, identity, seed)
            self.journal.start()
            return
        same = json.loads(json.dumps(dict(identity)))
        differing = [key for key in same if same[key] != found.identity.get(key)]
        if differing:
            raise ExportError(
                f"{self.path} holds an unfinished export that differs in "
                + ", ".join(f"{k} ({found.identity.get(k)!r}, now {same[k]!r})" for k in differing)
                + ". Finish that one, choose another folder, or use --overwrite."
            )
        self.journal = found
        self._drop_damaged()

    def _drop_damaged(self) -> None:
        """Drop the first part with a file that is gone or damaged, and those behind it.

        They are made again.
        """
        finishing = not (self.path / SUMMARY).exists()
        final = self._final_names() if finishing else {}

        def is_whole(part: Part, split: str) -> bool:
            path = self._part(part.index, split)
            found = checksum(path)
            if found is None and path in final:
                found = checksum(self.path / final[path])
            return found is not None and found == part.checksums.get(split, found)

        parts = self.journal.parts
        whole = list(takewhile(lambda part: all(is_whole(part, s) for s in part.rows), parts))
        if len(whole) == len(parts):
            return
        for path, name in final.items():  # a finish that was interrupted has moved it
            if not path.exists() and (self.path / name).exists():
                (self.path / name).replace(path)
        for part in parts[len(whole) :]:
            for split in part.rows:
                self._part(part.index, split).unlink(missing_ok=True)
        self.journal.keep(whole)

    def check_continuity(self, units: int, digest: Digest, *, changed: str) -> None:
        """Check that what the parts were written of is still the same.

        Args:
            units: How many units there are.
            digest: Hashes units, from one position to another.
            changed: What to say if they have changed.

        Raises:
            ExportError: They have.
        """
        start = 0
        for part in self.journal.parts:
            stop = start + part.samples
            if stop > units or part.digest != digest(start, stop):
                raise ExportError(
                    f"{self.path} holds an unfinished export, but {changed}. Use --overwrite to "
                    "start again."
                )
            start = stop

    def open_part(self, start: int) -> OpenPart:
        """Begin the next part; one at a time is open.

        Args:
            start: Position of its first unit.
        """
        index = len(self.journal.parts)
        # After the first rich part all are, so that none of them needs to be rewritten.
        rich = any(part.rich for part in self.journal.parts)

        def open_file(split: str, rich: bool) -> PartWriter:
            return self._writer(index, split, rich)

        self._open = OpenPart(start, self.path, self._schema, rich, open_file)
        return self._open

    def add(self, part: OpenPart, digest: Digest) -> None:
        """Complete the open part and record it; a part without units is nothing.

        Args:
            part: The part.
            digest: Hashes its units; an export continues only with the same.

        Raises:
            ExportError: The disk is full or the folder is gone; what was completed stays.
        """
        if part.stop == part.start:
            return
        try:
            part.close()
            self.journal.add(
                Part(
                    index=len(self.journal.parts),
                    samples=part.stop - part.start,
                    rows=dict(part.rows),
                    rich=part.rich,
                    digest=digest(part.start, part.stop),
                    failures=part.failures,
                    left_out=dict(part.left_out),
                    checksums=self._checksums(len(self.journal.parts), part.rows),
                )
            )
        except OSError as error:
            raise unwritable(self.path, error) from error

    @property
    def rows(self) -> dict[str, int]:
        """Rows that are written, by split."""
        total: Counter[str] = Counter()
        for part in self.journal.parts:
            total.update(part.rows)
        return dict(total)

    def finish(
        self,
        title: str,
        about: str,
        *,
        source: Mapping[str, Any],
        counts: Mapping[str, Any],
        failures: Sequence[Failure],
    ) -> list[str]:
        """Give the parts their final names and write the card and ``export.json``.

        A finish that was interrupted is completed by the next call.

        Args:
            title: Heading of the card.
            about: What the card says the rows are.
            source: What was exported and how, for ``export.json``.
            counts: How many samples and rows there are, for ``export.json``.
            failures: Samples that could not be exported.

        Returns:
            Names of the files.
        """
        names = self._final_names()
        rich = any(part.rich for part in self.journal.parts)
        files = list(names.values())
        summary = {
            **source,
            "columns": list(self._schema.columns),
            "counts": counts,
            "failures": [asdict(failure) for failure in failures],
            "packages": _packages(),
            "finished": datetime.now(UTC).isoformat(timespec="seconds"),
            "files": files,
        }
        try:
            if rich:
                self._widen()
            self._remove_old()
            for path, name in names.items():
                if path.exists():
                    path.replace(self.path / name)
            patterns = {split: f"{split}-*.{self._format}" for split in self.rows}
            features = self._schema.features(rich=rich)
            self._put(CARD, card(title, about, features=features, files=patterns))
            self._put(SUMMARY, json.dumps(summary, indent=2, ensure_ascii=False) + "\n")
            self._drop_work()
        except OSError as error:
            raise unwritable(self.path, error) from error
        return files

    def _final_names(self) -> dict[Path, str]:
        """Return the names of the files in the finished export, by those of the parts."""
        names: dict[Path, str] = {}
        for split in self.rows:
            parts = [part for part in self.journal.parts if part.rows.get(split)]
            for number, part in enumerate(parts):
                name = f"{split}-{number:05d}-of-{len(parts):05d}.{self._format}"
                names[self._part(part.index, split)] = name
        return names

    def _checksums(self, index: int, splits: Iterable[str]) -> dict[str, str]:
        found = {split: checksum(self._part(index, split)) for split in splits}
        return {split: of_file for split, of_file in found.items() if of_file is not None}

    def abandon(self) -> None:
        """Remove what this export wrote, and the folder if it was made for it."""
        self._discard_open()
        self._drop_work()
        if self._created and self.path.is_dir() and not any(self.path.iterdir()):
            self.path.rmdir()

    def close(self) -> None:
        """Release the folder; an unfinished export can be continued, without its open part."""
        self._discard_open()
        if self._lock is not None:
            self._lock.close()

    def _discard_open(self) -> None:
        if self._open is not None:
            self._open.discard()
            self._open = None

    def _widen(self) -> None:
        """Rewrite plain parts in the rich schema, as all files of an export must have the same."""
        for number, part in enumerate(self.journal.parts):
            if part.rich:
                continue
            for split in part.rows:
                writer = self._writer(part.index, split, rich=True)
                for rows in read_chunks(self._part(part.index, split), format=self._format):
                    writer.write(rows)
                writer.close()
            now = replace(part, rich=True, checksums=self._checksums(part.index, part.rows))
            parts = self.journal.parts
            self.journal.keep([*parts[:number], now, *parts[number + 1 :]])

    def _writer(self, index: int, split: str, rich: bool) -> PartWriter:
        path = self._part(index, split)
        return PartWriter(path, format=self._format, schema=self._schema, rich=rich)

    def _remove_old(self) -> None:
        """Remove the finished export that this one replaces; its summary is removed last."""
        summary = self.path / SUMMARY
        if summary.exists():
            for name in [CARD, *read_summary(self.path).get("files", [])]:
                (self.path / Path(name).name).unlink(missing_ok=True)
            summary.unlink()

    def _put(self, name: str, text: str) -> None:
        partial = self._work / name
        partial.write_text(text, encoding="utf-8")
        partial.replace(self.path / name)

    def _drop_work(self) -> None:
        shutil.rmtree(self._work, ignore_errors=True)

    def _part(self, index: int, split: str) -> Path:
        return self._work / f"part-{index:05d}-{split}.{self._format}"


def check_target(path: Path, *, overwrite: bool) -> None:
    """Refuse a folder that an export must not touch.

    Raises:
        ExportError: It is a file, holds a finished export, or holds other files.
    """
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
    """Read the ``export.json`` of a folder.

    Raises:
        ExportError: It was not written by an export.
    """
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

    Raises:
        ExportError: The Hub cannot be reached, or does not take it.
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
