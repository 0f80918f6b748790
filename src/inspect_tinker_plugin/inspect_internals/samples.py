"""One sample outside of an eval: its context, state, limits, transcript and entry in a log."""

from __future__ import annotations

import inspect
import sys
import traceback
from collections.abc import Sequence
from contextlib import suppress
from typing import Any

from inspect_ai import Task
from inspect_ai._eval.context import init_task_context
from inspect_ai._eval.task.generate import task_generate
from inspect_ai._eval.task.images import capture_task_input_media, materialize_sample_input
from inspect_ai._eval.task.run import create_eval_sample, resolve_plan
from inspect_ai._eval.task.util import sample_messages
from inspect_ai._util.exception import TerminateSampleError
from inspect_ai._util.json import to_json_safe
from inspect_ai._util.registry import has_registry_params, registry_params
from inspect_ai._util.working import init_sample_working_time
from inspect_ai.agent._acp.transport import _acp_live_active
from inspect_ai.dataset import Sample
from inspect_ai.event import Event, InterruptEvent, ModelEvent, ToolEvent
from inspect_ai.event._model import LIMIT_CANCEL_ERROR
from inspect_ai.log import EvalError, transcript
from inspect_ai.log._log import eval_error
from inspect_ai.log._samples import ActiveSample, _sample_active
from inspect_ai.log._transcript import Transcript, init_transcript
from inspect_ai.model import GenerateConfig, Model, ModelUsage
from inspect_ai.model._assistant_internal import init_sample_assistant_internal
from inspect_ai.model._model import (
    init_sample_model_data,
    sample_model_usage,
    sample_role_usage,
)
from inspect_ai.scorer._score import init_scoring_context
from inspect_ai.solver import TaskState
from inspect_ai.solver._fork import set_task_generate
from inspect_ai.solver._task_state import sample_state, set_sample_state, state_jsonable
from inspect_ai.tool import ToolCallError
from inspect_ai.util import Limit, _concurrency, _subprocess
from inspect_ai.util._anyio import inner_exception
from inspect_ai.util._checkpoint.checkpointer_factory import create_checkpointer
from inspect_ai.util._limit import (
    monitor_working_limit,
    record_sample_limit_data,
    reset_sample_limit_data,
)
from inspect_ai.util._store import init_subtask_store
from shortuuid import uuid as unique_id

from inspect_tinker_plugin.contracts.wording import spell_out
from inspect_tinker_plugin.inspect_internals.tasks import PrerequisiteError, without_markup

__all__ = [
    "ActiveSample",
    "TerminateSampleError",
    "Transcript",
    "capture_task_input_media",
    "create_eval_sample",
    "current_sample",
    "enter_task_context",
    "error_record",
    "forget_tools",
    "init_sample_assistant_internal",
    "init_sample_model_data",
    "init_sample_working_time",
    "init_scoring_context",
    "init_subtask_store",
    "init_transcript",
    "inner_exception",
    "limit_subprocesses",
    "materialize_sample_input",
    "monitor_working_limit",
    "record_event",
    "record_sample_limit_data",
    "recorded_events",
    "reset_sample_limit_data",
    "resolve_plan",
    "running_sample",
    "sample_messages",
    "sample_state",
    "sample_usage",
    "scorer_args",
    "set_sample_state",
    "set_task_generate",
    "state_jsonable",
    "state_limits",
    "task_generate",
    "text_of",
    "to_json_safe",
    "unique_id",
]


def record_event(event: Event) -> None:
    """Append an event to the transcript of the running episode."""
    transcript()._event(event)


def scorer_args(scorer: object) -> dict[str, Any] | None:
    """Return the arguments that a scorer was made with, for the event of its score."""
    return registry_params(scorer) if has_registry_params(scorer) else None


def sample_usage() -> dict[str, dict[str, ModelUsage] | None]:
    """Return what models have used in the running episode so far, for the event of a score."""
    return {
        "model_usage": dict(sample_model_usage()) or None,
        "role_usage": dict(sample_role_usage()) or None,
    }


_CONTEXT_PARAMETERS = inspect.signature(init_task_context).parameters


def enter_task_context(
    model: Model,
    model_roles: dict[str, Model | list[Model]],
    config: GenerateConfig,
    task: Task,
    sentinel: object,
) -> None:
    """Bind model, roles, approval, review and the sentinel of a task to the current context.

    Releases up to 0.3.277 have nothing that asks for the task, and up to 0.3.278 nothing
    that asks for its description.
    """
    about_task = {
        "sentinel": sentinel,
        "task_metadata": task.metadata,
        "task_description": getattr(task, "description", None),
    }
    known: dict[str, Any] = {
        name: value for name, value in about_task.items() if name in _CONTEXT_PARAMETERS
    }
    init_task_context(model, model_roles, config, task.approval, task.review, **known)


_MANY_DESCRIPTIONS = 1000


def forget_tools() -> None:
    """Empty Inspect's cache of tool descriptions when it has grown large.

    It keeps each function that was ever described, for the whole process: one per turn of
    ``react()``, and those of every tool that a solver makes for its sample.
    """
    cache = getattr(sys.modules["inspect_ai.tool._tool_info"], "_tool_info_cache", None)
    if cache is not None and len(cache) > _MANY_DESCRIPTIONS:
        cache.clear()


def running_sample(
    *,
    task: str,
    model: str,
    sample: Sample,
    state: TaskState,
    transcript: Transcript,
    time_limit: int | None,
    working_limit: int | None,
    run: str,
) -> ActiveSample:
    """Make this sample the running one of the current context.

    An eval does this through ``active_sample``, which also lists the sample for the
    display and opens a session for an operator. The list is emptied by the next
    ``eval()`` in the process, and the session is most of a sample's start-up cost.
    """
    assert sample.id is not None
    active = ActiveSample(
        task=task,
        log_location="",
        model=model,
        sample=sample,
        epoch=state.epoch,
        message_limit=state.message_limit,
        token_limit=state.token_limit,
        token_limit_type=state.token_limit_type,
        cost_limit=state.cost_limit,
        time_limit=time_limit,
        working_limit=working_limit,
        fails_on_error=True,
        transcript=transcript,
        sandboxes={},
        checkpointer=create_checkpointer(
            config=None, log_location="", sample_id=sample.id, epoch=state.epoch
        ),
        eval_id=run,
        run_id=run,
        sample_uuid=state.uuid,
    )
    active.live_state = state
    active.on_interrupt = lambda cause: _record_interrupt(transcript)
    _sample_active.set(active)
    _acp_live_active.set(True)
    return active


def error_record(error: BaseException) -> EvalError:
    """Describe an exception as an eval's log does.

    Inspect's report cannot hold half a surrogate pair, which the message of an exception may
    have from the policy, cannot be made where the exception's own text fails, and has no end where
    an exception was raised from itself.
    """
    with suppress(Exception):
        if not _comes_back(error):
            return eval_error(error, type(error), error, error.__traceback__)
    try:
        told = spell_out("".join(traceback.format_exception(error)))
    except Exception:
        told = spell_out("".join(traceback.format_tb(error.__traceback__)))
    return EvalError(message=text_of(error), traceback=told, traceback_ansi=told)


def _comes_back(error: BaseException) -> bool:
    """Whether what an exception was raised from leads back to one that was there already."""
    seen: set[int] = set()
    link: BaseException | None = error
    while link is not None and id(link) not in seen:
        seen.add(id(link))
        link = link.__cause__ or (None if link.__suppress_context__ else link.__context__)
    return link is not None


def text_of(error: BaseException) -> str:
    """Return the message of an exception, or its type where there is none that can be shown."""
    try:
        text = str(error)
    except Exception:
        text = ""
    if isinstance(error, PrerequisiteError):
        text = without_markup(text)
    return spell_out(text) or type(error).__name__


def current_sample() -> ActiveSample | None:
    """Return the sample running in this context: of an eval, or of an episode."""
    return _sample_active.get(None)


def recorded_events(transcript: Transcript | None) -> Sequence[Event]:
    """Return the events of a transcript, and do not count as somebody who reads it."""
    if transcript is None:
        return ()
    recorded: Sequence[Event] | None = getattr(transcript, "recorded", None)
    return transcript.events if recorded is None else recorded


def _record_interrupt(transcript: Transcript) -> None:
    """Record a call that a limit cuts off as cancelled; in an eval, the operator's session does."""
    events = recorded_events(transcript)
    calls = [e for e in events if isinstance(e, ToolEvent | ModelEvent) and e.pending]
    tools = [call for call in calls if isinstance(call, ToolEvent)]
    models = [call for call in calls if isinstance(call, ModelEvent)]
    for tool in tools:
        tool.error = ToolCallError(type="cancelled", message="Tool call cancelled by limit.")
        tool.failed = True
    for model in models:
        model.error = LIMIT_CANCEL_ERROR
    transcript._event(
        InterruptEvent(
            source="limit",
            interrupted="tool_call" if tools else "generate" if models else "between_turns",
            interrupted_tool_call_id=tools[0].id if tools else None,
            interrupted_model_event_id=models[-1].uuid if models and not tools else None,
        )
    )
    for call in calls:
        call.pending = None
        transcript._event_updated(call)


def limit_subprocesses(count: int | None) -> None:
    """Set how many of Inspect's subprocesses run at once; ``None`` leaves that to Inspect.

    The limit is the process's: episodes wait for the subprocesses of others. A release whose
    limits have a fixed size keeps the size of the first subprocess.
    """
    if count is None:
        return
    _subprocess.init_max_subprocesses(count)
    for limit in _concurrency._concurrency_registry.values():
        if limit.name == "subprocesses" and limit.concurrency != count:
            limit.concurrency = count  # type: ignore[misc]  # a property that can be set


def state_limits(state: TaskState) -> tuple[Limit, Limit, Limit]:
    """Message, token and cost limit of a state, to be entered around its solver."""
    return state._message_limit, state._token_limit, state._cost_limit
