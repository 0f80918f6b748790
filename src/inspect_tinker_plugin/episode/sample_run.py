"""One sample run as ``eval()`` would run it: sandbox, solver under limits, scorers, clean-up.

The order of steps, what each limit leads to, and what is scored after which failure follow
``task_run_sample`` of Inspect (``inspect_ai/_eval/task/run.py``). Left out is what belongs
to an eval rather than a sample: display, retries, log files, early stopping, hooks.

Its ``stages`` are set-up (context, input, sandboxes), solving and scoring; they work on
one ``record``.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Mapping, Sequence
from contextlib import nullcontext
from contextvars import copy_context
from datetime import UTC, datetime
from logging import getLogger

import anyio
from inspect_ai.dataset import Sample
from inspect_ai.event import Event
from inspect_ai.log import EvalSample
from inspect_ai.util import SandboxEnvironment

from inspect_tinker_plugin import inspect_internals as internals
from inspect_tinker_plugin.contracts.episodes import EpisodeResult, EpisodeState
from inspect_tinker_plugin.contracts.errors import Cause
from inspect_tinker_plugin.episode.boundaries import Stamp
from inspect_tinker_plugin.episode.mailbox import Mailbox
from inspect_tinker_plugin.episode.model import policy_model
from inspect_tinker_plugin.episode.record import SampleRecord
from inspect_tinker_plugin.episode.stages import (
    EpisodeTranscript,
    Preparing,
    Scoring,
    Solving,
    new_state,
)
from inspect_tinker_plugin.episode.task import PreparedTask
from inspect_tinker_plugin.processes.cancellation import being_cancelled, bounded, contained, stray

logger = getLogger(__name__)


class StoppedError(RuntimeError):
    """The trainer ended an episode before there was anything to score."""


def _nobody(state: EpisodeState) -> None:
    """Stand for an owner that is told of no more states."""


class SampleRun:
    """The run of one sample; ``run()`` is called once, in its own task.

    Args:
        prepared: The task.
        sample: The sample, with an id.
        epoch: Epoch of the sample, from 1.
        mailbox: Where model calls wait for the policy.
        keep_log: Keep events for a log.
        entering: Called with every state that the run enters.
    """

    def __init__(
        self,
        prepared: PreparedTask,
        sample: Sample,
        *,
        epoch: int,
        mailbox: Mailbox,
        keep_log: bool,
        entering: Callable[[EpisodeState], None],
    ) -> None:
        self._mailbox = mailbox
        self._entering = entering
        self._model, self._policy = policy_model(
            mailbox,
            max_turns=prepared.options.max_turns,
            merged=prepared.merged_configs,
            keep_events=keep_log or prepared.reads_events,
            side_models=prepared.side_models,
        )
        self._policy.count_text = prepared.count_tokens
        self._record = SampleRecord(
            task=prepared,
            sample=sample,
            epoch=epoch,
            state=new_state(prepared, sample, epoch=epoch),
            policy=self._policy,
            keep_log=keep_log,
        )
        self._spans = EpisodeTranscript(keep=keep_log)
        self._scoring = Scoring(self._spans)
        self._setup = Preparing(self._record, self._model)
        self._setting_up: anyio.CancelScope | None = None
        self._solving: Solving | None = None
        self._stopped: str | None = None
        self._phase: Cause | None = None
        self._cancelled_in: Cause | None = None
        self._begun = False
        self._started_at = datetime.now(UTC)
        self.context = copy_context()

    async def run(self) -> EpisodeResult:
        """Run the sample to its end.

        Returns:
            The result. Whatever fails is in its ``error``; only cancellation is raised,
            after everything has been released.
        """
        record = self._record
        active, generate = self._setup.enter_context()
        self._begun = True
        try:
            async with self._setup:
                if await self._set_up(active):
                    try:
                        self._solving = Solving(record, active, generate, self._spans)
                        self._phase = Cause.SOLVER
                        self._entering(EpisodeState.RUNNING)
                        try:
                            await self._solving.run()
                        finally:
                            self._mailbox.close()
                            self._entering(EpisodeState.STOPPING)
                        await self._score()
                    except asyncio.CancelledError:
                        self._cancelled_in = self._phase
                        raise
                    finally:
                        await self._clean_up()
                    self._phase = Cause.SANDBOX
        except asyncio.CancelledError as error:
            if being_cancelled():
                raise
            record.fail(stray("a part of it", error), self._phase or self._setup.phase)
        except Exception as error:
            record.fail(error, self._phase or self._setup.phase)
        finally:
            active.checkpointer.close()
            active.complete()
            record.boundaries.forget()
            self._entering = _nobody  # it is the owner's, which holds this run
        return self.result()

    def stop(self, reason: str) -> None:
        """End set-up, or the solver as a limit would; does nothing once the solver has ended."""
        self._stopped = reason
        if self._solving is not None:
            self._solving.stop(reason)
        elif self._setting_up is not None:
            self._setting_up.cancel()

    def cut_off(self) -> None:
        """Cancel what still waits for a sandbox, in a shield, too."""
        self._record.sandboxes.operations.cut_off()

    def give_up(self, message: str) -> EpisodeResult:
        """Return the result of a run that never began or does not end: what there is, and an error.

        The error is attributed to the part that runs now; if none does, nothing can be scored.
        """
        record = self._record
        cause = Cause.UNSCORED
        if self._begun:
            cause = self._cancelled_in or self._phase or self._setup.phase
            if cause in (Cause.SOLVER, Cause.SCORER) and record.sandboxes.operations.awaited:
                cause = record.cause_inside(cause)
        record.error = record.error or record.wrap(StoppedError(message), Stamp(cause))
        return self.result()

    def result(self) -> EpisodeResult:
        """Return the result so far."""
        record, context = self._record, self.context.copy()
        recorder = self._setup.recorder
        return EpisodeResult(
            task=record.task.name,
            sample=record.sample,
            epoch=record.epoch,
            state=record.state,
            scores=self._scoring.scores,
            limit=record.limit,
            error=record.error,
            turns=self._policy.answered,
            usage=self._policy.usage,
            truncated=self._policy.truncated,
            expected_scores={named.name: named.keys for named in record.task.scorers},
            metrics=record.metrics
            | self._model.metrics
            | dict(recorder.snapshot() if recorder else {}),
            build_log=(lambda: context.run(self.build_log)) if self.has_log else None,
        )

    @property
    def sandboxes(self) -> Mapping[str, SandboxEnvironment]:
        """The sandboxes, once they have started."""
        return self._record.sandboxes.environments

    @property
    def events(self) -> Sequence[Event]:
        """The events recorded so far."""
        return internals.recorded_events(self._setup.transcript)

    @property
    def has_log(self) -> bool:
        """Whether there is a log to build."""
        return self._begun and self._record.keep_log

    def build_log(self) -> EvalSample:
        """Build the log so far, in the context of the run."""
        record = self._record
        cause = record.error.__cause__ if record.error is not None else None
        return internals.create_eval_sample(
            start_time=None if self._solving is None else self._solving.started,
            sample=record.sample,
            state=record.state,
            scores=self._scoring.scores,
            error=None if cause is None else internals.error_record(cause),
            limit=record.limit,
            error_retries=[],
            time_limit=record.task.limits.time,
            started_at=self._started_at,
        )

    async def _set_up(self, active: internals.ActiveSample) -> bool:
        """Set the sample up; ``False`` when that failed, or the episode was stopped meanwhile."""
        if self._stopped is None:
            with anyio.CancelScope() if self._setup.waits else nullcontext() as scope:
                self._setting_up = scope
                async with self._spans.span("init", "init"):
                    try:
                        await self._setup.materialize_input()
                        await self._setup.open_sandboxes(active)
                    except Exception as error:
                        self._record.fail(error, self._setup.phase)
            self._setting_up = None
        if self._record.error is not None:
            return False
        if self._stopped is None:
            return True
        stopped = StoppedError(
            f"{self._stopped}: it was still {self._setup.doing}, and no solver had begun"
        )
        self._record.fail(stopped, self._setup.phase)
        return False

    async def _score(self) -> None:
        self._phase = Cause.SCORER
        await self._scoring.run(self._record)

    async def _clean_up(self) -> None:
        record = self._record
        self._phase = Cause.SOLVER
        cleanup = record.task.task.cleanup
        if cleanup is None:
            return
        patience = record.task.options.stop_timeout
        try:
            with anyio.CancelScope(shield=True):
                await bounded(contained("the task's cleanup", cleanup(record.state)), patience)
        except (Exception, asyncio.CancelledError) as error:
            if isinstance(error, asyncio.CancelledError) and being_cancelled():
                raise
            # As in an eval: a failing clean-up is reported and changes no score.
            logger.warning(
                "task %r, sample %r: the task's cleanup failed: %s",
                record.task.name,
                record.sample.id,
                str(error) or type(error).__name__,
                exc_info=error,
            )
