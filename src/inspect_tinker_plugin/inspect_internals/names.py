"""The private names of Inspect that this package uses, each with the reason why, and their check.

All of them are looked up before anything is imported from them, so that an unsupported release
leads to one :class:`VersionError` that names what is missing, not to a stray ImportError.
"""

from __future__ import annotations

import importlib
from functools import cache
from importlib.metadata import version
from types import SimpleNamespace

from inspect_tinker_plugin.contracts.errors import VersionError

__all__ = [
    "EXCHANGED",
    "OPTIONAL_NAMES",
    "PRIVATE_NAMES",
    "SUPPORTED_INSPECT",
    "check_inspect_version",
    "optional_names",
]

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
    "inspect_ai._util.entrypoints:ensure_entry_points": (
        "loads what packages add to Inspect, which an eval does at its start"
    ),
    "inspect_ai._util.environ:environ_vars": "environment of a sandbox's task_init",
    "inspect_ai._util.error:PrerequisiteError": "how Inspect reports bad input",
    "inspect_ai._util.exception:TerminateSampleError": "an approver or tool ended the sample",
    "inspect_ai._util.json:to_json_safe": "a record as JSON, whatever a model has written",
    "inspect_ai._util.path:chdir": "folder of a sandbox's task_init",
    "inspect_ai._util.registry:has_registry_params": "whether a scorer's arguments are known",
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
    "inspect_ai.model._model:_model_roles": (
        "the roles that a task's function finds while it makes the task"
    ),
    "inspect_ai.model._model:active_model": "whose policy is asked by its name",
    "inspect_ai.model._model:active_model_context_var": (
        "the model that a task's function finds while it makes the task"
    ),
    "inspect_ai.model._model:init_sample_model_data": "per-sample usage, which limits read",
    "inspect_ai.model._model:sample_model_usage": "usage so far, in the event of a score",
    "inspect_ai.model._model:sample_role_usage": "usage so far by role, in the event of a score",
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
        "the limit of subprocesses that was made before the option `max_subprocesses` is known"
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
}

EXCHANGED: dict[str, str] = {
    "inspect_ai:Task.as_rl_dataset": ("added: the method of this package"),
    "inspect_ai._cli.main:inspect": ("added: the command rl"),
    "inspect_ai.model._call_tools:call_tool": (
        "tool executors, and tools that raise what ends an event loop"
    ),
    "inspect_ai.model._model:Model.generate": ("failures of judges are theirs, not the scorer's"),
    "inspect_ai.agent._bridge.sandbox.bridge:sandbox_with_injected_tools": (
        "agent bridges without polling"
    ),
    "inspect_ai.agent._bridge.sandbox.service:sandbox_service": (
        "the same; which API a program speaks, and tools of the host that raise"
    ),
}
"""Everything of Inspect that is replaced or added to at run time (docs/upstream.md)."""

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
    "inspect_ai.model._model:_check_limits_before_dispatch": (
        "refuses a call when a token or cost limit is reached"
    ),
    "inspect_ai.model._model:_model_event_sink": "whether an agent bridge takes model events",
    "inspect_ai.model._model:_requested_model": "the name that a model call in a log was asked by",
    "inspect_ai.model._model:record_and_check_model_usage": "usage and cost, which limits read",
    "inspect_ai.model._model:record_sample_model_fallback": "fallbacks that a reply reports",
    "inspect_ai.model._model_output:usage_input_tokens": "context size of a reply",
    "inspect_ai.util._limit:record_turn": "counts turns, which limits read",
    "inspect_ai.util._limit:turn_count": "turns so far",
}
"""Names of fast paths: a release that lacks one, or uses others, takes the long way."""

_LATER_NAMES = {
    "usage_input_tokens",
    "_requested_model",
}
"""Names that came together with their use: releases without them do not need them."""


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


@cache
def optional_names() -> SimpleNamespace | None:
    """Return the names of the fast paths; ``None`` when one is missing in this release."""
    found = SimpleNamespace()
    for name in OPTIONAL_NAMES:
        module, _, attribute = name.partition(":")
        try:
            setattr(found, attribute, getattr(importlib.import_module(module), attribute))
        except (ImportError, AttributeError):
            if attribute not in _LATER_NAMES:
                return None
            setattr(found, attribute, None)
    return found
