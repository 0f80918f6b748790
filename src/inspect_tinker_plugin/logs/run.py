"""The staging folder of a dataset's logs: parts wait here until their batch is complete.

::

    DIR/2026-01-31T12-00-00+00-00_task-batch-000012_<id>.eval     a finished log
    DIR/.rollouts/<run>/spec.json                                 what all its logs share
    DIR/.rollouts/<run>/owner.lock                                held while the dataset lives
    DIR/.rollouts/<run>/batch-000012.0/00003-of-00008.part        a finished group
    DIR/.rollouts/<run>/group-000012-00003.0/00000-of-00001.part  one taken out of its batch
    DIR/.rollouts/<run>/closed/batch-000012.0                     accepts no more parts

Parts appear by an atomic rename under a lock that the kernel drops with its process, so
groups may run in any process, and processes may be killed.
"""

from __future__ import annotations

import os
import re
import shutil
import uuid
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path

from filelock import FileLock, Timeout

STAGING = ".rollouts"
_LOCK_TIMEOUT_S = 300.0
_TRIES = 10
_VISIT = re.compile(r"(?:batch-(\d+)|group-\d+-\d+)\.(\d+)")
_PART = re.compile(r"(\d+)-of-(\d+)\.part")


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
        """Return the parts that are there, in the order of the groups."""
        return sorted(path for path in self.folder.iterdir() if _PART.fullmatch(path.name))

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
    def spec_file(self) -> Path:
        """Path of the run's ``EvalSpec``."""
        return self.folder / "spec.json"

    def create(self, spec: str) -> FileLock:
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
        temporary = self.temporary()
        temporary.write_text(spec, encoding="utf-8")
        os.replace(temporary, self.spec_file)
        return lock

    @property
    def begun(self) -> bool:
        """Whether there is anything to finish; otherwise it may be just being created."""
        return self.spec_file.is_file()

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
            with self.locked("stage"):
                place = self._place(slot)
                place.parent.mkdir(exist_ok=True)
                os.replace(temporary, place)
                return len(os.listdir(place.parent)) == (slot.groups if slot.step_known else 1)
        finally:
            temporary.unlink(missing_ok=True)

    def attempts(self) -> list[Attempt]:
        """Return the attempts that wait for their log, in order."""
        found = []
        for path in self.folder.iterdir() if self.folder.is_dir() else ():
            match = _VISIT.fullmatch(path.name)
            if match and path.is_dir():
                batch = None if match[1] is None else int(match[1])
                found.append(Attempt(path, batch, int(match[2])))
        return sorted(found, key=lambda attempt: (attempt.batch or 0, attempt.number))

    def close(self, attempt: Attempt) -> None:
        """Accept no further parts for an attempt; later ones open another."""
        with self.locked("stage"):
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
    def locked(self, name: str) -> Iterator[None]:
        """Hold a lock of the run's: ``stage`` to add parts, ``assemble`` to make logs."""
        try:
            with FileLock(self.folder / f"{name}.lock", timeout=_LOCK_TIMEOUT_S):
                yield
        except Timeout as error:
            raise OSError(f"another process holds {error.lock_file}") from error


def runs_in(log_dir: Path) -> list[LogRun]:
    """Return the runs that have a staging folder in a log folder."""
    staging = log_dir / STAGING
    names = sorted(path.name for path in staging.iterdir()) if staging.is_dir() else []
    return [LogRun(log_dir, name) for name in names if (staging / name).is_dir()]
