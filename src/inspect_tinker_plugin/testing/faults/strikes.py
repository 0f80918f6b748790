"""Strikes the episode that has a fault, when it comes to its point."""

from __future__ import annotations

import asyncio
from dataclasses import dataclass, field
from typing import Any

from inspect_tinker_plugin.inspect_internals import running_sample_id
from inspect_tinker_plugin.testing.faults.plan import Case, Fault, Kind, Point


class Struck(RuntimeError):
    """The exception that a fault raises."""


@dataclass
class Running:
    """A case while it runs: its faults, and the task that a kill cancels."""

    case: Case
    group: asyncio.Task[Any] | None = None
    struck: set[int] = field(default_factory=set)
    """Epochs whose fault has come."""
    late: bool = False
    """Whether an episode had not ended in time after it was stopped."""

    def fault(self, epoch: int) -> Fault | None:
        """Return the fault of a member; members that a retry adds have none."""
        faults = self.case.faults
        return faults[epoch - 1] if epoch <= len(faults) else None


running_cases: dict[int, Running] = {}


async def strike(point: Point, sample_id: int | str | None, epoch: int) -> None:
    """Carry out the fault of an episode, once, when it has reached the fault's point."""
    running = running_cases.get(int(sample_id or 0))
    fault = None if running is None else running.fault(epoch)
    if running is None or fault is None or fault.point is not point or epoch in running.struck:
        await asyncio.sleep(0)
        return
    running.struck.add(epoch)
    await _strike(fault, running)


async def _strike(fault: Fault, running: Running) -> None:
    match fault.kind:
        case Kind.RAISE:
            raise Struck(str(fault))
        case Kind.HANG:
            await asyncio.Event().wait()
        case Kind.CANCEL:
            raise asyncio.CancelledError
        case Kind.TIMEOUT:
            raise TimeoutError(str(fault))
        case Kind.KILL:
            assert running.group is not None
            running.group.cancel()
            await asyncio.sleep(0)
            if running.case.number % 2:
                running.group.cancel()
            await asyncio.sleep(0)


async def strike_here(point: Point) -> None:
    """Strike the episode that runs in this context."""
    sample_id, epoch = running_sample_id()
    await strike(point, sample_id, epoch)
