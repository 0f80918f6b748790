"""Everything before the solver: the sample's state, its context variables and its sandboxes."""

from __future__ import annotations

from contextlib import AsyncExitStack
from copy import deepcopy

from inspect_ai.dataset import Sample
from inspect_ai.event import SampleInitEvent
from inspect_ai.model import ModelName
from inspect_ai.scorer import Target
from inspect_ai.solver import Generate, TaskState

from inspect_tinker_plugin import inspect_internals as internals
from inspect_tinker_plugin.agents.bridge import use_agent_bridges
from inspect_tinker_plugin.docker_pool.metrics import SandboxMetrics, record_sandbox_metrics
from inspect_tinker_plugin.episode.model import PolicyModel
from inspect_tinker_plugin.episode.quiet import QuietTranscript, keep_out_of_trace_log
from inspect_tinker_plugin.episode.record import SampleRecord
from inspect_tinker_plugin.episode.sandbox import sample_sandboxes
from inspect_tinker_plugin.episode.task import PreparedTask
from inspect_tinker_plugin.errors import Cause
from inspect_tinker_plugin.fast_paths import FastPath, taken


def new_state(task: PreparedTask, sample: Sample, *, epoch: int, model: PolicyModel) -> TaskState:
    """Make the state that the solver starts from."""
    limits = task.limits
    assert sample.id is not None
    return TaskState(
        model=ModelName(model),
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
        metadata=deepcopy(sample.metadata) if sample.metadata else {},
    )


class SampleSetup:
    """Sets one sample up, step by step; ``doing`` and ``phase`` describe the current step.

    Attributes:
        doing: What it waits for, in words.
        phase: The cause that a failure is attributed to.
        recorder: Metrics of the sandboxes, if there are any.
        transcript: The events recorded for the sample, once it has begun.
    """

    def __init__(self, record: SampleRecord, model: PolicyModel) -> None:
        self.doing = "reading the input"
        self.phase = Cause.SOLVER
        self.recorder: SandboxMetrics | None = None
        self.transcript: internals.Transcript | None = None
        self._record = record
        self._model = model

    def enter_context(self) -> tuple[internals.ActiveSample, Generate]:
        """Bind the sample to the context variables that Inspect reads."""
        record, task = self._record, self._record.task
        task.enter_context(self._model)
        generate = task.generate_with(self._model)
        internals.set_task_generate(generate)
        internals.init_sample_model_data()
        internals.init_sample_assistant_internal()
        internals.reset_sample_limit_data()
        keep_out_of_trace_log()
        self.transcript = transcript = self._make_transcript()
        internals.init_transcript(transcript)
        self._bind_state()
        if task.scorers:
            internals.init_scoring_context(
                [named.scorer for named in task.scorers], Target(record.sample.target)
            )
        active = internals.running_sample(
            task=task.name,
            model=str(self._model),
            sample=record.sample,
            state=record.state,
            transcript=transcript,
            time_limit=task.limits.time,
            working_limit=task.limits.working,
        )
        return active, generate

    def _make_transcript(self) -> internals.Transcript:
        record = self._record
        if record.keep_log or record.task.reads_events:
            return internals.Transcript(log_model_api=False)
        if taken(FastPath.SOLVER_EVENTS):
            internals.leave_out_solver_events()
        if taken(FastPath.TRANSCRIPTS):
            return QuietTranscript(record.task.note_reading)
        return internals.Transcript(log_model_api=False)

    async def materialize_input(self) -> None:
        """Read images and other media of the input; a plain string has none."""
        record = self._record
        if not isinstance(record.sample.input, str):
            plan = internals.capture_task_input_media([record.sample])
            record.sample = await internals.materialize_sample_input(record.sample, plan)
            record.state = new_state(
                record.task, record.sample, epoch=record.epoch, model=self._model
            )
            self._bind_state()
        if record.keep_log:
            sample = record.sample.model_copy(
                update={"files": dict.fromkeys(record.sample.files, "")}
                if record.sample.files
                else None
            )
            internals.record_event(
                SampleInitEvent(sample=sample, state=internals.state_jsonable(record.state))
            )

    async def open_sandboxes(self, stack: AsyncExitStack, active: internals.ActiveSample) -> None:
        """Start the sample's sandboxes, which the stack releases."""
        record, task = self._record, self._record.task
        self.phase, self.doing = Cause.SANDBOX, "finding its sandbox"
        spec = await task.sandbox_of(record.sample)
        if spec is None:
            return
        stack.enter_context(use_agent_bridges())
        self.recorder = stack.enter_context(record_sandbox_metrics())
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
        active.sandbox_environments = record.sandboxes.environments

    def _now(self, doing: str) -> None:
        self.doing = doing

    def _bind_state(self) -> None:
        internals.set_sample_state(self._record.state)
        internals.init_subtask_store(self._record.state.store)
