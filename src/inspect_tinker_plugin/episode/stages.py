"""The solver under its limits, the scorers, and the record that both work on."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Sequence
from contextlib import AbstractAsyncContextManager, nullcontext
from dataclasses import dataclass, field
from logging import getLogger
from typing import Any, cast

import anyio
from anyio.abc import TaskGroup
from inspect_ai.dataset import Sample
from inspect_ai.event import ErrorEvent, SampleLimitEvent, ScoreEvent
from inspect_ai.log import EvalSampleLimit
from inspect_ai.scorer import SampleScore, Score, Scorer, Target
from inspect_ai.solver import Generate, TaskState
from inspect_ai.util import LimitExceededError, span, time_limit, turn_limit, working_limit

from inspect_tinker_plugin import inspect_internals as internals
from inspect_tinker_plugin.contracts.episodes import SOLVER_TIMEOUT, Metrics
from inspect_tinker_plugin.contracts.errors import PRICED, Cause, EpisodeError
from inspect_tinker_plugin.contracts.wording import first_error
from inspect_tinker_plugin.episode.boundaries import Boundaries, Stamp, is_timeout
from inspect_tinker_plugin.episode.fast_paths import run_plan
from inspect_tinker_plugin.episode.model import PolicyAPI
from inspect_tinker_plugin.episode.monitors import SampleHooks
from inspect_tinker_plugin.episode.sandbox import SampleSandboxes
from inspect_tinker_plugin.episode.task import NamedScorer, PreparedTask
from inspect_tinker_plugin.processes.loops import (
    NOT_BY_THE_EPISODE,
    contain,
    is_being_cancelled,
    raised_by,
    wrap_cancelled,
)

logger = getLogger(__name__)


@dataclass(slots=True)
class SampleRecord:
    """What set-up, solver and scorers of one sample share: its state, limit, error and metrics.

    Attributes:
        task: The task.
        sample: The sample; its media are read in during set-up.
        epoch: Epoch of the sample, from 1.
        state: The most recent state.
        policy: The model under training, which knows how many replies it has given.
        hooks: Inspect's hooks on samples.
        sandboxes: The sandboxes, once they have started.
        limit: The limit that ended the solver, if there was one.
        error: The first failure; a later one (in clean-up, say) does not replace it.
        metrics: Metrics of sandboxes and scoring.
        boundaries: What foreign code has raised, with its causes.
    """

    task: PreparedTask
    sample: Sample
    epoch: int
    state: TaskState
    policy: PolicyAPI
    hooks: SampleHooks
    sandboxes: SampleSandboxes = field(default_factory=SampleSandboxes)
    limit: EvalSampleLimit | None = None
    error: EpisodeError | None = None
    metrics: Metrics = field(default_factory=dict)
    boundaries: Boundaries = field(default_factory=Boundaries)

    def catch_up(self) -> None:
        """Take the most recent state, which a solver that was cut off could not return."""
        self.state = internals.sample_state() or self.state

    def end_by_limit(self, kind: str, limit: float | None, reason: str) -> None:
        """Record the limit that ended the solver."""
        self.catch_up()
        self.limit = EvalSampleLimit.model_validate(
            {"type": kind, "limit": limit if limit is not None else -1, "reason": reason}
        )

    def fail(
        self,
        error: Exception,
        phase: Cause,
        *,
        whole: Exception | None = None,
        cut_off_since: float | None = None,
    ) -> None:
        """Record a failure and its cause.

        Args:
            error: What was raised.
            phase: What was running.
            whole: The group that it is the first of, if there is one; all of it has the cause.
            cut_off_since: When the limit was reached that it is about, if it is about one.
        """
        whole = whole or error
        if isinstance(failure := first_error(error), internals.SentinelFailure):
            error = first_error(failure.error)
        # before the record, whose traceback may take longer to render than a time-out is about
        stamp = self.boundaries.attribute(whole, phase, cut_off_since=cut_off_since)
        internals.record_event(ErrorEvent(error=internals.error_record(error)))
        if self.error is not None:
            logger.warning("a further failure after %s: %s", self.error, internals.text_of(error))
            return
        self.catch_up()
        if stamp.cause is phase and is_timeout(whole) and self.sandboxes.operations.awaited:
            stamp = Stamp(Cause.INSIDE_SANDBOX, "a command that goes on")
        if stamp.cause is Cause.INSIDE_SANDBOX:
            stamp = Stamp(self.cause_inside(phase), stamp.call)
        self.error = self.wrap(error, stamp)

    def cause_inside(self, phase: Cause) -> Cause:
        """Return ``inside_sandbox``; before its first reply, a policy has done nothing inside."""
        return Cause.INSIDE_SANDBOX if self.policy.answered > 0 else phase

    def wrap(self, error: Exception, stamp: Stamp) -> EpisodeError:
        """Wrap an exception with its cause, task and sample; the original is its ``__cause__``."""
        first = first_error(error)
        text = internals.text_of(first)
        if isinstance(first, LimitExceededError):
            text = f"{first.message} while scoring"
        if stamp.call and (stamp.cause is Cause.SANDBOX or stamp.cause in PRICED):
            text = f"{text} (in {stamp.call})"
        wrapped = EpisodeError(
            f"{type(first).__name__}: {text}",
            cause=stamp.cause,
            task=self.task.name,
            sample_id=self.sample.id,
            epoch=self.epoch,
            call=stamp.call,
        )
        wrapped.__cause__ = error
        return wrapped

    # spans and scores of the transcript, which only a log needs: they take a third of an episode

    def span(self, name: str, kind: str | None = None) -> AbstractAsyncContextManager[None]:
        """Group the events of one part of the episode."""
        return span(name, type=kind) if self.task.keep_log else nullcontext()

    def note_score(self, score: Score, name: str, scorer: Scorer | None = None) -> None:
        """Record a score, of a scorer or the solver's own, in the transcript."""
        if self.task.keep_log:
            args = None if scorer is None else internals.scorer_args(scorer)
            target, usage = self.sample.target, cast(dict[str, Any], internals.sample_usage())
            internals.record_event(
                ScoreEvent(score=score, target=target, scorer=name, scorer_args=args, **usage)
            )


class Scoring:
    """Runs scorers over a final state.

    Attributes:
        scores: What has been scored so far, also when a later scorer raises.
    """

    def __init__(self, record: SampleRecord) -> None:
        self.scores: dict[str, SampleScore] = {}
        self._record = record

    async def run(self) -> None:
        """Score the state that the solver left; a failure goes into the record."""
        record, state = self._record, self._record.state
        state.completed = True
        internals.set_sample_state(state)
        if state.scores is None:
            state.scores = {}
        if record.error is not None and not record.task.score_on_error:
            self._keep(list(state.scores), state)
            return
        record.boundaries.begin_part()
        started = time.monotonic()
        # As in an eval, half of the sample's time limit is available for scoring.
        budget = record.task.limits.time
        try:
            with time_limit(budget / 2) if budget else nullcontext():
                await self._run_scorers(state)
        except asyncio.CancelledError as error:
            if is_being_cancelled():
                raise
            record.fail(wrap_cancelled("the scorer", error), Cause.SCORER)
        except Exception as error:
            is_limit = budget and isinstance(error, LimitExceededError)
            late = started + budget / 2 if budget and is_limit else None
            record.fail(error, Cause.SCORER, cut_off_since=late)
        if record.error is None and record.policy.graded is not None:
            # Its scorer caught that, or a program that it runs was shown it; in an eval the
            # policy would have graded.
            record.fail(record.policy.graded, Cause.SCORER)
        record.metrics["time/scoring_s"] = time.monotonic() - started

    async def _run_scorers(self, state: TaskState) -> None:
        """Run the scorers in order, then add the solver's own scores."""
        of_solver = list(state.scores or {})
        async with self._record.span("scorers"):
            for named in self._record.task.scorers:
                await self._score_with(named, state)
        self._keep(of_solver, state)

    async def _score_with(self, named: NamedScorer, state: TaskState) -> None:
        assert state.scores is not None
        sample = self._record.sample
        async with self._record.span(named.name, "scorer"):
            score = await contain("the scorer", named.scorer(state, Target(sample.target)))
            if named.name in state.scores:
                raise RuntimeError(f"Scorer {named.name} has modified state.scores")
            if score is None:
                return
            found = SampleScore(  # first of all: it refuses what is no score
                score=score,
                sample_id=sample.id,
                sample_metadata=sample.metadata,
                scorer=internals.registry_unqualified_name(named.scorer),
            )
            state.scores[named.name] = score
            self._record.note_score(score, named.name, named.scorer)
            self.scores[named.name] = found

    def _keep(self, names: Sequence[str], state: TaskState) -> None:
        scores = state.scores or {}
        for name in names:
            self.scores[name] = SampleScore(
                score=scores[name], sample_id=state.sample_id, sample_metadata=state.metadata
            )
            self._record.note_score(scores[name], name)


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
    ) -> None:
        self.started: float | None = None
        self._record = record
        self._active = active
        self._generate = generate
        self._stop: LimitExceededError | None = None
        self._failed_with: Exception | None = None
        """The group of exceptions that the solver has failed with, or its only one."""

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
            await record.hooks.report_start()
            await self._run_under_limits()
        except internals.SandboxTimeoutError as error:
            record.fail(error, Cause.SOLVER, whole=self._failed_with)
        except TimeoutError as error:
            self._end_by_own_timeout(error)
        except LimitExceededError as error:
            record.end_by_limit(error.type, error.limit, error.message)
            _forget_frames(error)
        except internals.TerminateSampleError as error:
            internals.record_event(SampleLimitEvent(type="operator", limit=1, message=error.reason))
            record.end_by_limit("operator", 1, error.reason)
            _forget_frames(error)
        except Exception as error:
            record.fail(error, Cause.SOLVER, whole=self._failed_with)
        finally:
            self._failed_with = None

    def _end_by_own_timeout(self, error: TimeoutError) -> None:
        """Score the state so far, as an eval does, unless a service or the sandbox was too slow."""
        record = self._record
        found = record.boundaries.attribute(self._failed_with or error, Cause.SOLVER)
        if found.cause in (Cause.JUDGE, Cause.SANDBOX):
            record.fail(error, Cause.SOLVER, whole=self._failed_with)
            return
        logger.warning(
            "task %r, sample %r: the solver ended with a TimeoutError that nothing handled (%s); "
            "its state so far is scored, as in an eval, and limit/solver_timeout counts it",
            record.task.name,
            record.sample.id,
            error,
        )
        record.metrics[SOLVER_TIMEOUT] = 1.0
        record.catch_up()

    async def _run_under_limits(self) -> None:
        record = self._record
        cancelled: list[BaseException] = []
        failed: Exception | None = None
        limits = record.task.limits
        message, token, cost = internals.state_limits(record.state)
        turn, clock, working = (
            turn_limit(limits.turn),
            time_limit(limits.time),
            working_limit(limits.working),
        )
        # entered one by one: a stack of them takes a kilobyte of every waiting episode
        with message, token, cost, turn, clock, working:
            try:
                async with anyio.create_task_group() as group:
                    group.start_soon(self._solve, group, cancelled)
                if cancelled:
                    raise RuntimeError(
                        f"the solver {NOT_BY_THE_EPISODE} "
                        "(no limit, and the episode was not closed)"
                    ) from cancelled[0]
            except asyncio.CancelledError:
                for each in cancelled:
                    each.__traceback__ = None  # it refers to the group's frame, which refers to it
                raise
            except Exception as error:
                failed, self._failed_with = first_error(error), error
            except BaseExceptionGroup as error:  # of what background() has started
                if is_being_cancelled():
                    raise
                raise raised_by("a part of the solver", error.exceptions[0]) from error
            finally:
                cancelled.clear()  # its traceback refers to this list
                latest = internals.sample_state() or record.state
                internals.record_sample_limit_data(len(latest.messages))
            if failed is not None:  # raised where its context, which tells the cause, is kept
                try:
                    raise failed
                finally:
                    failed = None  # its traceback refers to this frame

    async def _solve(self, group: TaskGroup, cancelled: list[BaseException]) -> None:
        record, active = self._record, self._active
        try:
            active.start(group)
            if self._stop is not None:
                active.limit_exceeded(self._stop)
            if record.task.limits.working is not None:
                internals.monitor_working_limit()
            record.hooks.follow_events(self._active.transcript)
            async with record.span("solvers"):
                with internals.sentinel_solving():
                    plan = run_plan(record.task.plan, record.state, self._generate)
                    record.state = await contain("the solver", plan)
        except anyio.get_cancelled_exc_class() as error:
            exceeded = active.limit_exceeded_error
            if exceeded is None:
                cancelled.append(error)
                raise
            error.__traceback__ = None  # its frames may refer to it
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


def _forget_frames(error: BaseException) -> None:
    """Break the cycles of an error that was dealt with: its frames and its group refer to it."""
    error.__traceback__ = error.__context__ = error.__cause__ = None
