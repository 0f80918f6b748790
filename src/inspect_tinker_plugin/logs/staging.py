"""The staging folder of a dataset's logs: parts wait here until their batch is complete.

::

    DIR/2026-01-31T12-00-00-00-00_task-batch-000012_<id>.eval     a finished log
    DIR/.rollouts/<run>/header.json                               what all its logs share
    DIR/.rollouts/<run>/owner.lock                                held while the dataset lives
    DIR/.rollouts/<run>/batch-000012.0/00003-of-00008.part        a finished group
    DIR/.rollouts/<run>/group-000012-00003.0/00000-of-00001.part  one taken out of its batch
    DIR/.rollouts/<run>/closed/batch-000012.0                     accepts no more parts

Parts appear by an atomic rename under a lock that the kernel drops with its process, so
groups may run in any process, and processes may be killed.

A record is condensed by Inspect and turned into JSON once, when its group ends. Each has two lines
in the part of its group::

    {"sample": {...}, "messages": 2}           the small fields, which are read again
    "messages": [...], "events": [...], ...    the rest, which a log takes as it is

Inspect's recorder needs objects, so that a record would be written, read, condensed and written
again: of a rollout of 1, 8 or 32 turns 2.5, 2.4 or 4.4 times the CPU of this. The entries of a log
are those that the recorder makes; ``tests/logs/test_parts.py`` compares them.
"""

from __future__ import annotations

import os
import re
import shutil
import uuid
import zipfile
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from filelock import FileLock, Timeout
from inspect_ai.log import EvalLog, EvalSample, EvalSampleSummary, condense_sample
from pydantic import PrivateAttr
from pydantic_core import PydanticSerializationError, from_json, to_json, to_jsonable_python

from inspect_tinker_plugin import inspect_internals as internals
from inspect_tinker_plugin.contracts.wording import spell_all_out
from inspect_tinker_plugin.processes import write_whole

STAGING = ".rollouts"
_LOCK_TIMEOUT_S = 300.0
_TRIES = 10
_VISIT = re.compile(r"(?:batch-(\d+)|group-\d+-\d+)\.(\d+)")
_PART = re.compile(r"(\d+)-of-(\d+)\.part")

_LARGE = frozenset({"events", "events_data", "attachments", "messages", "store"})
_CHANGED = ("epoch", "metadata", "scores")
"""What the log of a batch adds to the records of its groups."""

_VERSION = 2
"""The version of the log format whose entries are written here."""


@dataclass(frozen=True)
class GroupSlot:
    """The position of a group in the training."""

    batch: int
    """Index of the batch, from 0."""

    index: int
    """Index of the group in its batch, from 0."""

    groups: int
    """Groups of the batch."""

    step_known: bool = True
    """Whether the batch belongs to one step. Otherwise its groups are taken out one by one, at
    steps that are not known here, and each gets its own log."""


@dataclass(frozen=True)
class Attempt:
    """One pass over a batch; a batch that is rolled out again (an evaluator does) has more."""

    folder: Path
    batch: int | None
    """Index of the batch; absent for a group that was taken out of its batch."""

    number: int

    @property
    def name(self) -> str:
        """Name of the folder, unique within the run."""
        return self.folder.name

    def parts(self) -> list[Path]:
        """Return the parts that are there, in the order of the groups; none once it has its log."""
        return [path for path in list_folder(self.folder) if _PART.fullmatch(path.name)]

    @property
    def groups(self) -> int:
        """Number of groups in the batch, from the names of its parts."""
        matches = (_PART.fullmatch(path.name) for path in self.parts())
        return max((int(match[2]) for match in matches if match), default=0)

    @property
    def complete(self) -> bool:
        """Whether every group is there."""
        parts = self.parts()
        return bool(parts) and len(parts) == self.groups


@dataclass(frozen=True)
class LogRun:
    """The staging folder of one dataset; picklable, and the same in every process."""

    log_dir: Path
    """Folder of the finished logs; absolute."""

    run_id: str
    """Unique id of the dataset."""

    @property
    def folder(self) -> Path:
        """The run's own folder."""
        return self.log_dir / STAGING / self.run_id

    @property
    def header_file(self) -> Path:
        """Path of the ``EvalLog`` without samples that all logs of the run begin as."""
        return self.folder / "header.json"

    def create(self, header: str) -> FileLock:
        """Make the folders and write the data that all logs share.

        Returns:
            The owner's lock, held: nobody takes the run for one that has ended.

        Raises:
            OSError: They cannot be written.
        """
        for _ in range(_TRIES):  # another run may just have removed the parent, as empty
            with suppress(FileNotFoundError):
                (self.folder / "closed").mkdir(parents=True, exist_ok=True)
                break
        lock = self.owner_lock()
        lock.acquire(timeout=0)
        write_whole(self.header_file, header)
        return lock

    @property
    def begun(self) -> bool:
        """Whether there is anything to finish; otherwise it may be just being created."""
        return self.header_file.is_file()

    def owner_lock(self) -> FileLock:
        """Return the lock that is held while the dataset is alive."""
        return FileLock(self.folder / "owner.lock", thread_local=False)

    def temporary(self) -> Path:
        """Return an unused path in the run's folder, to write to before a rename."""
        return self.folder / f"{uuid.uuid4().hex}.writing"

    def add_part(self, slot: GroupSlot, write: Callable[[Path], None]) -> bool:
        """Write a group's part and rename it to its place.

        If the group has a part already (the batch is run again), this opens another attempt.

        Returns:
            Whether its attempt has every group now.

        Raises:
            OSError: It cannot be written, or a later run has finished this one: its worker has
                outlived its trainer.
        """
        (self.folder / "closed").mkdir(exist_ok=True)
        temporary = self.temporary()
        try:
            write(temporary)
            with self.hold_lock("stage"):
                place = self._place(slot)
                place.parent.mkdir(exist_ok=True)
                os.replace(temporary, place)
                return len(os.listdir(place.parent)) == (slot.groups if slot.step_known else 1)
        finally:
            temporary.unlink(missing_ok=True)

    def attempts(self) -> list[Attempt]:
        """Return the attempts that wait for their log, in order."""
        found = []
        for path in list_folder(self.folder):
            match = _VISIT.fullmatch(path.name)
            if match and path.is_dir():
                batch = None if match[1] is None else int(match[1])
                found.append(Attempt(path, batch, int(match[2])))
        return sorted(found, key=lambda attempt: (attempt.batch or 0, attempt.number))

    def close(self, attempt: Attempt) -> None:
        """Accept no further parts for an attempt; later ones open another."""
        with self.hold_lock("stage"):
            (self.folder / "closed" / attempt.name).touch()

    def remove(self, attempt: Attempt) -> None:
        """Remove an attempt's parts atomically: half of them would make half a log."""
        trash = self.temporary()
        attempt.folder.rename(trash)
        shutil.rmtree(trash, ignore_errors=True)

    def discard_if_empty(self) -> None:
        """Remove the folder of a run that has ended and has nothing left to assemble."""
        if not self.attempts():
            shutil.rmtree(self.folder, ignore_errors=True)
            with suppress(OSError):  # other runs are there
                self.folder.parent.rmdir()

    def _place(self, slot: GroupSlot) -> Path:
        if slot.step_known:
            visit, part = f"batch-{slot.batch:06d}", f"{slot.index:05d}-of-{slot.groups:05d}.part"
        else:
            visit, part = f"group-{slot.batch:06d}-{slot.index:05d}", "00000-of-00001.part"
        number = 0
        while True:
            place = self.folder / f"{visit}.{number}" / part
            if not place.exists() and not (self.folder / "closed" / place.parent.name).exists():
                return place
            number += 1

    @contextmanager
    def hold_lock(self, name: str) -> Iterator[None]:
        """Hold a lock of the run's: ``stage`` to add parts, ``assemble`` to make logs."""
        try:
            with FileLock(self.folder / f"{name}.lock", timeout=_LOCK_TIMEOUT_S):
                yield
        except Timeout as error:
            raise OSError(f"another process holds {error.lock_file}") from error


def runs_in(log_dir: Path) -> list[LogRun]:
    """Return the runs that have a staging folder in a log folder."""
    folders = [path for path in list_folder(log_dir / STAGING) if path.is_dir()]
    return [LogRun(log_dir, folder.name) for folder in folders]


def list_folder(folder: Path) -> list[Path]:
    """List a folder, sorted; nothing if it is not there, or was removed in this moment."""
    try:
        return sorted(folder.iterdir())
    except FileNotFoundError:
        return []


class StoredSample(EvalSample):
    """A record without its large fields, which are in the log all the same.

    Only ``epoch``, ``metadata`` and ``scores`` may be changed.
    """

    _small: dict[str, Any] = PrivateAttr()
    _rest: bytes = PrivateAttr()
    _message_count: int = PrivateAttr()

    def summary(self) -> EvalSampleSummary:
        """Summarise as Inspect does."""
        summary = super().summary()
        summary.message_count = self._message_count
        return summary

    def to_json(self) -> bytes:
        """Return the record as it is in a log, with all of its fields."""
        changed = {name: getattr(self, name) for name in _CHANGED}
        known = {name: value for name, value in changed.items() if value is not None}
        return b"%b,%b}" % (_json({**self._small, **known})[:-1], self._rest)


def write_part(path: Path, records: Sequence[EvalSample]) -> None:
    """Write the records of a group."""
    path.write_bytes(b"".join(_lines(record) for record in records))


def _lines(record: EvalSample) -> bytes:
    try:
        record = condense_sample(record)
    except PydanticSerializationError:  # half surrogate pairs in messages to the model
        record = condense_sample(EvalSample.model_validate(spell_all_out(_jsonable(record))))
    fields = _jsonable(record)
    small = {name: value for name, value in fields.items() if name not in _LARGE}
    large = {name: value for name, value in fields.items() if name in _LARGE}
    if any(score.get("answer") for score in small.get("scores", {}).values()):
        large["output"] = small.pop("output")  # it is read again for want of an answer
    about = {"sample": small, "messages": len(fields["messages"])}
    return b"%b\n%b\n" % (_json(about), _json(large)[1:-1])


def read_part(path: Path) -> list[StoredSample]:
    """Read the records of a group, to be written to a log.

    Raises:
        OSError: The file cannot be read.
        ValueError: It is damaged.
    """
    lines = path.read_bytes().split(b"\n")
    if lines.pop() or len(lines) % 2:
        raise ValueError("its last record is not complete")
    return [_read_record(*two) for two in zip(lines[::2], lines[1::2], strict=True)]


def _read_record(line: bytes, rest: bytes) -> StoredSample:
    about = from_json(line)
    if not isinstance(about, dict):
        raise ValueError("a record is damaged")
    small = about["sample"]
    sample = StoredSample.model_validate(dict(small))
    sample._small, sample._rest, sample._message_count = small, rest, about["messages"]
    return sample


def write_log(header: EvalLog, samples: Sequence[StoredSample], path: Path) -> None:
    """Write the log of a batch, safely on disk when this returns."""
    start = {"version": _VERSION, "eval": header.eval, "plan": header.plan}
    summaries = _json_safe([sample.summary() for sample in samples])
    with path.open("xb") as file:
        with zipfile.ZipFile(file, "w", zipfile.ZIP_DEFLATED) as log:
            log.writestr("_journal/start.json", _json_safe(start))
            for sample in samples:
                log.writestr(f"samples/{sample.id}_epoch_{sample.epoch}.json", sample.to_json())
            log.writestr("_journal/summaries/1.json", summaries)
            log.writestr("summaries.json", summaries)
            whole = header.model_copy(update={"version": _VERSION})
            log.writestr("header.json", _json_safe(whole))
        file.flush()
        os.fsync(file.fileno())


def _jsonable(value: EvalSample) -> Any:
    return to_jsonable_python(value, exclude_none=True, fallback=lambda _: None)


def _json(fields: Mapping[str, Any]) -> bytes:
    """Return JSON values as JSON; what is not valid text is written as Inspect does."""
    try:
        return to_json(fields, exclude_none=True, fallback=lambda _: None)
    except PydanticSerializationError:
        return _json_safe(fields)


def _json_safe(value: Any) -> bytes:
    return internals.to_json_safe(value, indent=None)
