"""The solver of one sample, run under its limits; ends as in an eval."""

from __future__ import annotations

import time
from contextlib import ExitStack
from logging import getLogger

import anyio
from anyio.abc import TaskGroup
from inspect_ai.event import SampleLimitEvent
from inspect_ai.solver import Generate
from inspect_ai.util import LimitExceededError

from inspect_tinker_plugin import inspect_internals as internals
from inspect_tinker_plugin.episode.cancellation import NOT_BY_THE_EPISODE, contained
from inspect_tinker_plugin.episode.record import SampleRecord
from inspect_tinker_plugin.episode.scoring import EpisodeTranscript
from inspect_tinker_plugin.errors import Cause

logger = getLogger(__name__)


class Solving:
    """Runs the solver, and ends it on request.

    Attributes:
        started: When the solver began, by the monotonic clock; ``None`` before.
    """

    def __init__(
        self,
        record: SampleRecord,
        active: internals.ActiveSample,
        generate: Generate,
        spans: EpisodeTranscript,
    ) -> None:
        self.started: float | None = None
        self._record = record
        self._active = active
        self._generate = generate
        self._spans = spans
        self._stop: LimitExceededError | None = None

    def stop(self, reason: str) -> None:
        """End the solver as a limit would, now or as soon as it begins."""
        if self._stop is None:
            self._stop = LimitExceededError("custom", value=1, limit=1, message=reason)
            if self._active.tg is not None:
                self._active.limit_exceeded(self._stop)

    async def run(self) -> None:
        """Run the solver to its end; the record says how it ended."""
        record = self._record
        self.started = time.monotonic()
        internals.init_sample_working_time(self.started)
        try:
            await self._run_under_limits()
        except internals.SandboxTimeoutError as error:
            record.fail(error, Cause.SOLVER)
        except TimeoutError as error:
            # As in an eval: a stray TimeoutError ends the solver, and its state so far is scored.
            logger.warning(
                "task %r, sample %r: the solver ended with a TimeoutError that nothing "
                "handled (%s); its state so far is scored, as in an eval",
                record.task.name,
                record.sample.id,
                error,
            )
            record.catch_up()
        except LimitExceededError as error:
            record.end_by_limit(error.type, error.limit, error.message)
        except internals.TerminateSampleError as error:
            internals.record_event(SampleLimitEvent(type="operator", limit=1, message=error.reason))
            record.end_by_limit("operator", 1, error.reason)
        except Exception as error:
            record.fail(error, Cause.SOLVER)

    async def _run_under_limits(self) -> None:
        record = self._record
        cancelled: list[BaseException] = []
        with ExitStack() as stack:
            record.task.limits.enforce(record.state, stack)
            try:
                async with anyio.create_task_group() as group:
                    group.start_soon(self._solve, group, cancelled)
                if cancelled:
                    raise RuntimeError(
                        f"the solver {NOT_BY_THE_EPISODE} "
                        "(no limit, and the episode was not closed)"
                    ) from cancelled[0]
            except Exception as error:
                raise internals.inner_exception(error) from error.__cause__
            finally:
                latest = internals.sample_state() or record.state
                internals.record_sample_limit_data(len(latest.messages))

    async def _solve(self, group: TaskGroup, cancelled: list[BaseException]) -> None:
        record, active = self._record, self._active
        try:
            active.start(group)
            if self._stop is not None:
                active.limit_exceeded(self._stop)
            if record.task.limits.working is not None:
                internals.monitor_working_limit()
            async with self._spans.span("solvers"):
                plan = record.task.plan(record.state, self._generate)
                record.state = await contained("the solver", plan)
        except anyio.get_cancelled_exc_class() as error:
            exceeded = active.limit_exceeded_error
            if exceeded is None:
                cancelled.append(error)
                raise
            self._end_by_limit(exceeded)
        finally:
            # ends the working-limit monitor and everything that background() started
            group.cancel_scope.cancel()

    def _end_by_limit(self, error: LimitExceededError) -> None:
        if error.type == "working":
            internals.record_event(
                SampleLimitEvent(type=error.type, message=error.message, limit=error.limit)
            )
        self._record.end_by_limit(error.type, error.limit, error.message)
