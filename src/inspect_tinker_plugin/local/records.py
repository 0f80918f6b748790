"""Reads and corrects SkyRL's database where its HTTP interface offers no way to do so.

Plain SQL on the SQLite file that `launch` chose; tables as in SkyRL 0.2.0.
"""

from __future__ import annotations

import shutil
import sqlite3
from collections.abc import Iterator
from contextlib import closing, contextmanager
from contextvars import ContextVar
from dataclasses import dataclass
from pathlib import Path


@dataclass(frozen=True)
class Records:
    """One server's records. All methods block briefly, and are safe in any thread."""

    database: Path
    checkpoints: Path

    def forget_unfinished(self) -> None:
        """Drop what an earlier server left unfinished. Call before the engine starts.

        Its clients are gone or have seen it die; the engine would otherwise process all of it
        first, and unused models would take up slots.
        """
        if not self.database.exists():
            return
        with self._write() as sql:
            sql.execute("DELETE FROM futures")
            sql.execute(
                "UPDATE checkpoints SET status = 'FAILED', error_message = ? "
                "WHERE status = 'PENDING'",
                ("the server was stopped while it was saved",),
            )

    def sampler_weights(self, sampler_id: str) -> str | None:
        """Path of a sampling session's weights: "" for the base model, None if unknown."""
        with self._write() as sql:
            query = "SELECT model_path FROM sampling_sessions WHERE sampling_session_id = ?"
            row = sql.execute(query, (sampler_id,)).fetchone()
        return None if row is None else (row[0] or "")

    def finish_session(self, session_id: str) -> list[str]:
        """Close a session; return the ids of its models that may still be loaded."""
        with self._write() as sql:
            sql.execute(
                "UPDATE sessions SET status = 'finished' WHERE session_id = ?", (session_id,)
            )
            rows = sql.execute(
                "SELECT model_id FROM models WHERE session_id = ? AND status = 'created'",
                (session_id,),
            ).fetchall()
        return [row[0] for row in rows]

    def delete_checkpoint(self, model_id: str, name: str, *, sampler: bool) -> bool:
        """Delete a checkpoint's record and files; False if there is no such checkpoint."""
        with self._write() as sql:
            found = sql.execute(
                "DELETE FROM checkpoints "
                "WHERE model_id = ? AND checkpoint_id = ? AND checkpoint_type = ?",
                (model_id, name, "SAMPLER" if sampler else "TRAINING"),
            ).rowcount
        if not found:
            return False
        folder = self.checkpoints / model_id / ("sampler_weights" if sampler else "")
        file = folder / f"{name}.tar.gz"
        if file.is_dir():  # training checkpoints are folders, whatever their name says
            shutil.rmtree(file, ignore_errors=True)
        else:
            file.unlink(missing_ok=True)
        return True

    @contextmanager
    def _write(self) -> Iterator[sqlite3.Connection]:
        with closing(sqlite3.connect(self.database, timeout=30)) as sql, sql:
            yield sql


_restore_optimizer: ContextVar[bool] = ContextVar("restore_optimizer", default=True)


def keep_optimizer_flag() -> None:
    """Store with each load request whether the optimizer is restored too (see `engine`).

    SkyRL's request has no such field, and its engine always restores the optimizer.
    """
    from pydantic import Field
    from skyrl.tinker import types

    class LoadWeightsInput(types.LoadWeightsInput):  # type: ignore[misc]
        optimizer: bool = Field(default_factory=lambda: _restore_optimizer.get())

    types.LoadWeightsInput = LoadWeightsInput


@contextmanager
def restoring_optimizer(restore: bool) -> Iterator[None]:
    """Load requests that are stored inside this block carry ``restore``."""
    token = _restore_optimizer.set(restore)
    try:
        yield
    finally:
        _restore_optimizer.reset(token)
