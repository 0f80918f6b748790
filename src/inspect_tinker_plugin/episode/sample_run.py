"""One sample run as ``eval()`` would run it: sandbox, solver under limits, scorers, clean-up.

The order of steps, what each limit leads to, and what is scored after which failure follow
``task_run_sample`` of Inspect (``inspect_ai/_eval/task/run.py``). Left out is what belongs
to an eval rather than a sample: display, retries, log files, early stopping.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Mapping, Sequence
from contextlib import AsyncExitStack, nullcontext
from contextvars import copy_context
from copy import deepcopy
from datetime import UTC, datetime
from logging import getLogger
from typing import Any

import anyio
from inspect_ai.dataset import Sample
from inspect_ai.event import Event, SampleInitEvent
from inspect_ai.log import EvalSample
from inspect_ai.scorer import Target
from inspect_ai.solver import Generate, TaskState
from inspect_ai.util import SandboxEnvironment

from inspect_tinker_plugin import inspect_internals as internals
from inspect_tinker_plugin.contracts.episodes import EpisodeResult, EpisodeState
from inspect_tinker_plugin.contracts.errors import Cause, TaskError
from inspect_tinker_plugin.contracts.policy import POLICY_MODEL
from inspect_tinker_plugin.contracts.sandboxes import SANDBOX_SERVICES, Recorder
from inspect_tinker_plugin.episode import fast_paths
from inspect_tinker_plugin.episode.boundaries import Stamp
from inspect_tinker_plugin.episode.clean import scoring_sandbox
from inspect_tinker_plugin.episode.mailbox import Mailbox
from inspect_tinker_plugin.episode.model import (
    enclose_model,
    enclose_tool,
    note_refused,
    policy_model,
    policy_name,
)
from inspect_tinker_plugin.episode.monitors import SampleHooks
from inspect_tinker_plugin.episode.sandbox import sample_sandboxes
from inspect_tinker_plugin.episode.stages import SampleRecord, Scoring, Solving
from inspect_tinker_plugin.episode.task import PreparedTask
from inspect_tinker_plugin.processes.loops import (
    contain,
    is_being_cancelled,
    run_bounded,
    wrap_cancelled,
)

logger = getLogger(__name__)


class StoppedError(RuntimeError):
    """The trainer ended an episode before there was anything to score."""


def new_state(task: PreparedTask, sample: Sample, *, epoch: int) -> TaskState:
    """Make the state that the solver starts from."""
    limits = task.limits
    assert sample.id is not None
    try:
        metadata = deepcopy(sample.metadata) if sample.metadata else {}
    except Exception as error:  # each type of object has its own
        raise TaskError(
            f"task {task.name!r}, sample {sample.id!r}: its metadata cannot be copied for each "
            f"episode ({error}); it must be plain data"
        ) from error
    return TaskState(
        model=policy_name(),
        sample_id=sample.id,
        epoch=epoch,
        input=sample.input if isinstance(sample.input, str) else deepcopy(sample.input),
        messages=internals.sample_messages(sample),
        target=Target(sample.target),
        choices=sample.choices,
        message_limit=limits.message,
        token_limit=limits.token,
        token_limit_type=limits.token_type,
        cost_limit=limits.cost,
        completed=False,
        metadata=metadata,
        sample_uuid=internals.unique_id(),
    )


class SampleRun:
    """The run of one sample; ``run()`` is called once, in its own task."""

    def __init__(
        self,
        prepared: PreparedTask,
        sample: Sample,
        *,
        epoch: int,
        mailbox: Mailbox,
        entering: Callable[[EpisodeState], None],
    ) -> None:
        self._mailbox = mailbox
        self._entering = entering
        self._model, self._policy = policy_model(
            mailbox,
            max_turns=prepared.options.max_turns,
            merged=prepared.merged_configs,
            keep_events=prepared.keep_log or prepared.reads_events,
            side_models=prepared.side_models,
        )
        self._policy.count_text = prepared.count_tokens
        self._policy.window = prepared.context_window
        self._record = SampleRecord(
            task=prepared,
            sample=sample,
            epoch=epoch,
            state=new_state(prepared, sample, epoch=epoch),
            policy=self._policy,
            hooks=SampleHooks(prepared.run_id, prepared.calls_hooks),
        )
        self._scoring = Scoring(self._record)
        self._transcript: internals.Transcript | None = None
        self._recorder: Recorder | None = None
        self._opened: AsyncExitStack | None = None
        self._setting_up: anyio.CancelScope | None = None
        self._solving: Solving | None = None
        self._stopped: str | None = None
        self._doing = "reading the input"
        self._phase = Cause.SOLVER
        self._cancelled_in: Cause | None = None
        self._started_at = datetime.now(UTC)
        self.context = copy_context()

    async def run(self) -> EpisodeResult:
        """Run the sample to its end.

        Returns:
            The result. Whatever fails is in its ``error``; only cancellation is raised,
            after everything has been released.
        """
        record = self._record
        active, generate = self._enter_context()
        try:
            try:
                if await self._set_up(active):
                    self._solving = Solving(record, active, generate)
                    await self._solve_and_score(self._solving)
                    self._phase = Cause.SANDBOX
            finally:
                if self._opened is not None:
                    await self._opened.aclose()
        except asyncio.CancelledError as error:
            if is_being_cancelled():
                raise
            record.fail(wrap_cancelled("a part of it", error), self._phase)
        except Exception as error:
            record.fail(error, self._phase)
        finally:
            active.checkpointer.close()
            active.complete()
            record.boundaries.forget(handled=record.error is None)
            self._entering = lambda state: None  # it is the owner's, which holds this run
            if self._record.hooks.enabled:
                await self._record.hooks.report_end(self.build_log())
        return self.result()

    async def _solve_and_score(self, solving: Solving) -> None:
        try:
            self._phase = Cause.SOLVER
            self._entering(EpisodeState.RUNNING)
            try:
                await solving.run()
            finally:
                self._mailbox.close()
                self._entering(EpisodeState.STOPPING)
            self._phase = Cause.SCORER
            await self._record.hooks.report_scoring()
            async with scoring_sandbox(self._record):
                await self._scoring.run()
        except asyncio.CancelledError:
            self._cancelled_in = self._phase
            raise
        except Exception as error:
            self._record.fail(error, self._phase)
        finally:
            await self._clean_up()

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
        if self._transcript is not None:
            cause = self._cancelled_in or self._phase
            if cause in (Cause.SOLVER, Cause.SCORER) and record.sandboxes.operations.awaited:
                cause = record.cause_inside(cause)
        record.error = record.error or record.wrap(StoppedError(message), Stamp(cause))
        return self.result()

    def result(self) -> EpisodeResult:
        """Return the result so far."""
        record, context = self._record, self.context.copy()
        measured = self._measure()
        # A reward may change what it is given, and other episodes have the same sample.
        own = record.sample.model_copy(update={"metadata": deepcopy(record.sample.metadata)})
        return EpisodeResult(
            task=record.task.name,
            sample=own,
            epoch=record.epoch,
            state=record.state,
            scores=self._scoring.scores,
            limit=record.limit,
            error=record.error,
            turns=self._policy.answered,
            usage=self._policy.usage,
            truncated=self._policy.truncated,
            expected_scores={named.name: named.keys for named in record.task.scorers},
            metrics={
                **record.metrics,
                **self._model.metrics,
                **measured,
                **record.task.monitors.measure(self.events),
            },
            build_log=(lambda: context.run(self.build_log)) if self.has_log else None,
        )

    @property
    def sandboxes(self) -> Mapping[str, SandboxEnvironment]:
        """The sandboxes, once they have started."""
        return self._record.sandboxes.environments

    @property
    def events(self) -> Sequence[Event]:
        """The events recorded so far."""
        return internals.recorded_events(self._transcript)

    @property
    def has_log(self) -> bool:
        """Whether there is a log to build."""
        return self._transcript is not None and self._record.task.keep_log

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

    # set-up

    def _enter_context(self) -> tuple[internals.ActiveSample, Generate]:
        """Bind the sample to the context variables that Inspect reads."""
        record, task = self._record, self._record.task
        task.enter_context(self._model)
        generate = task.generate_with(self._model)
        internals.set_task_generate(generate)
        internals.init_sample_model_data()
        if not task.first_calls:  # an export loads the libraries of no provider
            internals.init_sample_assistant_internal()
        internals.reset_sample_limit_data()
        internals.limit_subprocesses(task.options.max_subprocesses)
        internals.forget_tools()
        record.boundaries.begin_part()
        internals.enclose_calls(enclose_tool, enclose_model, note_refused)
        if task.keep_log or task.reads_events or not fast_paths.are_on():
            self._transcript = internals.Transcript(log_model_api=False)
        else:
            self._transcript = fast_paths.QuietTranscript(task.note_reading)
        internals.init_transcript(self._transcript)
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
            transcript=self._transcript,
            time_limit=task.limits.time,
            working_limit=task.limits.working,
            run=task.run_id,
        )
        return active, generate

    def _bind_state(self) -> None:
        internals.set_sample_state(self._record.state)
        internals.init_subtask_store(self._record.state.store)

    async def _set_up(self, active: internals.ActiveSample) -> bool:
        """Set the sample up; ``False`` when that failed, or the episode was stopped meanwhile."""
        record = self._record
        waits = not isinstance(record.sample.input, str) or record.task.asks_for_sandbox(
            record.sample
        )
        if self._stopped is None:
            with anyio.CancelScope() if waits else nullcontext() as scope:
                self._setting_up = scope
                async with record.span("init", "init"):
                    try:
                        await self._read_input()
                        await record.hooks.report_init(
                            record.sample, record.state, self._started_at
                        )
                        await self._open_sandboxes(active)
                    except Exception as error:
                        record.fail(error, self._phase)
            self._setting_up = None
        if record.error is None and self._stopped is not None:
            stopped = f"{self._stopped}: it was still {self._doing}, and no solver had begun"
            record.fail(StoppedError(stopped), self._phase)
        return record.error is None

    async def _read_input(self) -> None:
        """Read images and other media of the input; a plain string has none."""
        record = self._record
        if not isinstance(record.sample.input, str):
            plan = internals.capture_task_input_media([record.sample])
            record.sample = await internals.materialize_sample_input(record.sample, plan)
            record.state = new_state(record.task, record.sample, epoch=record.epoch)
            self._bind_state()
        if record.task.keep_log:
            no_contents = dict.fromkeys(record.sample.files or (), "") or record.sample.files
            sample = record.sample.model_copy(update={"files": no_contents})
            state: Any = internals.state_jsonable(record.state)
            internals.record_event(SampleInitEvent(sample=sample, state=state))

    def _measure(self) -> Mapping[str, float]:
        """Return what the sandboxes' provider measured, as long as it gives numbers."""
        try:
            measured = self._recorder.snapshot() if self._recorder else {}
            return {name: float(value) for name, value in measured.items()}
        except Exception:
            logger.warning("the metrics of %r are left out", self._recorder, exc_info=True)
            self._recorder = None
            return {}

    async def _open_sandboxes(self, active: internals.ActiveSample) -> None:
        """Start the sample's sandboxes."""
        record, task = self._record, self._record.task
        self._phase, self._doing = Cause.SANDBOX, "finding its sandbox"
        spec = await task.sandbox_of(record.sample)
        if spec is None:
            return
        self._opened = stack = AsyncExitStack()
        provider = internals.registry_find_sandboxenv(spec.type)
        if record_metrics := getattr(provider, "record_metrics", None):
            self._recorder = stack.enter_context(record_metrics())
        record.sandboxes = await stack.enter_async_context(
            sample_sandboxes(
                task, spec, record.sample, metrics=record.metrics, doing=self._describe
            )
        )
        internals.load_extensions()  # which add services
        environments = record.sandboxes.environments.values()
        for serve in SANDBOX_SERVICES:
            served = serve(environments, record.sandboxes.operations.watch_operation)
            await stack.enter_async_context(served)
        active.sandbox_environments = record.sandboxes.environments

    def _describe(self, doing: str) -> None:
        self._doing = doing

    # clean-up

    async def _clean_up(self) -> None:
        record = self._record
        self._phase = Cause.SOLVER
        cleanup = record.task.task.cleanup
        if cleanup is None:
            return
        patience = record.task.options.stop_timeout
        try:
            with anyio.CancelScope(shield=True):
                await run_bounded(contain("the task's cleanup", cleanup(record.state)), patience)
        except (Exception, asyncio.CancelledError) as error:
            if isinstance(error, asyncio.CancelledError) and is_being_cancelled():
                raise
            # As in an eval: a failing clean-up is reported and changes no score.
            logger.warning(
                "task %r, sample %r: the task's cleanup failed: %s",
                record.task.name,
                record.sample.id,
                str(error) or type(error).__name__,
                exc_info=error,
            )
