"""The faults of a campaign: drawn from a seed, reproducibly, and carried out in their episodes."""

from __future__ import annotations

import asyncio
import random
from dataclasses import dataclass, field
from enum import StrEnum
from typing import Any

from inspect_ai.log._samples import sample_active  # private: the sample that runs here


class Point(StrEnum):
    """Where an episode can be struck: one await of each part."""

    SOLVER_BEFORE = "solver, before the policy is asked"
    SOLVER_AFTER = "solver, after it has answered"
    TOOL = "tool"
    SCORER = "scorer"
    JUDGE = "judge"
    SANDBOX_START = "sandbox, start"
    SANDBOX_WRITE = "sandbox, files"
    SANDBOX_EXEC = "sandbox, command"
    SANDBOX_RELEASE = "sandbox, release"
    OBSERVER_START = "observer, start"
    OBSERVER_TURN = "observer, turn"
    OBSERVER_END = "observer, end"
    REWARD = "reward"


class Kind(StrEnum):
    """How an episode is struck."""

    RAISE = "raise"
    """A `RuntimeError`."""
    HANG = "hang"
    """It never ends by itself."""
    CANCEL = "cancel"
    """A `CancelledError` that nobody asked for."""
    TIMEOUT = "time-out"
    """A `TimeoutError`."""
    KILL = "kill"
    """The whole group is cancelled, perhaps twice."""


ALWAYS = (
    Point.SOLVER_BEFORE,
    Point.SOLVER_AFTER,
    Point.SCORER,
    Point.JUDGE,
    Point.OBSERVER_START,
    Point.OBSERVER_TURN,
    Point.OBSERVER_END,
    Point.REWARD,
)
"""Points of every episode; the others are those of an agent with a tool and a sandbox."""

CAUSES: dict[Point, frozenset[str]] = {
    Point.SOLVER_BEFORE: frozenset({"solver"}),
    Point.SOLVER_AFTER: frozenset({"solver"}),
    Point.TOOL: frozenset({"tool", "solver"}),
    Point.SCORER: frozenset({"scorer"}),
    Point.JUDGE: frozenset({"judge", "scorer"}),
    Point.SANDBOX_START: frozenset({"sandbox"}),
    Point.SANDBOX_WRITE: frozenset({"sandbox"}),
    Point.SANDBOX_EXEC: frozenset({"sandbox", "inside_sandbox", "solver"}),
    Point.SANDBOX_RELEASE: frozenset({"sandbox"}),
    Point.OBSERVER_START: frozenset(),
    Point.OBSERVER_TURN: frozenset(),
    Point.OBSERVER_END: frozenset(),
    Point.REWARD: frozenset({"reward"}),
}
"""Causes that a fault may be attributed to; if it uses up the time, also that of no score."""

STRATEGIES = ("FailFast", "RetryOnFailure", "MinViableGroup")


@dataclass(frozen=True)
class Fault:
    """One fault in one episode."""

    point: Point
    kind: Kind

    def __str__(self) -> str:
        return f"{self.kind} at {self.point}"


@dataclass(frozen=True)
class Case:
    """One group of episodes with the fault of each."""

    number: int
    """Its place in the campaign, from 0; its sample's id."""

    agent: bool
    """An agent with a tool in a sandbox (two turns), or one question (one turn)."""

    strategy: str
    """The cookbook's rollout strategy."""

    priced: bool
    """Failures end with a penalty; otherwise they raise."""

    runner_times: bool
    """The cookbook's runner bounds a rollout in time; otherwise the strategy does."""

    faults: tuple[Fault, ...]
    """The fault of each member; members that a strategy adds have none."""


def draw(seed: int, number: int, group_size: int) -> Case:
    """Draw a case; it depends on nothing but the arguments."""
    chance = random.Random(f"{seed}/{number}")
    agent = chance.random() < 0.5
    strategy = chance.choice(STRATEGIES)
    points = tuple(Point) if agent else ALWAYS
    return Case(
        number=number,
        agent=agent,
        strategy=strategy,
        priced=chance.random() < 0.5,
        # FailFast has no time-out of its own
        runner_times=strategy == "FailFast" or chance.random() < 0.5,
        faults=tuple(_fault(chance, points) for _ in range(group_size)),
    )


def _fault(chance: random.Random, points: tuple[Point, ...]) -> Fault:
    point = chance.choice(points)
    # a kill ends the other members, too
    [kind] = chance.choices(tuple(Kind), weights=[5, 2, 5, 5, 1])
    if point is Point.SANDBOX_RELEASE and kind is Kind.HANG:
        kind = Kind.RAISE  # what is never released is never released
    return Fault(point, kind)


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
    if (active := sample_active()) is not None:
        await strike(point, active.sample.id, active.epoch)
