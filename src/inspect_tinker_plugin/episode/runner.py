"""Episodes of a task: started, answered turn by turn, and closed without leaving anything."""

from __future__ import annotations

import asyncio
import weakref
from collections.abc import Callable, Mapping, Sequence
from typing import Literal

from inspect_ai import Task
from inspect_ai.dataset import Sample
from inspect_ai.event import Event
from inspect_ai.log import EvalSample
from inspect_ai.util import SandboxEnvironment, SandboxEnvironmentType

from inspect_tinker_plugin.contracts.episodes import (
    EpisodeResult,
    EpisodeState,
    Outcome,
    Reply,
    SolverLike,
)
from inspect_tinker_plugin.episode.machine import EpisodeMachine
from inspect_tinker_plugin.episode.task import PreparedTask, SandboxMapping
from inspect_tinker_plugin.options import EpisodeOptions


class EpisodeRunner:
    """Makes episodes of one task; what they share is resolved once.

    Args:
        task: The task.
        options: How episodes are run.
        solver: Replaces the task's solver, as ``inspect eval --solver`` does.
        sandbox: Replaces the task's sandbox, as ``inspect eval --sandbox`` does.
            ``False`` runs without any, whatever task and samples ask for.
        sandbox_mapping: Applied to the sandbox that the task or a sample asks for.
        keep_log: Keep each episode's events, for ``EpisodeResult.build_log``.
        first_calls: Only first model calls are wanted; the libraries of providers are not loaded.
    """

    def __init__(
        self,
        task: Task,
        *,
        options: EpisodeOptions | None = None,
        solver: SolverLike | None = None,
        sandbox: SandboxEnvironmentType | Literal[False] | None = None,
        sandbox_mapping: SandboxMapping | None = None,
        keep_log: bool = False,
        first_calls: bool = False,
    ) -> None:
        self.prepared = PreparedTask(
            task,
            options=options or EpisodeOptions(),
            solver=solver,
            sandbox=sandbox,
            sandbox_mapping=sandbox_mapping,
            first_calls=first_calls,
        )
        self._keep_log = keep_log

    def episode(self, sample: Sample, *, epoch: int = 1) -> Episode:
        """Make an episode of a sample, which must have an id; nothing is started yet."""
        return Episode(self.prepared, sample, epoch=epoch, keep_log=self._keep_log)


class Episode:
    """One episode of one sample, as its owner holds it.

    ``start()`` runs the task's own solver up to its first model call; ``reply()`` answers
    the call and runs on to the next, or to the scored end. Failures are in the result's
    ``error``. ``close()`` ends it at any point; an episode without references is closed, too.
    The table in ``docs/design/episodes.md`` says what each call does in each state; one that was
    closed raises :class:`EpisodeClosedError`, before or during a call.
    """

    def __init__(
        self, prepared: PreparedTask, sample: Sample, *, epoch: int, keep_log: bool
    ) -> None:
        # What runs refers to the machine, never to this handle: so a dropped handle is noticed.
        self._machine = EpisodeMachine(prepared, sample, epoch=epoch, keep_log=keep_log)
        self.prepared = prepared
        self.sample = sample
        self.epoch = epoch

    @property
    def state(self) -> EpisodeState:
        """The episode's state."""
        return self._machine.state

    @property
    def started(self) -> bool:
        """Whether anything of the episode has run."""
        return self._machine.task is not None

    @property
    def released(self) -> bool:
        """Whether it has begun, and nothing of it runs any more."""
        task = self._machine.task
        return task is not None and task.done()

    @property
    def heard(self) -> bool:
        """Whether somebody still waited for the last reply."""
        return self._machine.heard

    @property
    def sandboxes(self) -> Mapping[str, SandboxEnvironment]:
        """The episode's sandboxes by name, once they have started."""
        return {} if self._machine.run is None else self._machine.run.sandboxes

    @property
    def events(self) -> Sequence[Event]:
        """The events recorded so far; without a log, model calls hold the conversation itself."""
        return () if self._machine.run is None else self._machine.run.events

    def require_new(self) -> None:
        """Raise what ``start()`` would raise."""
        self._machine.require_new()

    async def start(self) -> Outcome:
        """Run to the first model call, or to the end when the solver makes no call.

        Raises:
            RuntimeError: It was started before; the running episode is not affected.
        """
        if self._machine.state is EpisodeState.NEW:
            dropped = weakref.finalize(self, _drop, self._machine)
            dropped.atexit = False
            self._machine.at_end(dropped.detach)
        return await self._machine.start()

    async def reply(self, reply: Reply) -> Outcome:
        """Answer the parked model call; given an exception, raise it inside the solver.

        Returns:
            The next model call, or the result. When the episode has ended in the
            meantime (a time limit, say), the answer is dropped and the result returned.

        Raises:
            RuntimeError: No call waits for an answer yet; nothing changes.
        """
        return await self._machine.reply(reply)

    def halt(self, reason: str) -> None:
        """End the episode as ``stop()`` does, without waiting for the result."""
        self._machine.halt(reason)

    async def stop(self, reason: str) -> EpisodeResult:
        """End the episode now, as a limit would, and score the state reached so far.

        Whatever runs is cancelled (a tool, a parked model call). Use it for budgets that
        only the trainer knows. Scorers and clean-up have ``EpisodeOptions.stop_timeout``.

        Args:
            reason: What the log says, e.g. ``"rollout timeout"``.

        Returns:
            The result, with a limit of type ``custom``; with an error when no solver had
            begun, or when it did not end in time.
        """
        return await self._machine.stop(reason)

    def shut(self) -> None:
        """End the episode as ``close()`` does, without waiting for the release."""
        self._machine.shut()

    async def close(self) -> None:
        """Cancel what still runs and wait until it has released everything.

        A cancellation of the caller does not stop the release; it continues in its own task.
        """
        await self._machine.close()

    def at_end(self, callback: Callable[[], None]) -> None:
        """Call back once nothing of the episode runs any more and everything is released."""
        self._machine.at_end(callback)

    def build_log(self) -> EvalSample | None:
        """Build the log of an episode that no longer runs, however it ended.

        Returns:
            The log up to that point; ``None`` when it was never started or keeps no log.
        """
        return self._machine.build_log()


def _drop(machine: EpisodeMachine) -> None:
    """Close an episode that has lost its last reference, perhaps in another thread."""
    task = machine.task
    if task is None or task.done():
        return
    loop: asyncio.AbstractEventLoop = task.get_loop()
    if not loop.is_closed():
        loop.call_soon_threadsafe(machine.shut)
