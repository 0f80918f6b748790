"""The stages of one episode: everything before the solver, the solver under its limits, scoring."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Awaitable, Sequence
from contextlib import AbstractAsyncContextManager, AsyncExitStack, nullcontext
from copy import deepcopy
from logging import getLogger
from types import TracebackType
from typing import Any, Self

import anyio
from anyio.abc import TaskGroup
from inspect_ai.dataset import Sample
from inspect_ai.event import SampleInitEvent, SampleLimitEvent, ScoreEvent
from inspect_ai.model import Model
from inspect_ai.scorer import SampleScore, Score, Scorer, Target
from inspect_ai.solver import Generate, TaskState
from inspect_ai.util import LimitExceededError, span, time_limit

from inspect_tinker_plugin import inspect_internals as internals
from inspect_tinker_plugin.contracts.episodes import SOLVER_TIMEOUT
from inspect_tinker_plugin.contracts.errors import Cause
from inspect_tinker_plugin.contracts.policy import POLICY_MODEL
from inspect_tinker_plugin.contracts.sandboxes import SANDBOX_SERVICES, Recorder
from inspect_tinker_plugin.episode.boundaries import enclose, first_error
from inspect_tinker_plugin.episode.fast_paths import FastPath, QuietTranscript, is_on, run_plan
from inspect_tinker_plugin.episode.model import PolicyModel, policy_name
from inspect_tinker_plugin.episode.record import SampleRecord
from inspect_tinker_plugin.episode.sandbox import sample_sandboxes
from inspect_tinker_plugin.episode.task import NamedScorer, PreparedTask
from inspect_tinker_plugin.processes.cancellation import (
    NOT_BY_THE_EPISODE,
    being_cancelled,
    contained,
    raised_by,
    stray,
)


def new_state(task: PreparedTask, sample: Sample, *, epoch: int) -> TaskState:
    """Make the state that the solver starts from."""
    limits = task.limits
    assert sample.id is not None
    return TaskState(
        model=policy_name(),
        sample_id=sample.id,
        epoch=epoch,
        input=sample.input if isinstance(sample.input, str) else deepcopy(sample.input),
        messages=internals.first_messages(sample),
        target=Target(sample.target),
        choices=sample.choices,
        message_limit=limits.message,
        token_limit=limits.token,
        token_limit_type=limits.token_type,
        cost_limit=limits.cost,
        completed=False,
        metadata=deepcopy(sample.metadata) if sample.metadata else {},
        sample_uuid=internals.unique_id(),
    )


class Preparing:
    """Sets one sample up, step by step; ``doing`` and ``phase`` describe the current step.

    It is entered around everything that the episode does, and releases what was set up.

    Attributes:
        doing: What it waits for, in words.
        phase: The cause that a failure is attributed to.
        recorder: Metrics of the sandboxes, if there are any.
        transcript: The events recorded for the sample, once it has begun.
    """

    def __init__(self, record: SampleRecord, model: PolicyModel) -> None:
        self.doing = "reading the input"
        self.phase = Cause.SOLVER
        self.recorder: Recorder | None = None
        self.transcript: internals.Transcript | None = None
        self._record = record
        self._model = model
        self._opened: AsyncExitStack | None = None

    async def __aenter__(self) -> Self:
        """Set nothing up yet."""
        return self

    async def __aexit__(
        self,
        exc_type: type[BaseException] | None,
        exc_val: BaseException | None,
        exc_tb: TracebackType | None,
    ) -> bool | None:
        """Release the sandboxes, if there are any."""
        opened, self._opened = self._opened, None
        return None if opened is None else await opened.__aexit__(exc_type, exc_val, exc_tb)

    def enter_context(self) -> tuple[internals.ActiveSample, Generate]:
        """Bind the sample to the context variables that Inspect reads."""
        record, task = self._record, self._record.task
        task.enter_context(self._model)
        generate = task.generate_with(self._model)
        internals.set_task_generate(generate)
        internals.init_sample_model_data()
        if task.first_calls:
            internals.init_state_of_loaded_providers()
        else:
            internals.init_sample_assistant_internal()
        internals.reset_sample_limit_data()
        internals.limit_subprocesses(task.options.max_subprocesses)
        internals.forget_tools()
        record.boundaries.begin_part()
        internals.enclose_calls(_enclose_tool, _enclose_model)
        self.transcript = transcript = self._make_transcript()
        internals.init_transcript(transcript)
        self._bind_state()
        if task.scorers:
            internals.init_scoring_context(
                [named.scorer for named in task.scorers], Target(record.sample.target)
            )
        active = internals.running_sample(
            task=task.name,
            model=POLICY_MODEL,
            sample=record.sample,
            state=record.state,
            transcript=transcript,
            time_limit=task.limits.time,
            working_limit=task.limits.working,
        )
        return active, generate

    def _make_transcript(self) -> internals.Transcript:
        record = self._record
        if record.keep_log or record.task.reads_events or not is_on(FastPath.TRANSCRIPTS):
            return internals.Transcript(log_model_api=False)
        return QuietTranscript(record.task.note_reading)

    @property
    def waits(self) -> bool:
        """Whether it may have to wait for something."""
        sample = self._record.sample
        return not isinstance(sample.input, str) or self._record.task.asks_for_sandbox(sample)

    async def materialize_input(self) -> None:
        """Read images and other media of the input; a plain string has none."""
        record = self._record
        if not isinstance(record.sample.input, str):
            plan = internals.capture_task_input_media([record.sample])
            record.sample = await internals.materialize_sample_input(record.sample, plan)
            record.state = new_state(record.task, record.sample, epoch=record.epoch)
            self._bind_state()
        if record.keep_log:
            sample = record.sample.model_copy(
                update={"files": dict.fromkeys(record.sample.files, "")}
                if record.sample.files
                else None
            )
            state: Any = internals.state_jsonable(record.state)
            internals.record_event(SampleInitEvent(sample=sample, state=state))

    async def open_sandboxes(self, active: internals.ActiveSample) -> None:
        """Start the sample's sandboxes."""
        record, task = self._record, self._record.task
        self.phase, self.doing = Cause.SANDBOX, "finding its sandbox"
        spec = await task.sandbox_of(record.sample)
        if spec is None:
            return
        self._opened = stack = AsyncExitStack()
        provider = internals.registry_find_sandboxenv(spec.type)
        if record_metrics := getattr(provider, "record_metrics", None):
            self.recorder = stack.enter_context(record_metrics())
        record.sandboxes = await stack.enter_async_context(
            sample_sandboxes(
                task.name,
                task.run_dir,
                spec,
                record.sample,
                max_sandboxes=task.options.max_sandboxes,
                patience=task.options.stop_timeout,
                metrics=record.metrics,
                doing=self._now,
            )
        )
        internals.load_extensions()  # which add services
        for serve in SANDBOX_SERVICES:
            await stack.enter_async_context(serve(record.sandboxes.operations.watched))
        active.sandbox_environments = record.sandboxes.environments

    def _now(self, doing: str) -> None:
        self.doing = doing

    def _bind_state(self) -> None:
        internals.set_sample_state(self._record.state)
        internals.init_subtask_store(self._record.state.store)


def _enclose_tool(name: str, call: Awaitable[Any]) -> Awaitable[Any]:
    """Inspect runs each tool in a task of its own, in which ``SystemExit`` would end the loop."""
    return enclose(Cause.TOOL, f"the tool {name!r}", call)


def _enclose_model(model: Model, call: Awaitable[Any]) -> Awaitable[Any]:
    return call if isinstance(model, PolicyModel) else enclose(Cause.JUDGE, f"{model}", call)


class EpisodeTranscript:
    """Spans and score events, which only a log needs: they take a third of an episode's time."""

    def __init__(self, *, keep: bool) -> None:
        self._keep = keep

    def span(self, name: str, kind: str | None = None) -> AbstractAsyncContextManager[None]:
        """Group the events of one part of the episode."""
        return span(name, type=kind) if self._keep else nullcontext()

    def score(
        self, score: Score, *, name: str, sample: Sample, scorer: Scorer | None = None
    ) -> None:
        """Record a score, of a scorer or the solver's own."""
        if self._keep:
            args = None if scorer is None else internals.scorer_args(scorer)
            usage: dict[str, Any] = internals.sample_usage()
            internals.record_event(
                ScoreEvent(
                    score=score, target=sample.target, scorer=name, scorer_args=args, **usage
                )
            )


class Scoring:
    """Runs scorers over a final state.

    Attributes:
        scores: What has been scored so far, also when a later scorer raises.
    """

    def __init__(self, transcript: EpisodeTranscript) -> None:
        self.scores: dict[str, SampleScore] = {}
        self._transcript = transcript

    async def run(self, record: SampleRecord) -> None:
        """Score the state that the solver left; a failure goes into the record."""
        state, sample = record.state, record.sample
        state.completed = True
        internals.set_sample_state(state)
        if state.scores is None:
            state.scores = {}
        if record.error is not None and not record.task.score_on_error:
            self._keep(list(state.scores), state, sample)
            return
        record.boundaries.begin_part()
        started = time.monotonic()
        # As in an eval, half of the sample's time limit is available for scoring.
        budget = record.task.limits.time
        try:
            with time_limit(budget / 2) if budget else nullcontext():
                await self._run_scorers(record.task.scorers, state, sample)
        except asyncio.CancelledError as error:
            if being_cancelled():
                raise
            record.fail(stray("the scorer", error), Cause.SCORER)
        except Exception as error:
            is_limit = budget and isinstance(error, LimitExceededError)
            late = started + budget / 2 if budget and is_limit else None
            record.fail(error, Cause.SCORER, cut_off_since=late)
        if record.error is None and record.policy.graded is not None:
            # Its scorer caught that, or a program that it runs was shown it; in an eval the
            # policy would have graded.
            record.fail(record.policy.graded, Cause.SCORER)
        record.metrics["time/scoring_s"] = time.monotonic() - started

    async def _run_scorers(
        self, scorers: Sequence[NamedScorer], state: TaskState, sample: Sample
    ) -> None:
        """Run the scorers in order, then add the solver's own scores."""
        of_solver = list(state.scores or {})
        async with self._transcript.span("scorers"):
            for named in scorers:
                await self._score_with(named, state, sample)
        self._keep(of_solver, state, sample)

    async def _score_with(self, named: NamedScorer, state: TaskState, sample: Sample) -> None:
        assert state.scores is not None
        async with self._transcript.span(named.name, "scorer"):
            score = await contained("the scorer", named.scorer(state, Target(sample.target)))
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
            self._transcript.score(score, name=named.name, sample=sample, scorer=named.scorer)
            self.scores[named.name] = found

    def _keep(self, names: Sequence[str], state: TaskState, sample: Sample) -> None:
        scores = state.scores or {}
        for name in names:
            self.scores[name] = SampleScore(
                score=scores[name], sample_id=state.sample_id, sample_metadata=state.metadata
            )
            self._transcript.score(scores[name], name=name, sample=sample)


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
        message, token, cost, turn, clock, working = record.task.limits.scopes(record.state)
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
                if being_cancelled():
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
            async with self._spans.span("solvers"):
                plan = run_plan(record.task.plan, record.state, self._generate)
                record.state = await contained("the solver", plan)
        except anyio.get_cancelled_exc_class() as error:
            exceeded = active.limit_exceeded_error
            if exceeded is None:
                cancelled.append(error)
                raise
            error.__traceback__ = None  # its frames may refer to it
            self._end_by_limit(exceeded)
        finally:
            # ends the working-limit monitor and everything that background() started
            if not _alone(group):
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


def _alone(group: TaskGroup) -> bool:
    """Whether a group has one task only; cancelling it then takes time and does nothing."""
    tasks = getattr(group, "_tasks", None)
    return isinstance(tasks, set) and len(tasks) == 1
