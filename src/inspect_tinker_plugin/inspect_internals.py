"""The only module that touches private names of Inspect, each with the reason why.

Inspect promises its public API; running one sample outside of ``eval()`` needs a little
more. ``PRIVATE_NAMES`` lists every private name with why no public one serves. They are
all looked up before anything is imported from them, so that an unsupported release leads
to one :class:`VersionError` that names what is missing, not to a stray ImportError.
"""

# ruff: noqa: E402  (the check has to run before the imports that it guards)

from __future__ import annotations

import ast
import asyncio
import hashlib
import importlib
import inspect
import re
import sys
import textwrap
from collections.abc import Awaitable, Callable, Iterator, Sequence
from contextlib import AbstractAsyncContextManager, contextmanager, nullcontext, suppress
from contextvars import ContextVar
from copy import copy
from functools import cache
from importlib.metadata import version
from types import SimpleNamespace
from typing import Any

import anyio
from anyio.abc import Process

from inspect_tinker_plugin.errors import VersionError
from inspect_tinker_plugin.turnstile import ProcessLimiter, ProcessSemaphore

SUPPORTED_INSPECT = ">=0.3.270,<0.4"

PRIVATE_NAMES: dict[str, str] = {
    "inspect_ai._eval.context:init_task_context": (
        "binds model, roles and approval to a task's context"
    ),
    "inspect_ai._eval.loader:create_file_tasks": (
        "creates a task of a file, in the file's own folder"
    ),
    "inspect_ai._eval.loader:load_file_tasks": "runs a task file as `inspect eval` does",
    "inspect_ai._eval.loader:load_task_spec": "creates a task by its registered name",
    "inspect_ai._eval.loader:resolve_task_sandbox": (
        "sandbox overrides and implicit config files, as eval() resolves them"
    ),
    "inspect_ai._eval.loader:solver_from_spec": "the solver that --solver names",
    "inspect_ai._eval.score:resolve_scorers": "the scorers that a log's header names",
    "inspect_ai._eval.task.generate:task_generate": (
        "the `generate` function that solvers are given"
    ),
    "inspect_ai._eval.task.images:capture_task_input_media": (
        "inlines images of the input as eval() does"
    ),
    "inspect_ai._eval.task.images:materialize_sample_input": (
        "inlines images of the input as eval() does"
    ),
    "inspect_ai._eval.task.log:resolve_eval_metrics": "a task's metrics in a log's header",
    "inspect_ai._eval.task.log:resolve_eval_scorers": "a task's scorers in a log's header",
    "inspect_ai._eval.task.run:create_eval_sample": (
        "one `EvalSample`, as it would have been logged"
    ),
    "inspect_ai._eval.task.run:resolve_plan": "setup, chain and plan of a task as one solver",
    "inspect_ai._eval.task.sandbox:read_sandboxenv_file": (
        "contents of `Sample.files` (paths, URLs, data)"
    ),
    "inspect_ai._eval.task.sandbox:resolve_sample_files": "directories in `Sample.files`",
    "inspect_ai._eval.task.sandbox:resolve_sandbox": "precedence of task and sample sandbox",
    "inspect_ai._eval.task.util:sample_messages": "first messages of a sample",
    "inspect_ai._eval.task.util:task_file": "the file that a live task came from",
    "inspect_ai._eval.task.util:task_run_dir": "the folder that a task's relative paths start from",
    "inspect_ai._util.decorator:parse_decorators": "tasks that a file declares, without running it",
    "inspect_ai._util.dotenv:init_dotenv": "reads .env as `inspect` does",
    "inspect_ai._util.environ:environ_vars": "environment of a sandbox's task_init",
    "inspect_ai._util.error:PrerequisiteError": "how Inspect reports bad input",
    "inspect_ai._util.exception:TerminateSampleError": "an approver or tool ended the sample",
    "inspect_ai._util.path:chdir": "folder of a sandbox's task_init",
    "inspect_ai._util.registry:is_registry_object": "whether a log can name a scorer",
    "inspect_ai._util.registry:registry_find": "names for `did you mean`",
    "inspect_ai._util.registry:registry_lookup": (
        "whether a task is registered, without creating it"
    ),
    "inspect_ai._util.registry:registry_params": "arguments that a live task was created with",
    "inspect_ai._util.registry:registry_unqualified_name": "scorer names as in a log",
    "inspect_ai._util.working:init_sample_working_time": "starts the clock of working limits",
    "inspect_ai.agent._acp.transport:_acp_live_active": (
        "marks the live operator session as taken, which saves most of a sample's start-up"
    ),
    "inspect_ai.agent._bridge.sandbox.bridge:sandbox_with_injected_tools": (
        "where a bridge gets its sandbox, which an episode serves without polling"
    ),
    "inspect_ai.agent._bridge.sandbox.service:MODEL_SERVICE": "names the bridge's port",
    "inspect_ai.agent._bridge.sandbox.service:sandbox_service": (
        "where a bridge serves its sandbox, which an episode does without polling"
    ),
    "inspect_ai.agent._bridge.util:in_bridge_model_generate": (
        "whether a model call came in by an agent bridge, which loses parts of messages"
    ),
    "inspect_ai.agent._handoff:AgentTool": "a handoff is no tool call that can be carried out",
    "inspect_ai.event._model:LIMIT_CANCEL_ERROR": "a model call that a limit has cut off",
    "inspect_ai.log._log:eval_error": "error of an `EvalSample`",
    "inspect_ai.log._samples:ActiveSample": (
        "react(), limits and background() ask for the running sample"
    ),
    "inspect_ai.log._samples:_sample_active": (
        "react(), limits and background() ask for the running sample"
    ),
    "inspect_ai.log._transcript:Transcript": "one transcript per episode",
    "inspect_ai.log._transcript:init_transcript": "one transcript per episode",
    "inspect_ai.model._call_tools:parse_tool_call": (
        "a call's arguments as Inspect's own providers read them"
    ),
    "inspect_ai.model._call_tools:tool_parse_error_message": (
        "what a model is told about arguments that do not parse"
    ),
    "inspect_ai.model._assistant_internal:init_sample_assistant_internal": (
        "per-sample state of providers"
    ),
    "inspect_ai.model._call_tools:call_tool": (
        "one approved tool call on its way to the tool, where executors come in"
    ),
    "inspect_ai.model._model:init_sample_model_data": "per-sample usage, which limits read",
    "inspect_ai.model._model_config:model_roles_config_to_model_roles": (
        "the judges that a log's header names"
    ),
    "inspect_ai.model._model_config:model_roles_to_model_roles_config": (
        "a task's judges in a log's header"
    ),
    "inspect_ai.scorer._metric:to_metric_specs": "a task's metrics in a log's header",
    "inspect_ai.scorer._score:init_scoring_context": "lets a solver call score()",
    "inspect_ai.scorer._scorer:as_scorer_spec": "a task's scorers in a log's header",
    "inspect_ai.scorer._scorer:unique_scorer_name": "scorer names as in a log",
    "inspect_ai.solver._fork:set_task_generate": "lets a solver call fork()",
    "inspect_ai.solver._solver:SolverSpec": "the solver that --solver names",
    "inspect_ai.solver._task_state:sample_state": (
        "the most recent state of a sample that hit a limit"
    ),
    "inspect_ai.solver._task_state:set_sample_state": "makes the state known to limits and scorers",
    "inspect_ai.solver._task_state:state_jsonable": "the state in the transcript's first event",
    "inspect_ai.util._anyio:inner_exception": "the one exception inside a task group's",
    "inspect_ai.util._checkpoint.checkpointer_factory:create_checkpointer": "react() asserts one",
    "inspect_ai.util._concurrency:_concurrency_registry": (
        "limits of the process that were made before they could serve several event loops"
    ),
    "inspect_ai.util._concurrency:anyio": (
        "limits of the process (connections, subprocesses) serve one event loop only"
    ),
    "inspect_ai.util._limit:monitor_working_limit": "ends a sample that exceeds its working limit",
    "inspect_ai.util._limit:record_sample_limit_data": "sample_limits() for scorers",
    "inspect_ai.util._limit:reset_sample_limit_data": "sample_limits() for scorers",
    "inspect_ai.util._sandbox.context:cleanup_sandbox_environments_sample": (
        "releases a sample's sandboxes"
    ),
    "inspect_ai.util._sandbox.context:init_sandbox_environments_sample": (
        "starts a sample's sandboxes with files and set-up"
    ),
    "inspect_ai.util._sandbox.context:sandbox_environments_context_var": (
        "a sample's sandboxes, for the running sample's record"
    ),
    "inspect_ai.util._sandbox.context:sandbox_with_environments_context_var": (
        "sandboxes found by file, to see whether a tool asked for one"
    ),
    "inspect_ai.util._sandbox.events:SandboxTimeoutError": (
        "a sandbox's own timeout, which is an error and not a limit"
    ),
    "inspect_ai.util._sandbox.limits:set_sandbox_limits": (
        "output limits from INSPECT_SANDBOX_MAX_*"
    ),
    "inspect_ai.util._sandbox.lifecycle:SandboxLifecycleState": (
        "providers keep what they must clean up on it"
    ),
    "inspect_ai.util._sandbox.lifecycle:_lifecycle_state": (
        "providers keep what they must clean up on it"
    ),
    "inspect_ai.util._sandbox.registry:registry_find_sandboxenv": "a provider's class by its name",
    "inspect_ai.util._sandbox.service:SandboxService": (
        "carries out a program's call: limits, terminations, checks"
    ),
    "inspect_ai.util._store:init_subtask_store": "store() of a sample",
    "inspect_ai.util._subprocess:init_max_subprocesses": "the option `max_subprocesses` of an eval",
    "inspect_ai.util._subprocess:open_process": (
        "a process whose start is cancelled can keep its event loop from ever ending"
    ),
}


OPTIONAL_NAMES: dict[str, str] = {
    "inspect_ai._control.pause:wait_generate_dispatch": "an operator's pause holds model calls",
    "inspect_ai._sentinel._context:active_sentinel": "whether a monitor watches the model calls",
    "inspect_ai._util.error:exception_message": "error of a model call's event",
    "inspect_ai._util.working:sample_clock": "how long a model call took",
    "inspect_ai.hooks._hooks:get_all_hooks": "whether hooks ask for model calls",
    "inspect_ai.hooks._legacy:_send_telemetry": "whether telemetry asks for usage",
    "inspect_ai.log._refusal:report_refusal": "counts refusals as eval() does",
    "inspect_ai.log._samples:set_active_sample_total_turns": "turns of the running sample",
    "inspect_ai.model._call_tools:tool_call_view": "views of the tool calls in a reply",
    "inspect_ai.model._call_tools:span": "spans around tools, which only a log needs",
    "inspect_ai.model._model:_check_limits_before_dispatch": (
        "refuses a call when a token or cost limit is reached"
    ),
    "inspect_ai.model._model:_model_event_sink": "whether an agent bridge takes model events",
    "inspect_ai.model._model:record_and_check_model_usage": "usage and cost, which limits read",
    "inspect_ai.model._model:record_sample_model_fallback": "fallbacks that a reply reports",
    "inspect_ai.model._model_output:usage_input_tokens": "context size of a reply",
    "inspect_ai.solver._transcript:solver_transcript": (
        "events around each solver, which only a log needs"
    ),
    "inspect_ai.util._limit:record_turn": "counts turns, which limits read",
    "inspect_ai.util._limit:turn_count": "turns so far",
}
"""Names of fast paths: a release that lacks one, or uses others, takes the long way."""

_MODEL_CALL = ("generate", "_generate", "_record_model_interaction", "_connection_concurrency")
"""Methods of ``Model`` that the fast path of model calls stands for."""

KNOWN_MODEL_CALLS = {
    "9067fa6926aabc84": "0.3.285",
}
"""Releases whose model calls are known to do what the fast path does, by what those methods use."""


def _missing_names() -> list[str]:
    missing = []
    for name in PRIVATE_NAMES:
        module, _, attribute = name.partition(":")
        try:
            if not hasattr(importlib.import_module(module), attribute):
                missing.append(name)
        except ImportError:
            missing.append(name)
    return missing


def check_inspect_version() -> None:
    """Look up every private name.

    Raises:
        VersionError: Names the installed release, the supported ones and what is missing.
    """
    missing = _missing_names()
    if missing:
        raise VersionError(
            f"inspect-ai {version('inspect-ai')} is not supported by inspect-tinker-plugin "
            f"{version('inspect-tinker-plugin')} (supported: {SUPPORTED_INSPECT}); "
            f"it lacks {', '.join(missing)}. Install a supported release of either package."
        )


check_inspect_version()

from inspect_ai import Task
from inspect_ai._eval.context import init_task_context
from inspect_ai._eval.loader import (
    create_file_tasks,
    load_file_tasks,
    load_task_spec,
    resolve_task_sandbox,
    solver_from_spec,
)
from inspect_ai._eval.score import resolve_scorers
from inspect_ai._eval.task.generate import task_generate
from inspect_ai._eval.task.images import capture_task_input_media, materialize_sample_input
from inspect_ai._eval.task.log import resolve_eval_metrics, resolve_eval_scorers
from inspect_ai._eval.task.run import create_eval_sample, resolve_plan
from inspect_ai._eval.task.sandbox import (
    read_sandboxenv_file,
    resolve_sample_files,
    resolve_sandbox,
)
from inspect_ai._eval.task.util import sample_messages, task_file, task_run_dir
from inspect_ai._util.decorator import parse_decorators
from inspect_ai._util.dotenv import init_dotenv
from inspect_ai._util.environ import environ_vars
from inspect_ai._util.error import PrerequisiteError
from inspect_ai._util.exception import TerminateSampleError
from inspect_ai._util.path import chdir
from inspect_ai._util.registry import (
    is_registry_object,
    registry_find,
    registry_lookup,
    registry_params,
    registry_unqualified_name,
)
from inspect_ai._util.working import init_sample_working_time
from inspect_ai.agent._acp.transport import _acp_live_active
from inspect_ai.agent._bridge.sandbox.bridge import (  # type: ignore[attr-defined]  # to exchange
    sandbox_with_injected_tools as _inspect_bridge_sandbox,
)
from inspect_ai.agent._bridge.sandbox.service import MODEL_SERVICE
from inspect_ai.agent._bridge.sandbox.service import (  # type: ignore[attr-defined]  # to exchange
    sandbox_service as _inspect_bridge_service,
)
from inspect_ai.agent._bridge.util import in_bridge_model_generate
from inspect_ai.agent._handoff import AgentTool
from inspect_ai.dataset import Sample
from inspect_ai.event import Event, InterruptEvent, ModelEvent, ToolEvent
from inspect_ai.event._model import LIMIT_CANCEL_ERROR
from inspect_ai.log import transcript
from inspect_ai.log._log import eval_error
from inspect_ai.log._samples import ActiveSample, _sample_active
from inspect_ai.log._transcript import Transcript, init_transcript
from inspect_ai.model import GenerateConfig, Model, _call_tools
from inspect_ai.model._assistant_internal import init_sample_assistant_internal
from inspect_ai.model._call_tools import parse_tool_call, tool_parse_error_message
from inspect_ai.model._model import init_sample_model_data
from inspect_ai.model._model_config import (
    model_roles_config_to_model_roles,
    model_roles_to_model_roles_config,
)
from inspect_ai.scorer._metric import to_metric_specs
from inspect_ai.scorer._score import init_scoring_context
from inspect_ai.scorer._scorer import as_scorer_spec, unique_scorer_name
from inspect_ai.solver import TaskState
from inspect_ai.solver._fork import set_task_generate
from inspect_ai.solver._solver import SolverSpec
from inspect_ai.solver._task_state import sample_state, set_sample_state, state_jsonable
from inspect_ai.tool import ToolCall, ToolCallError, ToolDef
from inspect_ai.util import Limit, SandboxEnvironment, _concurrency, _subprocess, display_type
from inspect_ai.util._anyio import inner_exception
from inspect_ai.util._checkpoint.checkpointer_factory import create_checkpointer
from inspect_ai.util._limit import (
    monitor_working_limit,
    record_sample_limit_data,
    reset_sample_limit_data,
)
from inspect_ai.util._sandbox.context import (
    cleanup_sandbox_environments_sample,
    init_sandbox_environments_sample,
    sandbox_environments_context_var,
    sandbox_with_environments_context_var,
)
from inspect_ai.util._sandbox.events import SandboxTimeoutError
from inspect_ai.util._sandbox.lifecycle import SandboxLifecycleState, _lifecycle_state
from inspect_ai.util._sandbox.limits import set_sandbox_limits
from inspect_ai.util._sandbox.registry import registry_find_sandboxenv
from inspect_ai.util._sandbox.service import SandboxService
from inspect_ai.util._store import init_subtask_store

__all__ = [
    "KNOWN_MODEL_CALLS",
    "MODEL_SERVICE",
    "OPTIONAL_NAMES",
    "PRIVATE_ATTRIBUTES",
    "PRIVATE_NAMES",
    "SUPPORTED_INSPECT",
    "TRACE",
    "ActiveSample",
    "PrerequisiteError",
    "SandboxLifecycleState",
    "SandboxService",
    "SandboxTimeoutError",
    "SolverSpec",
    "TerminateSampleError",
    "Transcript",
    "_acp_live_active",
    "_lifecycle_state",
    "_sample_active",
    "bridge_dialect",
    "capture_task_input_media",
    "chdir",
    "check_inspect_version",
    "cleanup_sandbox_environments_sample",
    "create_checkpointer",
    "create_eval_sample",
    "create_file_tasks",
    "digest_of_model_calls",
    "enter_scoring_context",
    "enter_task_context",
    "environ_vars",
    "eval_error",
    "in_one_line",
    "init_dotenv",
    "init_sample_assistant_internal",
    "init_sample_model_data",
    "init_sample_working_time",
    "init_sandbox_environments_sample",
    "init_scoring_context",
    "init_subtask_store",
    "init_transcript",
    "inner_exception",
    "knows_model_calls",
    "leave_out_solver_events",
    "limit_subprocesses",
    "load_file_tasks",
    "load_task_spec",
    "materialize_sample_input",
    "model_roles_config_to_model_roles",
    "monitor_working_limit",
    "optional_names",
    "parse_decorators",
    "parse_tool_call",
    "read_sandboxenv_file",
    "record_event",
    "record_sample_limit_data",
    "recorded_events",
    "registry_find",
    "registry_find_sandboxenv",
    "registry_lookup",
    "registry_params",
    "registry_unqualified_name",
    "reset_sample_limit_data",
    "resolve_plan",
    "resolve_sample_files",
    "resolve_sandbox",
    "resolve_scorers",
    "resolve_task_sandbox",
    "role_falls_back_on_active_model",
    "route_agent_bridges",
    "route_tool_calls",
    "running_sample",
    "running_sample_id",
    "sample_messages",
    "sample_state",
    "sandbox_environments_context_var",
    "scoring_in_logs",
    "set_sample_state",
    "set_sandbox_limits",
    "set_task_generate",
    "share_limits_between_loops",
    "solver_from_spec",
    "somebody_watches_model_calls",
    "start_processes_uncut",
    "state_jsonable",
    "state_limits",
    "task_file",
    "task_generate",
    "task_run_dir",
    "tool_parse_error_message",
    "unique_scorer_name",
    "unproxied",
    "unqualified_name",
    "watch_sandbox_use",
]


PRIVATE_ATTRIBUTES: dict[tuple[type, str], str] = {
    (Model, "_resolve_config"): "the policy ignores time-outs, retries and connection limits",
    (Model, "_generate"): "the fast path of model calls takes its place",
    (Model, "_connection_concurrency"): "a parked call needs no place in a pool",
    (Transcript, "_event_updated"): "a call that a limit has cut off is no longer pending",
    (Transcript, "_event"): "appends an event; the public methods only add info events",
    (TaskState, "_message_limit"): "the limit object that the sample runs under",
    (TaskState, "_token_limit"): "the limit object that the sample runs under",
    (TaskState, "_cost_limit"): "the limit object that the sample runs under",
}
"""Private methods and attributes of public classes, with the reason for each."""


def record_event(event: Event) -> None:
    """Append an event to the transcript of the running episode."""
    transcript()._event(event)


_DIALECTS = {
    "inspect_ai.agent._bridge.completions": "chat",
    "inspect_ai.agent._bridge.responses_impl": "responses",
    "inspect_ai.agent._bridge.anthropic_api_impl": "anthropic",
    "inspect_ai.agent._bridge.google_api_impl": "google",
}


def bridge_dialect() -> str | None:
    """Return the model API through which a call reached the agent bridge, if it did.

    Inspect translates all of them into the same call and does not record which one it was; the
    translator's module is among the callers.
    """
    if not in_bridge_model_generate():
        return None
    frame = inspect.currentframe()
    while frame is not None:
        dialect = _DIALECTS.get(frame.f_globals.get("__name__", ""))
        if dialect is not None:
            return dialect
        frame = frame.f_back
    return "unknown"


def unproxied(environment: SandboxEnvironment) -> SandboxEnvironment:
    """Return the provider's own object behind the proxy that records sandbox events."""
    inner = getattr(environment, "_sandbox", environment)
    assert isinstance(inner, SandboxEnvironment)
    return inner


def in_one_line(error: BaseException) -> str:
    """Return the message of an error, without line breaks and without Inspect's markup."""
    text = str(getattr(error, "message", None) or error)
    plain = re.sub(
        r"\[/?(?:bold|italic|red|green|yellow|blue|magenta|cyan|link)\b[^]]*\]", "", text
    )
    return " ".join(plain.split()).removeprefix("ERROR: ") or repr(error)


def role_falls_back_on_active_model() -> bool:
    """Whether the caller that finds a role unset will use the active model instead.

    For mappings of roles. The caller of their ``get`` is either ``get_model``, which
    may have been given a default or an error to raise instead, or code that handles it itself.
    """
    frame = sys._getframe(2)
    names = frame.f_code.co_name, frame.f_globals.get("__name__")
    if names != ("get_model", "inspect_ai.model._model"):
        return False
    given = frame.f_locals
    return not (given.get("model") or given.get("default") or given.get("required"))


def unqualified_name(name: str) -> str:
    """Return a registry name without its package."""
    return registry_unqualified_name(name)


def scoring_in_logs(task: Task, model_roles: dict[str, Model | list[Model]]) -> dict[str, Any]:
    """Return the fields of an ``EvalSpec`` that `inspect score` makes scorers and judges from.

    As in an eval's log, keys of APIs are left out. A scorer that no ``@scorer`` function made
    cannot be made again: it is left out, too.
    """
    scorers = [as_scorer_spec(each) for each in task.scorer or [] if is_registry_object(each)]
    metrics = None if task.metrics is None else to_metric_specs(task.metrics)
    return {
        "scorers": resolve_eval_scorers(scorers),
        "metrics": resolve_eval_metrics(metrics),
        "model_roles": model_roles_to_model_roles_config(model_roles) or None,
    }


def enter_scoring_context(
    model: Model,
    model_roles: dict[str, Model | list[Model]],
    state: TaskState,
    events: Sequence[Event],
) -> Transcript:
    """Bind what a scorer of a logged sample reads to the current context, as `inspect score` does.

    Returns:
        The transcript, which holds the sample's events.
    """
    init_task_context(model, model_roles)
    init_subtask_store(state.store)
    recorded = Transcript([*events], log_model_api=False)
    init_transcript(recorded)
    return recorded


_CONTEXT_PARAMETERS = inspect.signature(init_task_context).parameters


def enter_task_context(
    model: Model,
    model_roles: dict[str, Model | list[Model]],
    config: GenerateConfig,
    task: Task,
) -> None:
    """Bind model, roles, approval and review of a task to the current context, as an eval does.

    Releases up to 0.3.277 have nothing that asks for the task, and up to 0.3.278 nothing
    that asks for its description.
    """
    about_task = {
        "sentinel": None,
        "task_metadata": task.metadata,
        "task_description": getattr(task, "description", None),
    }
    known: dict[str, Any] = {
        name: value for name, value in about_task.items() if name in _CONTEXT_PARAMETERS
    }
    init_task_context(model, model_roles, config, task.approval, task.review, **known)


def running_sample(
    *,
    task: str,
    model: str,
    sample: Sample,
    state: TaskState,
    transcript: Transcript,
    time_limit: int | None,
    working_limit: int | None,
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
        eval_id="",
        sample_uuid=state.uuid,
    )
    active.live_state = state
    active.on_interrupt = lambda cause: _record_interrupt(transcript)
    _sample_active.set(active)
    _acp_live_active.set(True)
    return active


def running_sample_id() -> tuple[int | str | None, int]:
    """Return id and epoch of the sample running in this context; ``(None, 0)`` outside of one."""
    active = _sample_active.get(None)
    return (None, 0) if active is None else (active.sample.id, active.epoch)


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


# fast paths


@cache
def optional_names() -> SimpleNamespace | None:
    """Return the names of fast paths; ``None`` when one is missing in this release."""
    found = SimpleNamespace()
    for name in OPTIONAL_NAMES:
        module, _, attribute = name.partition(":")
        try:
            setattr(found, attribute, getattr(importlib.import_module(module), attribute))
        except (ImportError, AttributeError):
            return None
    return found


def digest_of_model_calls() -> str:
    """Return what tells the model calls of one release of Inspect from those of another.

    It changes when a call uses anything that it did not use before, and not with comments, layout
    or the version of Python.
    """
    used: set[str] = set()
    for name in _MODEL_CALL:
        method = getattr(Model, name, None)
        source = textwrap.dedent(inspect.getsource(method)) if method is not None else ""
        for node in ast.walk(ast.parse(source)):
            match node:
                case ast.Name(id=used_name) | ast.Attribute(attr=used_name):
                    used.add(used_name)
                case ast.arg(arg=used_name) | ast.alias(name=used_name):
                    used.add(used_name)
                case ast.keyword(arg=str(used_name)):
                    used.add(used_name)
    return hashlib.sha256(" ".join(sorted(used)).encode()).hexdigest()[:16]


@cache
def knows_model_calls() -> bool:
    """Whether the fast path of model calls does what this release of Inspect does."""
    try:
        return optional_names() is not None and digest_of_model_calls() in KNOWN_MODEL_CALLS
    except (OSError, SyntaxError, TypeError):  # no source at hand
        return False


def somebody_watches_model_calls() -> bool:
    """Whether hooks, telemetry, a monitor, an agent bridge or a display asks for model calls."""
    parts = optional_names()
    return (
        parts is None
        or any(hook.enabled() for hook in parts.get_all_hooks())
        or sys.modules["inspect_ai.hooks._legacy"]._send_telemetry is not None
        or parts.active_sentinel() is not None
        or parts._model_event_sink.get() is not None
        or display_type() == "conversation"
    )


_no_solver_events: ContextVar[bool] = ContextVar("inspect_rl_no_solver_events", default=False)


class _Unrecorded(AbstractAsyncContextManager["_Unrecorded"]):
    """Takes the place of the events around a solver."""

    async def __aexit__(self, *_: object) -> None:
        pass

    def complete(self, after_state: TaskState) -> None:
        """Compare nothing."""


def leave_out_solver_events() -> None:
    """Record neither spans nor changes of the solvers and tools that run in this context.

    Inspect looks both functions up each time that it needs them. A solver that could not be
    recorded, for want of a name, still fails.
    """
    parts = optional_names()
    if parts is None:
        return
    module = sys.modules["inspect_ai.solver._transcript"]
    if module.solver_transcript is parts.solver_transcript:

        def solver_transcript(solver: Any, state: TaskState, name: str | None = None) -> Any:
            if not _no_solver_events.get():
                return parts.solver_transcript(solver, state, name)
            if name is None:
                registry_unqualified_name(solver)
            return _Unrecorded()

        def span_of(name: str, *, type: str | None = None, **others: Any) -> Any:
            if _no_solver_events.get() and type == "tool":
                return nullcontext()
            return parts.span(name=name, type=type, **others)

        module.solver_transcript = solver_transcript  # type: ignore[attr-defined]
        sys.modules["inspect_ai.model._call_tools"].span = span_of  # type: ignore[attr-defined]
    _no_solver_events.set(True)


def state_limits(state: TaskState) -> tuple[Limit, Limit, Limit]:
    """Message, token and cost limit of a state, to be entered around its solver."""
    return state._message_limit, state._token_limit, state._cost_limit


# what Inspect keeps for the whole process

TRACE = 13
"""Level of the records in Inspect's trace log, between ``DEBUG`` and ``INFO``."""


class _AnyioOfLimits:
    """Replaces ``anyio`` in the module of Inspect's limits, with limiters for all event loops."""

    CapacityLimiter = ProcessLimiter
    Semaphore = ProcessSemaphore

    def __getattr__(self, name: str) -> Any:
        return getattr(anyio, name)


def share_limits_between_loops() -> None:
    """Make Inspect's process-wide limits work with, and count over, all event loops.

    ``concurrency()`` (a model's connections, subprocesses, a tool's own calls) waits in limiters
    that belong to one loop. A trainer with several threads and a loop in each would wait for
    ever, since a waiter that is let in from another loop is not woken.
    """
    if isinstance(_concurrency.anyio, _AnyioOfLimits):  # type: ignore[attr-defined]  # its import
        return
    _concurrency.anyio = _AnyioOfLimits()  # type: ignore[attr-defined,assignment]  # stands in
    made = getattr(_concurrency._concurrency_registry, "_semaphores", {})
    for key, limit in list(made.items()):
        if limit.value >= limit.concurrency:  # one that is in use belongs to a running eval
            made.pop(key, None)


def limit_subprocesses(count: int | None) -> None:
    """Set how many of Inspect's subprocesses run at once; ``None`` leaves that to Inspect.

    The limit is the process's: episodes wait for the subprocesses of others. A release whose
    limits have a fixed size keeps the size of the first subprocess.
    """
    if count is None:
        return
    _subprocess.init_max_subprocesses(count)
    limits = getattr(_concurrency._concurrency_registry, "_semaphores", {})
    limit = limits.get("subprocesses")
    if limit is not None and limit.concurrency != count:
        limit.concurrency = count


START_PATIENCE = 0.5
"""Seconds that a process whose start was cancelled has to finish starting, before it is killed."""

_open_process = _subprocess.open_process  # type: ignore[attr-defined]  # its import


async def _open_process_uncut(*args: Any, **kwargs: Any) -> Process:
    """Start a process for Inspect; if the start is cancelled, finish it and kill the process.

    asyncio itself waits for a process whose start is cancelled, and does so for ever if its pipes
    were not connected yet: they are connected in another task, which a loop that ends cancels as
    well. Only a second cancellation ends that wait, and nobody else sends one.
    """
    starting = asyncio.ensure_future(_open_process(*args, **kwargs))
    try:
        return await asyncio.shield(starting)
    except asyncio.CancelledError:
        # Done by the loop: this task may be cancelled again, and leave.
        asyncio.get_running_loop().call_later(START_PATIENCE, starting.cancel)
        starting.add_done_callback(_kill)
        with anyio.CancelScope(shield=True):
            await asyncio.wait([starting])
            if not starting.cancelled() and starting.exception() is None:
                with suppress(Exception), anyio.move_on_after(START_PATIENCE):
                    await starting.result().aclose()
        raise


def _kill(started: asyncio.Task[Process]) -> None:
    if not started.cancelled() and started.exception() is None:
        with suppress(ProcessLookupError):
            started.result().kill()


def start_processes_uncut() -> None:
    """Make Inspect start its processes such that an event loop can end at any moment."""
    _subprocess.open_process = _open_process_uncut  # type: ignore[attr-defined]  # its import


# tool calls

ToolRouter = Callable[[Any, ToolCall], Any]
"""Takes a tool's function and the approved call, and returns what to call instead."""

_inspect_call_tool = _call_tools.call_tool
_USED_OF_CALL_TOOL = {"tools", "call", "on_execute"}
"""Parameters of Inspect's dispatcher that matter here; 0.3.283 inserted one between them."""


def route_tool_calls(current: Callable[[], ToolRouter | None]) -> None:
    """Let the router of the running context choose what carries out its approved tool calls.

    Inspect announces an approved and validated call through ``on_execute`` and looks the
    tool's function up only then; the function is exchanged at that moment, on a copy of the
    definition. Handoffs to agents are left alone, and so are calls in a context without a router.

    Raises:
        VersionError: the dispatcher has other parameters than the supported releases.
    """
    signature = inspect.signature(_inspect_call_tool)
    if not set(signature.parameters) >= _USED_OF_CALL_TOOL:
        raise VersionError(
            f"tool executors do not work with inspect-ai {version('inspect-ai')}: the "
            "parameters of its tool dispatcher have changed. Run without tool_executor."
        )

    async def call_tool(*args: Any, **kwargs: Any) -> Any:
        router = current()
        if router is None:
            return await _inspect_call_tool(*args, **kwargs)
        given = signature.bind(*args, **kwargs).arguments
        tools: list[ToolDef] = given["tools"]
        call: ToolCall = given["call"]
        on_execute: Callable[[ToolCall], None] | None = given.get("on_execute")
        chosen = [copy(tool) if tool.name == call.function else tool for tool in tools]
        definition = next((tool for tool in chosen if tool.name == call.function), None)

        def announced(approved: ToolCall) -> None:
            if definition is not None and not isinstance(definition.tool, AgentTool):
                definition.tool = router(definition.tool, approved)
            if on_execute is not None:
                on_execute(approved)

        return await _inspect_call_tool(**{**given, "tools": chosen, "on_execute": announced})

    _call_tools.call_tool = call_tool


# agent bridges


def route_agent_bridges(
    stand_in: Callable[[str | None], Awaitable[Any]],
    serve: Callable[..., Awaitable[None]],
) -> None:
    """Let the running context choose what an agent bridge takes for its sandbox.

    Args:
        stand_in: given a sandbox's name, returns its stand-in, or ``None`` for Inspect's own way.
        serve: given a stand-in, the service's name, its methods and the event that tells of its
            start, carries out what programs ask of it.
    """

    async def sandbox_with_injected_tools(*, sandbox_name: str | None = None) -> Any:
        found = await stand_in(sandbox_name)
        if found is not None:
            return found
        return await _inspect_bridge_sandbox(sandbox_name=sandbox_name)

    async def sandbox_service(**given: Any) -> Any:
        if isinstance(given["sandbox"], SandboxEnvironment):
            return await _inspect_bridge_service(**given)
        return await serve(given["sandbox"], given["name"], given["methods"], given.get("started"))

    parts = "inspect_ai.agent._bridge.sandbox"
    vars(sys.modules[f"{parts}.bridge"])["sandbox_with_injected_tools"] = (
        sandbox_with_injected_tools
    )
    vars(sys.modules[f"{parts}.service"])["sandbox_service"] = sandbox_service


class SandboxWatch(dict[str, SandboxEnvironment]):
    """The sandboxes of a sample; notices when they are looked up."""

    used = False

    def __getattribute__(self, name: str) -> Any:
        if name in {"get", "keys", "values", "items"}:
            self.used = True
        return super().__getattribute__(name)

    def __len__(self) -> int:
        self.used = True
        return super().__len__()

    def __getitem__(self, name: str) -> SandboxEnvironment:
        self.used = True
        return super().__getitem__(name)


@contextmanager
def watch_sandbox_use() -> Iterator[SandboxWatch]:
    """Notice whether this context (a tool call, say) asks for a sandbox."""
    environments = sandbox_environments_context_var.get(None)
    if environments is None:  # asking for one raises
        yield SandboxWatch()
        return
    watch = SandboxWatch(environments)
    token = sandbox_environments_context_var.set(watch)
    found = sandbox_with_environments_context_var.set({})
    try:
        yield watch
    finally:
        sandbox_environments_context_var.reset(token)
        sandbox_with_environments_context_var.reset(found)
