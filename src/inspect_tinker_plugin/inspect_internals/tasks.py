"""Tasks and their samples outside of an eval.

Of tasks: how Inspect loads, names and watches them, and how it reports bad input. Of a sample: its
context, state, limits, transcript and entry in a log.
"""

from __future__ import annotations

import inspect
import re
import sys
import traceback
from collections.abc import Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext, suppress
from importlib import import_module
from typing import Any, BinaryIO, NoReturn

from inspect_ai import Task
from inspect_ai._display.core.active import init_task_screen
from inspect_ai._display.core.display import TaskScreen
from inspect_ai._eval.context import init_task_context
from inspect_ai._eval.loader import (
    as_solver_spec,
    create_file_tasks,
    load_file_tasks,
    load_task_spec,
    solver_from_spec,
)
from inspect_ai._eval.score import resolve_scorers
from inspect_ai._eval.task.constants import TASK_ALL_PARAMS_ATTR
from inspect_ai._eval.task.generate import task_generate
from inspect_ai._eval.task.images import capture_task_input_media, materialize_sample_input
from inspect_ai._eval.task.log import (
    plan_to_eval_plan,
    resolve_eval_metrics,
    resolve_eval_scorers,
    resolve_package_revision,
    resolve_revision,
    resolve_task_distribution,
)
from inspect_ai._eval.task.run import create_eval_sample, resolve_plan
from inspect_ai._eval.task.util import sample_messages, task_file, task_run_dir
from inspect_ai._util.decorator import parse_decorators
from inspect_ai._util.dotenv import init_dotenv
from inspect_ai._util.error import PrerequisiteError
from inspect_ai._util.exception import TerminateSampleError
from inspect_ai._util.file import file
from inspect_ai._util.json import to_json_safe
from inspect_ai._util.path import chdir
from inspect_ai._util.registry import (
    has_registry_params,
    is_registry_object,
    registry_find,
    registry_lookup,
    registry_params,
    registry_unqualified_name,
)
from inspect_ai._util.working import init_sample_working_time
from inspect_ai.agent._acp.transport import _acp_live_active
from inspect_ai.approval._policy import config_from_approval_policies
from inspect_ai.dataset import Sample
from inspect_ai.event import Event, InterruptEvent, ModelEvent, ToolEvent
from inspect_ai.event._model import LIMIT_CANCEL_ERROR
from inspect_ai.log import EvalError, EvalLog, EvalRevision, transcript
from inspect_ai.log._log import eval_error
from inspect_ai.log._samples import ActiveSample, _sample_active
from inspect_ai.log._transcript import Transcript, init_transcript
from inspect_ai.model import GenerateConfig, Model, ModelUsage
from inspect_ai.model._assistant_internal import init_sample_assistant_internal
from inspect_ai.model._model import (
    _model_roles,
    active_model,
    active_model_context_var,
    init_sample_model_data,
    sample_model_usage,
    sample_role_usage,
)
from inspect_ai.model._model_config import model_roles_to_model_roles_config
from inspect_ai.review._policy import config_from_review_policies
from inspect_ai.scorer._metric import to_metric_specs
from inspect_ai.scorer._score import init_scoring_context
from inspect_ai.scorer._scorer import as_scorer_spec, unique_scorer_name
from inspect_ai.solver import Solver, TaskState
from inspect_ai.solver._fork import set_task_generate
from inspect_ai.solver._solver import SolverSpec
from inspect_ai.solver._task_state import sample_state, set_sample_state, state_jsonable
from inspect_ai.tool import ToolCallError
from inspect_ai.util import Limit, _concurrency, _subprocess, registry_info
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

__all__ = [
    "ActiveSample",
    "PrerequisiteError",
    "SentinelFailure",
    "SolverSpec",
    "TerminateSampleError",
    "Transcript",
    "active_model",
    "arguments_in_logs",
    "bind_model",
    "bind_roles",
    "capture_task_input_media",
    "create_eval_sample",
    "create_file_tasks",
    "current_sample",
    "enter_task_context",
    "error_record",
    "forget_tools",
    "in_one_line",
    "init_dotenv",
    "init_sample_assistant_internal",
    "init_sample_model_data",
    "init_sample_working_time",
    "init_scoring_context",
    "init_subtask_store",
    "init_transcript",
    "inner_exception",
    "is_protocol",
    "limit_subprocesses",
    "load_file_tasks",
    "load_task_spec",
    "materialize_sample_input",
    "monitor_working_limit",
    "open_file",
    "parse_decorators",
    "plan_to_eval_plan",
    "policies_in_logs",
    "record_event",
    "record_sample_limit_data",
    "recorded_events",
    "registry_find",
    "registry_lookup",
    "registry_params",
    "registry_unqualified_name",
    "reset_sample_limit_data",
    "resolve_plan",
    "resolve_scorers",
    "resolve_sentinel",
    "running_sample",
    "sample_messages",
    "sample_state",
    "sample_usage",
    "scorer_args",
    "scoring_in_logs",
    "sentinel_solving",
    "set_sample_state",
    "set_task_generate",
    "solver_from_spec",
    "source_in_logs",
    "state_jsonable",
    "state_limits",
    "task_file",
    "task_generate",
    "task_run_dir",
    "text_of",
    "to_json_safe",
    "unique_id",
    "unique_scorer_name",
    "with_registered_scorers",
    "without_markup",
]


def open_file(path: str) -> AbstractContextManager[BinaryIO]:
    """Open a file to be read, of this machine or of a store that Inspect knows."""
    return file(path, "rb")


def in_one_line(error: BaseException) -> str:
    """Return the message of an error, without line breaks and without Inspect's markup."""
    text = without_markup(str(getattr(error, "message", None) or error))
    return " ".join(text.split()).removeprefix("ERROR: ") or repr(error)


def without_markup(text: str) -> str:
    """Return a message of Inspect without the markup that it gives its own display."""
    return re.sub(r"\[/?(?:bold|italic|red|green|yellow|blue|magenta|cyan|link)\b[^]]*\]", "", text)


@contextmanager
def bind_model(model: Model) -> Iterator[None]:
    """Make a model the active one, as `inspect eval` does before it makes tasks and solvers."""
    token = active_model_context_var.set(model)
    try:
        yield
    finally:
        active_model_context_var.reset(token)


@contextmanager
def bind_roles(roles: dict[str, Model | list[Model]]) -> Iterator[None]:
    """Bind model roles, as `inspect eval` does before it makes tasks and solvers."""
    token = _model_roles.set(roles)
    try:
        yield
    finally:
        _model_roles.reset(token)


_REGISTERED = "registered"
"""Entry of a logged scorer's metadata with its name in Inspect's registry: `package/name`, or the
bare name for one of a task's file."""


def with_registered_scorers(log: EvalLog) -> EvalLog:
    """Return a log's header with scorers by their names in Inspect's registry.

    Where it does not hold these names, its scorers are Inspect's own, or of the task's file.
    """
    found = log.model_copy(update={"eval": log.eval.model_copy(deep=True)})
    for scorer in found.eval.scorers or []:
        builtin = f"inspect_ai/{scorer.name}"
        bare = builtin if registry_lookup("scorer", builtin) else scorer.name
        scorer.name = (scorer.metadata or {}).get(_REGISTERED, bare)
    return found


def scoring_in_logs(task: Task, model_roles: dict[str, Model | list[Model]]) -> dict[str, Any]:
    """Return the fields of an ``EvalSpec`` that `inspect score` makes scorers and judges from.

    As in an eval's log, keys of APIs are left out, and scorers have their names without packages;
    their metadata holds the whole names. A scorer that no ``@scorer`` function made cannot be made
    again: it is left out, too.
    """
    made = [each for each in task.scorer or [] if is_registry_object(each)]
    scorers = resolve_eval_scorers([as_scorer_spec(each) for each in made])
    for each, logged in zip(made, scorers or [], strict=True):
        logged.metadata = {**(logged.metadata or {}), _REGISTERED: registry_info(each).name}
    metrics = None if task.metrics is None else to_metric_specs(task.metrics)
    return {
        "scorers": scorers,
        "metrics": resolve_eval_metrics(metrics),
        "model_roles": model_roles_to_model_roles_config(model_roles) or None,
    }


def arguments_in_logs(task: Task, solver: Solver | None) -> dict[str, Any]:
    """Return the fields of an ``EvalSpec`` about a task's arguments, and what replaces its solver.

    Of the task's own solver, an eval's log says nothing there; nor can it name one that no
    ``@solver`` or ``@agent`` function made.
    """
    passed = dict(registry_params(task)) if is_registry_object(task) else {}
    about = {
        "task_args": getattr(task, TASK_ALL_PARAMS_ATTR, passed),
        "task_args_passed": passed,
    }
    if solver is not None and is_registry_object(solver):
        spec = as_solver_spec(solver)
        about |= {
            "solver": spec.solver,
            "solver_args": spec.args,
            "solver_args_passed": spec.args_passed,
        }
    return about


def policies_in_logs(task: Task) -> dict[str, Any]:
    """Return the fields of an ``EvalConfig`` about approval and review, if parts have names."""
    about: dict[str, Any] = {}
    with suppress(ValueError):
        if task.approval:
            about["approval"] = config_from_approval_policies(task.approval)
    with suppress(ValueError):
        if task.review:
            about["review"] = config_from_review_policies(task.review)
    return about


def source_in_logs(task: Task) -> tuple[EvalRevision | None, dict[str, str]]:
    """Return the git revision of a task's code, and the version of the package that it is in.

    For a moment, the process changes to the task's folder.
    """
    package = resolve_task_distribution(task.registry_name)
    with chdir(task_run_dir(task)):
        revision = resolve_package_revision(package) or resolve_revision()
    return revision, {} if package is None else {package.name: package.version}


try:
    from inspect_ai._sentinel._config import (
        SentinelConfig,
        _is_constructed,
        _require_sentinel,
        resolve_sentinel_root,
        sentinel_config,
    )
    from inspect_ai._sentinel._context import SentinelFailure
    from inspect_ai._sentinel._scope import sentinel_solving
except ImportError:  # up to 0.3.277 there are none

    class SentinelFailure(Exception):  # type: ignore[no-redef]
        """What Inspect raises for a monitor or protocol that raised ``error``."""

        error: Exception

    def sentinel_solving() -> AbstractContextManager[None]:  # type: ignore[misc]
        """Mark nothing."""
        return nullcontext()

    def _require_sentinel() -> None:
        raise PrerequisiteError("this release of inspect-ai has no sentinels")


def resolve_sentinel(spec: Any) -> tuple[Any, Any]:
    """Make the monitors and protocols of a task; those without a protocol are only observed.

    Args:
        spec: What ``Task(sentinel=...)`` and ``--sentinel`` take, or monitors alone.

    Returns:
        The protocol at the root, and the configuration that a log states.
    """
    _require_sentinel()
    package: Any = import_module("inspect_sentinel")
    if isinstance(spec, str | SentinelConfig) or not _is_constructed(spec):
        spec = import_module("inspect_sentinel._integration").sentinel_from_config(spec)
    listed = spec.values() if isinstance(spec, dict) else spec if isinstance(spec, list) else [spec]
    if all(registry_info(each).type == "monitor" for each in listed):
        spec = package.observe_only(spec if isinstance(spec, dict) else list(listed))
    return resolve_sentinel_root(spec), sentinel_config(spec)


def is_protocol(name: str) -> bool:
    """Whether a protocol has this registry name, rather than a monitor."""
    names = (name, f"inspect_sentinel/{name}")
    return any(registry_lookup("protocol", each) is not None for each in names)


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


class _NobodyThere(TaskScreen):
    """The console of an episode, which nobody sits before: whoever asks there would wait for ever.

    Inspect reads the answer in the event loop, so every other episode would wait, too.
    """

    def input_screen(self, *args: Any, **kwargs: Any) -> NoReturn:
        raise RuntimeError(
            "a person was asked at the console, and nobody sits before a training. Leave out what "
            "asks (ask_user, the human approver), or put a model in the person's place"
        )


_CONTEXT_PARAMETERS = inspect.signature(init_task_context).parameters


def enter_task_context(
    model: Model,
    model_roles: dict[str, Model | list[Model]],
    config: GenerateConfig,
    task: Task,
    sentinel: object,
) -> None:
    """Bind model, roles, approval, review and the sentinel of a task to the current context.

    In it, nobody can be asked at the console.

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
    init_task_screen(_NobodyThere())


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

    The limit is the process's: episodes wait for the subprocesses of others.
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
