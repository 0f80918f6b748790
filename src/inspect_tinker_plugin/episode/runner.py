"""Episodes of a task: started, answered turn by turn, and closed without leaving anything."""

from __future__ import annotations

import asyncio
import weakref
from collections.abc import Callable, Mapping, Sequence
from functools import cached_property
from logging import getLogger
from typing import Any

import anyio
from inspect_ai.dataset import Sample
from inspect_ai.event import Event
from inspect_ai.log import EvalRevision, EvalSample
from inspect_ai.util import SandboxEnvironment

from inspect_tinker_plugin import inspect_internals as internals
from inspect_tinker_plugin.contracts.episodes import (
    EpisodeResult,
    EpisodeState,
    Outcome,
    Reply,
)
from inspect_tinker_plugin.contracts.errors import EpisodeClosedError
from inspect_tinker_plugin.episode.mailbox import Mailbox
from inspect_tinker_plugin.episode.sample_run import SampleRun
from inspect_tinker_plugin.episode.sandbox import surroundings
from inspect_tinker_plugin.episode.task import PreparedTask
from inspect_tinker_plugin.processes.loops import NOT_BY_THE_EPISODE, run_in, wait_for_end

logger = getLogger(__name__)

CLOSE_GRACE = 120.0
"""Seconds beyond ``stop_timeout`` that ``close()`` waits for a release before it returns anyway."""

HAD_NOT_ENDED = "later it had not ended"
"""Part of the error message of an episode that was given up."""

CANCELLED_ITSELF = f"it {NOT_BY_THE_EPISODE}"
"""Part of the error message of an episode that something inside it has cancelled."""

# asyncio itself holds tasks only weakly; a parked episode must not be collected before
# it has released its sandbox.
_running: set[asyncio.Task[None]] = set()


class EpisodeRunner(PreparedTask):
    """Makes episodes of one task; what they share is resolved once."""

    @cached_property
    def source(self) -> tuple[EvalRevision | None, dict[str, str]]:
        """The git revision of the task's code, and the version of the package that it is in."""
        with surroundings:
            return internals.source_in_logs(self.task)

    def episode(self, sample: Sample, *, epoch: int = 1) -> Episode:
        """Make an episode of a sample, which must have an id; nothing is started yet."""
        return Episode(self, sample, epoch=epoch)


class Episode:
    """One episode of one sample, from ``NEW`` to ``SCORED`` or ``CLOSED``.

    ``start()`` runs the task's own solver up to its first model call; ``reply()`` answers the call
    and runs on to the next, or to the scored end. Failures are in the result's ``error``.
    ``close()`` ends it at any point. The table in ``docs/design/episodes.md`` says what each call
    does in each state; one that was closed raises :class:`EpisodeClosedError`, before or during a
    call.

    One task drives it. ``halt()`` and ``shut()`` only request the end, immediately and as often as
    you like; the task carries it out, and releases everything before it ends. Every call but
    ``start()`` may come from another thread, with or without an event loop of its own.

    Attributes:
        state: Where the episode is.
        heard: Whether somebody still waited for the last reply.
        task: The task that drives the episode, once it has started.
    """

    def __init__(self, prepared: PreparedTask, sample: Sample, *, epoch: int) -> None:
        self.state = EpisodeState.NEW
        self.heard = True
        self.prepared = prepared
        self.sample = sample
        self.epoch = epoch
        self._mailbox = Mailbox()
        self._run: SampleRun | None = None
        self.task: asyncio.Task[None] | None = None
        self._scope: anyio.CancelScope | None = None
        self._deadline: asyncio.TimerHandle | None = None
        self._at_end: list[Callable[[], object]] = []

    @property
    def released(self) -> bool:
        """Whether it has begun, and nothing of it runs any more."""
        return self.task is not None and self.task.done()

    @property
    def sandboxes(self) -> Mapping[str, SandboxEnvironment]:
        """The episode's sandboxes by name, once they have started."""
        return {} if self._run is None else self._run.sandboxes

    @property
    def events(self) -> Sequence[Event]:
        """The events recorded so far; without a log, model calls hold the conversation itself."""
        return () if self._run is None else self._run.events

    # calls of the environment

    async def start(self) -> Outcome:
        """Run to the first model call, or to the end when the solver makes no call.

        Raises:
            RuntimeError: It was started before; the running episode is not affected.
        """
        self.require_new()
        run = self._make_run()
        self.state = EpisodeState.STARTING
        task = asyncio.get_running_loop().create_task(
            self._drive(run),
            name=f"episode {self.prepared.name}/{self.sample.id}",
            context=run.context,
        )
        self.task = task
        _running.add(task)
        task.add_done_callback(self._clean_up)
        return await self._mailbox.next()

    def require_new(self) -> None:
        """Raise what ``start()`` would raise: the episode was started or closed before."""
        if self.state is EpisodeState.CLOSED:
            raise self._closed_error()
        if self.state is not EpisodeState.NEW:
            raise RuntimeError(f"an episode is started once, and this one is {self.state}")

    async def reply(self, reply: Reply) -> Outcome:
        """Answer the parked model call; given an exception, raise it inside the solver.

        Returns:
            The next model call, or the result. When the episode has ended in the meantime (a time
            limit, say), the answer is dropped and the result returned.

        Raises:
            RuntimeError: No call waits for an answer yet; nothing changes.
        """
        if self.state is EpisodeState.NEW or self.state is EpisodeState.STARTING:
            raise RuntimeError(f"no model call waits for a reply: the episode is {self.state}")
        self._require_loop()
        self.heard = self._mailbox.answer(reply)
        return await self._mailbox.next()

    def halt(self, reason: str) -> None:
        """End set-up or the solver as a limit would, and score the state reached so far.

        The rest of the episode then has ``stop_timeout`` seconds.
        """
        self._do(self._halt, reason)

    def _halt(self, reason: str) -> None:
        state = self.state
        if state is EpisodeState.NEW:
            self._finish(self._make_run().give_up(f"{reason}: it had not started"))
            self._leave()
        if not state.before(EpisodeState.SCORED) or self.task is None:
            return
        if self._deadline is None:
            self._deadline = self._in_patience(self._give_up, reason)
        if state.before(EpisodeState.STOPPING):
            assert self._run is not None
            self._run.stop(reason)
            self.state = EpisodeState.STOPPING
            self._abandon_calls()

    async def stop(self, reason: str) -> EpisodeResult:
        """End the episode as ``halt()`` does, and wait for the result.

        Args:
            reason: What the log says, e.g. ``"rollout timeout"``.

        Returns:
            The result, with a limit of type ``custom``; with an error when no solver had begun, or
            when it did not end in time.
        """
        self._require_loop()
        self.halt(reason)
        return await self._mailbox.end()

    def shut(self) -> None:
        """End the episode without a result; its own task releases everything."""
        self._do(self._shut)

    def _shut(self) -> None:
        if not self.state.before(EpisodeState.SCORED):
            return
        self.state = EpisodeState.CLOSED
        self._mailbox.finish(self._closed_error())
        if self.task is None:
            self._leave()
            return
        if self._scope is not None and not self.task.get_loop().is_closed():
            self._scope.cancel()
        self._abandon_calls()
        if self._deadline is not None:
            self._deadline.cancel()
        assert self._run is not None
        self._deadline = self._in_patience(self._run.cut_off)

    def _in_patience(
        self, work: Callable[..., None], *arguments: Any
    ) -> asyncio.TimerHandle | None:
        """Do something in ``stop_timeout`` seconds, unless the episode has ended by then."""
        assert self.task is not None
        loop, patience = self.task.get_loop(), self.prepared.options.stop_timeout
        return None if loop.is_closed() else loop.call_later(patience, work, *arguments)

    def _abandon_calls(self) -> None:
        """Cancel the model calls that the cancellation of the solver does not reach."""
        assert self.task is not None
        loop = self.task.get_loop()
        if loop.is_closed():
            self._mailbox.abandon()
        else:
            loop.call_soon(self._mailbox.abandon)  # behind that cancellation

    def _do(self, work: Callable[..., None], *arguments: Any) -> None:
        """Do something where the episode runs."""
        if self.task is None or not run_in(self.task.get_loop(), work, *arguments):
            work(*arguments)

    def _require_loop(self) -> None:
        """Raise when the episode waits in an event loop that has stopped: nothing would come."""
        if self.task is None or self.task.done():
            return
        loop = self.task.get_loop()
        if not loop.is_running() and self.state.before(EpisodeState.SCORED):
            self._mailbox.abandon()
            raise EpisodeClosedError(f"{self._name}: the event loop that it ran in has ended")

    async def close(self) -> None:
        """End it as ``shut()`` does, and wait until everything is released.

        A cancellation of the caller does not stop the release; it continues in its own task.
        """
        self.shut()
        task, patience = self.task, self.prepared.options.stop_timeout + CLOSE_GRACE
        if task is None or task.done():
            return
        if not await wait_for_end(task, patience) and task.get_loop().is_running():
            logger.error(
                "%s: it was closed %.0f s ago and still runs; something in it "
                "cannot be cancelled. It is left running",
                self._name,
                patience,
            )

    def at_end(self, callback: Callable[[], object]) -> None:
        """Call back when nothing of the episode runs any more (immediately if nothing will)."""
        task = self.task
        if self.state is EpisodeState.NEW or (task is not None and not task.done()):
            self._at_end.append(callback)
        else:
            callback()

    def end_with(self, owner: object) -> None:
        """Shut the episode when its owner is collected, to which nothing that runs refers."""
        dropped = weakref.finalize(owner, _drop, self)
        dropped.atexit = False
        self.at_end(dropped.detach)

    def build_log(self) -> EvalSample | None:
        """Build the log of what has run so far; ``None`` when nothing has run or no log is kept."""
        if self._run is None or not self._run.has_log:
            return None
        return self._run.context.copy().run(self._run.build_log)

    # the task that drives it

    async def _drive(self, run: SampleRun) -> None:
        with anyio.CancelScope() as scope:
            self._scope = scope
            if self.state is not EpisodeState.CLOSED:
                self._finish(await run.run())

    def _enter(self, state: EpisodeState) -> None:
        if self.state.before(state):
            self.state = state

    def _finish(self, result: EpisodeResult) -> None:
        if self.state.before(EpisodeState.SCORED):
            self.state = EpisodeState.SCORED
            self._mailbox.finish(result)

    def _give_up(self, reason: str) -> None:
        """Stop waiting for scorers and clean-up; the task continues and releases everything."""
        if self._run is None or not self.state.before(EpisodeState.SCORED):
            return
        patience = self.prepared.options.stop_timeout
        self._finish(self._run.give_up(f"{reason}, and {patience:g} s {HAD_NOT_ENDED}"))
        if self._scope is not None:
            self._scope.cancel()
        self._abandon_calls()
        self._run.cut_off()

    def _clean_up(self, task: asyncio.Task[None]) -> None:
        """Clean up after the driving task, however it ended, and wake everybody who waits."""
        _running.discard(task)
        fault = None if task.cancelled() else task.exception()
        if self.state.before(EpisodeState.SCORED) and task.cancelled() and self._run is not None:
            # Nobody closed it: something inside cancelled the task that drives it.
            self._finish(self._run.give_up(CANCELLED_ITSELF))
        if self.state.before(EpisodeState.SCORED):
            self.state = EpisodeState.CLOSED
            self._mailbox.finish(fault or self._closed_error())
        elif fault is not None and not isinstance(fault, KeyboardInterrupt | SystemExit):
            # Those two are of a process that is told to end; asyncio hands them on.
            logger.error("%s: it failed while it was closed", self._name, exc_info=fault)
        self._mailbox.abandon()  # nothing has answered threads that outlive the loop
        self._leave()

    def _leave(self) -> None:
        if self._deadline is not None:
            self._deadline.cancel()
        callbacks, self._at_end = self._at_end, []
        for callback in callbacks:
            callback()

    def _make_run(self) -> SampleRun:
        self._run = SampleRun(
            self.prepared,
            self.sample,
            epoch=self.epoch,
            mailbox=self._mailbox,
            entering=self._enter,
        )
        return self._run

    @property
    def _name(self) -> str:
        """Task, sample and epoch, for messages."""
        return f"task {self.prepared.name!r}, sample {self.sample.id!r}, epoch {self.epoch}"

    def _closed_error(self) -> EpisodeClosedError:
        return EpisodeClosedError(f"{self._name}: the episode was closed before it ended")


def _drop(episode: Episode) -> None:
    """Shut an episode whose owner was collected, perhaps in another thread."""
    task = episode.task
    if task is None or task.done():
        return
    loop: asyncio.AbstractEventLoop = task.get_loop()
    if not loop.is_closed():
        loop.call_soon_threadsafe(episode.shut)
