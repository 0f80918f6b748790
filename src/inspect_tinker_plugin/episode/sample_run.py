"""One sample run as ``eval()`` would run it: sandbox, solver under limits, scorers, clean-up.

The order of things, what each limit ends in, and what is scored after which failure follow
``task_run_sample`` of Inspect (``inspect_ai/_eval/task/run.py``). Left out is what belongs
to an eval and not to a sample: display, retries, log files, early stopping, hooks.
"""

from __future__ import annotations

import asyncio
import time
from contextlib import AsyncExitStack, ExitStack
from contextvars import copy_context
from copy import deepcopy
from datetime import UTC, datetime
from logging import getLogger

import anyio
from anyio.abc import TaskGroup
from inspect_ai.dataset import Sample
from inspect_ai.event import ErrorEvent, SampleInitEvent, SampleLimitEvent
from inspect_ai.log import EvalSample, EvalSampleLimit
from inspect_ai.model import ModelName
from inspect_ai.scorer import Target
from inspect_ai.solver import TaskState
from inspect_ai.util import (
    LimitExceededError,
    time_limit,
    turn_limit,
    working_limit,
)

from inspect_tinker_plugin import inspect_internals as internals
from inspect_tinker_plugin.episode.attribution import attribute, episode_error
from inspect_tinker_plugin.episode.mailbox import Mailbox
from inspect_tinker_plugin.episode.model import policy_model
from inspect_tinker_plugin.episode.sandbox import NO_SANDBOXES, sample_sandboxes
from inspect_tinker_plugin.episode.scoring import EpisodeTranscript, Scoring
from inspect_tinker_plugin.episode.task import PreparedTask
from inspect_tinker_plugin.episode.types import EpisodeResult, Metrics
from inspect_tinker_plugin.errors import Cause, EpisodeError
from inspect_tinker_plugin.sandboxes.metrics import SandboxMetrics, record_sandbox_metrics

logger = getLogger(__name__)


class SampleRun:
    """The state of one running sample; ``run()`` is called once, in a task of its own."""

    def __init__(
        self,
        prepared: PreparedTask,
        sample: Sample,
        *,
        epoch: int,
        mailbox: Mailbox,
        keep_log: bool,
    ) -> None:
        self._task = prepared
        self._sample = sample
        self._epoch = epoch
        self._keep_log = keep_log
        self._model, self._policy = policy_model(
            mailbox, max_turns=prepared.options.max_turns, merged=prepared.merged_configs
        )
        self._state = self._new_state()
        self._sandboxes = NO_SANDBOXES
        self._spans = EpisodeTranscript(keep=keep_log)
        self._scoring = Scoring(self._spans)
        self._limit: EvalSampleLimit | None = None
        self._error: EpisodeError | None = None
        self._metrics: Metrics = {}
        self._recorder: SandboxMetrics | None = None
        self._active: internals.ActiveSample | None = None
        self._solved = False
        self._started: float | None = None
        self._started_at = datetime.now(UTC)

    async def run(self) -> EpisodeResult:
        """Run the sample to its end.

        Returns:
            The result. Whatever fails is in its ``error``; only cancellation is raised,
            after everything has been released.
        """
        active = self._active = self._enter_context()
        phase = Cause.SANDBOX
        try:
            await self._materialize_input()
            async with AsyncExitStack() as stack:
                await self._open_sandboxes(stack, active)
                phase = Cause.SOLVER
                try:
                    await self._solve(active)
                    self._solved = True
                    await self._score()
                finally:
                    await self._cleanup()
                phase = Cause.SANDBOX
        except Exception as error:
            self._fail(error, phase)
        finally:
            active.checkpointer.close()
            active.complete()
        return self._result()

    def stop(self, reason: str) -> bool:
        """End the solver as a limit would; ``False`` when it has not started yet."""
        if self._active is None or self._active.tg is None:
            return False
        if not self._solved:
            self._active.limit_exceeded(
                LimitExceededError("custom", value=1, limit=1, message=reason)
            )
        return True

    # set-up

    def _new_state(self) -> TaskState:
        sample, limits = self._sample, self._task.limits
        assert sample.id is not None
        return TaskState(
            model=ModelName(self._model),
            sample_id=sample.id,
            epoch=self._epoch,
            input=sample.input if isinstance(sample.input, str) else deepcopy(sample.input),
            messages=internals.sample_messages(sample),
            target=Target(sample.target),
            choices=sample.choices,
            message_limit=limits.message,
            token_limit=limits.token,
            token_limit_type=limits.token_type,
            cost_limit=limits.cost,
            completed=False,
            metadata=deepcopy(sample.metadata) if sample.metadata else {},
        )

    def _enter_context(self) -> internals.ActiveSample:
        """Bind this sample to the context variables that Inspect's parts read."""
        prepared = self._task
        prepared.enter_context(self._model)
        self._generate = prepared.generate_with(self._model)
        internals.set_task_generate(self._generate)
        internals.init_sample_model_data()
        internals.init_sample_assistant_internal()
        internals.reset_sample_limit_data()
        self._transcript = internals.Transcript(log_model_api=False)
        internals.init_transcript(self._transcript)
        self._bind_state()
        if prepared.scorers:
            internals.init_scoring_context(
                [named.scorer for named in prepared.scorers], Target(self._sample.target)
            )
        return internals.running_sample(
            task=prepared.name,
            model=str(self._model),
            sample=self._sample,
            state=self._state,
            transcript=self._transcript,
            time_limit=prepared.limits.time,
            working_limit=prepared.limits.working,
        )

    def _bind_state(self) -> None:
        internals.set_sample_state(self._state)
        internals.init_subtask_store(self._state.store)

    async def _materialize_input(self) -> None:
        """Read images and other media of the input, which a plain string cannot have."""
        if not isinstance(self._sample.input, str):
            plan = internals.capture_task_input_media([self._sample])
            self._sample = await internals.materialize_sample_input(self._sample, plan)
            self._state = self._new_state()
            self._bind_state()
        if self._keep_log:
            sample = self._sample.model_copy(
                update={"files": dict.fromkeys(self._sample.files, "")}
                if self._sample.files
                else None
            )
            internals.record_event(
                SampleInitEvent(sample=sample, state=internals.state_jsonable(self._state))
            )

    async def _open_sandboxes(self, stack: AsyncExitStack, active: internals.ActiveSample) -> None:
        spec = await self._task.sandbox_of(self._sample)
        if spec is None:
            return
        self._recorder = stack.enter_context(record_sandbox_metrics())
        self._sandboxes = await stack.enter_async_context(
            sample_sandboxes(
                self._task.name,
                self._task.run_dir,
                spec,
                self._sample,
                max_sandboxes=self._task.options.max_sandboxes,
                metrics=self._metrics,
            )
        )
        active.sandbox_environments = self._sandboxes.environments

    # the solver

    async def _solve(self, active: internals.ActiveSample) -> None:
        self._started = time.monotonic()
        internals.init_sample_working_time(self._started)
        try:
            await self._solve_under_limits(active)
        except internals.SandboxTimeoutError as error:
            self._fail(error, Cause.SOLVER)
        except TimeoutError as error:
            # As in an eval: a stray TimeoutError ends the solver, what is there is scored.
            logger.warning(
                "task %r, sample %r: the solver ended with a TimeoutError that nothing "
                "handled (%s); its state so far is scored, as in an eval",
                self._task.name,
                self._sample.id,
                error,
            )
            self._state = internals.sample_state() or self._state
        except LimitExceededError as error:
            self._end_by_limit(error.type, error.limit, error.message)
        except internals.TerminateSampleError as error:
            internals.record_event(SampleLimitEvent(type="operator", limit=1, message=error.reason))
            self._end_by_limit("operator", 1, error.reason)
        except Exception as error:
            self._fail(error, Cause.SOLVER)

    async def _solve_under_limits(self, active: internals.ActiveSample) -> None:
        limits = self._task.limits
        cancelled: list[BaseException] = []

        async def solve(group: TaskGroup) -> None:
            try:
                active.start(group)
                if limits.working is not None:
                    internals.monitor_working_limit()
                async with self._spans.span("solvers"):
                    self._state = await self._task.plan(self._state, self._generate)
            except anyio.get_cancelled_exc_class() as error:
                exceeded = active.limit_exceeded_error
                if exceeded is None:
                    cancelled.append(error)
                    raise
                self._end_by_working_limit(exceeded)
            finally:
                # ends the working-limit monitor and whatever background() started
                group.cancel_scope.cancel()

        with ExitStack() as stack:
            for limit in (
                *internals.state_limits(self._state),
                turn_limit(limits.turn),
                time_limit(limits.time),
                working_limit(limits.working),
            ):
                stack.enter_context(limit)
            try:
                async with anyio.create_task_group() as group:
                    group.start_soon(solve, group)
                if cancelled:
                    raise RuntimeError(
                        "the solver was cancelled by nothing that belongs to the episode "
                        "(no limit, and the episode was not closed)"
                    ) from cancelled[0]
            except Exception as error:
                raise internals.inner_exception(error) from error.__cause__
            finally:
                latest = internals.sample_state() or self._state
                internals.record_sample_limit_data(len(latest.messages))

    def _end_by_working_limit(self, error: LimitExceededError) -> None:
        if error.type == "working":
            internals.record_event(
                SampleLimitEvent(type=error.type, message=error.message, limit=error.limit)
            )
        self._end_by_limit(error.type, error.limit, error.message)

    def _end_by_limit(self, kind: str, limit: float | None, reason: str) -> None:
        self._state = internals.sample_state() or self._state
        self._limit = EvalSampleLimit.model_validate(
            {"type": kind, "limit": limit if limit is not None else -1, "reason": reason}
        )

    # the scorers

    async def _score(self) -> None:
        state = self._state
        state.completed = True
        internals.set_sample_state(state)
        if state.scores is None:
            state.scores = {}
        if self._error is not None and not self._task.score_on_error:
            self._scoring.keep_solver_scores(state, self._sample)
            return
        started = time.perf_counter()
        # Half of the sample's time is left for scoring, as in an eval.
        budget = self._task.limits.time
        try:
            with time_limit(budget / 2 if budget else None):
                await self._scoring.run(self._task.scorers, state, self._sample)
        except asyncio.CancelledError as error:
            if _being_cancelled():
                raise
            stray = RuntimeError("the scorer was cancelled by nothing that belongs to the episode")
            stray.__cause__ = error
            self._fail(stray, Cause.SCORER)
        except Exception as error:
            self._fail(error, Cause.SCORER)
        self._metrics["time/scoring_s"] = time.perf_counter() - started

    # the end

    async def _cleanup(self) -> None:
        if self._task.task.cleanup is None:
            return
        with anyio.CancelScope(shield=True):
            try:
                await self._task.task.cleanup(self._state)
            except Exception as error:
                # As in an eval: clean-up that fails is reported and changes no score.
                logger.warning(
                    "task %r, sample %r: the task's cleanup failed: %s",
                    self._task.name,
                    self._sample.id,
                    error,
                    exc_info=error,
                )

    def _fail(self, error: Exception, phase: Cause) -> None:
        """Record the first failure; a later one (of clean-up, say) does not hide it."""
        error = internals.inner_exception(error)
        internals.record_event(
            ErrorEvent(error=internals.eval_error(error, type(error), error, error.__traceback__))
        )
        if self._error is not None:
            logger.warning("a further failure after %s: %s", self._error, error)
            return
        self._state = internals.sample_state() or self._state
        self._error = episode_error(
            error,
            cause=attribute(error, phase=phase, sandbox_modules=self._sandboxes.modules),
            task=self._task.name,
            sample_id=self._sample.id,
            epoch=self._epoch,
        )

    def _result(self) -> EpisodeResult:
        context = copy_context()
        return EpisodeResult(
            task=self._task.name,
            sample=self._sample,
            epoch=self._epoch,
            state=self._state,
            scores=self._scoring.scores,
            limit=self._limit,
            error=self._error,
            turns=self._policy.answered,
            usage=self._policy.usage,
            truncated=self._policy.truncated,
            expected_scores={named.name: named.keys for named in self._task.scorers},
            metrics=self._metrics | (self._recorder.snapshot() if self._recorder else {}),
            build_log=(lambda: context.run(self._eval_sample)) if self._keep_log else None,
        )

    def _eval_sample(self) -> EvalSample:
        cause = self._error.__cause__ if self._error is not None else None
        return internals.create_eval_sample(
            start_time=self._started,
            sample=self._sample,
            state=self._state,
            scores=self._scoring.scores,
            error=None
            if cause is None
            else internals.eval_error(cause, type(cause), cause, cause.__traceback__),
            limit=self._limit,
            error_retries=[],
            time_limit=self._task.limits.time,
            started_at=self._started_at,
        )


def _being_cancelled() -> bool:
    """Whether somebody cancels the episode; a ``CancelledError`` alone may be a scorer's own."""
    task = asyncio.current_task()
    return task is not None and task.cancelling() > 0
