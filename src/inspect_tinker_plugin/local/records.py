"""Reads and small corrections of SkyRL's database, which its HTTP interface does not offer."""

from __future__ import annotations

import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

_restore_optimizer: ContextVar[bool] = ContextVar("restore_optimizer", default=True)


def keep_optimizer_flag() -> None:
    """Store with each load request whether the optimizer is restored too (see `engine`).

    SkyRL's request has no such field, and its engine always restores the optimizer.
    """
    from pydantic import Field
    from skyrl.tinker import types

    class LoadWeightsInput(types.LoadWeightsInput):  # type: ignore[misc]
        optimizer: bool = Field(default_factory=_restore_optimizer.get)

    types.LoadWeightsInput = LoadWeightsInput


@contextmanager
def restoring_optimizer(restore: bool) -> Iterator[None]:
    """Load requests that are stored inside this block carry ``restore``."""
    token = _restore_optimizer.set(restore)
    try:
        yield
    finally:
        _restore_optimizer.reset(token)


def forget_unfinished(database_url: str) -> None:
    """Drop what an earlier server left undone in this state folder. Call before the engine starts.

    Its clients are gone or have seen it die; the engine would otherwise work it all off first,
    and models that nobody uses would take up slots.
    """
    from skyrl.tinker.db_models import CheckpointDB, CheckpointStatus, FutureDB
    from sqlmodel import Session, SQLModel, create_engine, delete, update

    engine = create_engine(database_url)
    try:
        SQLModel.metadata.create_all(engine)
        with Session(engine) as session:
            session.execute(delete(FutureDB))
            session.execute(
                update(CheckpointDB)
                .where(CheckpointDB.status == CheckpointStatus.PENDING)  # type: ignore[arg-type]
                .values(status=CheckpointStatus.FAILED, error_message="the server was stopped")
            )
            session.commit()
    finally:
        engine.dispose()


async def sampler_model_path(database: Any, sampler_id: str) -> str | None:
    """Path of the weights of a sampling session: "" for the base model, None if unknown."""
    from skyrl.tinker.db_models import SamplingSessionDB
    from sqlmodel.ext.asyncio.session import AsyncSession

    async with AsyncSession(database) as session:
        found = await session.get(SamplingSessionDB, sampler_id)
        return None if found is None else (found.model_path or "")


async def expire_session(database: Any, session_id: str) -> None:
    """Make a session look long abandoned, so that the engine unloads its models."""
    from skyrl.tinker.db_models import SessionDB
    from sqlmodel.ext.asyncio.session import AsyncSession

    async with AsyncSession(database) as session:
        found = await session.get(SessionDB, session_id)
        if found is not None:
            found.last_heartbeat_at = datetime(2000, 1, 1, tzinfo=UTC)
            session.add(found)
            await session.commit()


async def delete_checkpoint(
    database: Any, folder: Path, model_id: str, name: str, sampler: bool
) -> bool:
    """Delete a checkpoint's record and files; False if there is no such checkpoint."""
    from skyrl.tinker.db_models import CheckpointDB
    from skyrl.tinker.types import CheckpointType
    from sqlmodel.ext.asyncio.session import AsyncSession

    kind = CheckpointType.SAMPLER if sampler else CheckpointType.TRAINING
    async with AsyncSession(database) as session:
        found = await session.get(CheckpointDB, (model_id, name, kind))
        if found is None:
            return False
        await session.delete(found)
        await session.commit()
    file = folder / model_id / ("sampler_weights" if sampler else "") / f"{name}.tar.gz"
    if file.is_dir():  # training checkpoints are folders, whatever their name says
        shutil.rmtree(file, ignore_errors=True)
    else:
        file.unlink(missing_ok=True)
    return True
