"""Calls of models and tools: who watches them, who carries them out, and what may be left out."""

from __future__ import annotations

import inspect
from collections.abc import Awaitable, Callable, Coroutine
from copy import copy
from functools import cache, partial, wraps
from importlib import import_module
from importlib.metadata import version
from types import SimpleNamespace
from typing import Any

from inspect_ai.agent._handoff import AgentTool
from inspect_ai.event import Event
from inspect_ai.hooks import RunStart, TaskStart, _hooks, _legacy
from inspect_ai.hooks._hooks import drain_sample_events as drain_events
from inspect_ai.log import EvalPlan, EvalSpec
from inspect_ai.log._transcript import Transcript
from inspect_ai.model import Model, _call_tools
from inspect_ai.model._call_tools import parse_tool_call, tool_params, tool_parse_error_message
from inspect_ai.tool import ToolCall, ToolDef
from inspect_ai.util import display_type
from packaging.version import Version

from inspect_tinker_plugin.contracts.errors import VersionError
from inspect_tinker_plugin.inspect_internals.releases import TRIED

__all__ = [
    "announce_run",
    "drain_events",
    "emit",
    "enclose_calls",
    "enclose_tool_call",
    "follow_events",
    "hooks_are_on",
    "knows_model_calls",
    "model_call_names",
    "parse_tool_call",
    "route_tool_calls",
    "somebody_watches_model_calls",
    "tool_parse_error_message",
]


_FIRST_KNOWN = Version("0.3.281")
"""The first release whose model calls do what our own does; earlier ones count waiting times."""


@cache
def knows_model_calls() -> bool:
    """Whether our own model call does what the calls of this release of Inspect do."""
    return _FIRST_KNOWN <= Version(version("inspect-ai")) <= Version(TRIED["inspect-ai"][1])


_MODEL_CALL_NAMES = (
    "inspect_ai._control.pause:wait_generate_dispatch",
    "inspect_ai._sentinel._context:active_sentinel",
    "inspect_ai._util.error:exception_message",
    "inspect_ai._util.working:sample_clock",
    "inspect_ai.log._refusal:report_refusal",
    "inspect_ai.log._samples:set_active_sample_total_turns",
    "inspect_ai.model._call_tools:tool_call_view",
    "inspect_ai.model._model:_check_limits_before_dispatch",
    "inspect_ai.model._model:_model_event_sink",
    "inspect_ai.model._model:_requested_model",
    "inspect_ai.model._model:record_and_check_model_usage",
    "inspect_ai.model._model:record_sample_model_fallback",
    "inspect_ai.model._model_output:usage_input_tokens",
    "inspect_ai.util._limit:record_turn",
    "inspect_ai.util._limit:turn_count",
)


@cache
def model_call_names() -> SimpleNamespace:
    """Return the names that our own model call uses; ``None`` in place of one that came later."""
    found = SimpleNamespace()
    for name in _MODEL_CALL_NAMES:
        module, _, attribute = name.partition(":")
        setattr(found, attribute, getattr(import_module(module), attribute, None))
    return found


def hooks_are_on() -> bool:
    """Whether hooks of Inspect are installed and enabled."""
    return any(hook.enabled() for hook in _hooks.get_all_hooks())


async def emit(hook: str, run: str, uuid: str, **data: Any) -> None:
    """Call a hook on samples, such as ``sample_start``."""
    await getattr(_hooks, f"emit_{hook}")(None, run, run, uuid, **data)


async def announce_run(spec: EvalSpec, plan: EvalPlan) -> None:
    """Call the hooks on the start of a run and of its task."""
    begun = RunStart(eval_set_id=None, run_id=spec.run_id, task_names=[spec.task])
    await _hooks._emit_to_all(lambda hook: hook.on_run_start(begun))
    task = TaskStart(
        eval_set_id=None, run_id=spec.run_id, eval_id=spec.run_id, spec=spec, plan=plan
    )
    await _hooks._emit_to_all(lambda hook: hook.on_task_start(task))


def follow_events(transcript: Transcript, run: str, sample: str) -> None:
    """Call the hook on events for those of a transcript; the running sample has a task group."""

    def report(event: Event) -> None:
        _hooks.emit_sample_event(None, run, run, sample, event)

    transcript._subscribe(report)
    _hooks.start_sample_event_emitter()


def somebody_watches_model_calls() -> bool:
    """Whether hooks, telemetry, a monitor, an agent bridge or a display asks for model calls."""
    if not knows_model_calls():
        return True
    names = model_call_names()
    return (
        hooks_are_on()
        or _legacy._send_telemetry is not None
        or names.active_sentinel() is not None
        or names._model_event_sink.get() is not None
        or display_type() == "conversation"
    )


ToolRouter = Callable[[Any, ToolCall], Any]
"""Takes a tool's function and the approved call, and returns what to call instead."""

Enclosed = Callable[[str, Awaitable[Any]], Awaitable[Any]]
"""Awaits a call of the tool with this name, and decides what its exceptions become."""

NoteRefused = Callable[[ToolCall, Exception], None]
"""Is told of a call whose arguments cannot be converted, before its exception is raised."""

EnclosedModel = Callable[[Model, partial[Coroutine[Any, Any, Any]]], Awaitable[Any]]
"""The same for a call of a model, which it makes; its arguments begin with the model."""

_inspect_call_tool = _call_tools.call_tool
_inspect_generate = Model.generate
_enclosed: Enclosed | None = None
_note_refused: NoteRefused | None = None
_USED_OF_CALL_TOOL = {"tools", "call", "on_execute"}
"""Parameters of Inspect's dispatcher that matter here; 0.3.283 inserted one between them."""


def enclose_calls(of_tool: Enclosed, of_model: EnclosedModel, note_refused: NoteRefused) -> None:
    """Have every call of a tool or model of the process awaited by a function."""
    global _enclosed, _note_refused
    if _enclosed is not None:
        return
    _enclosed, _note_refused = of_tool, note_refused
    if _call_tools.call_tool is _inspect_call_tool:
        _call_tools.call_tool = _call_tool

    @wraps(_inspect_generate)
    def generate(self: Model, *args: Any, **kwargs: Any) -> Any:
        return of_model(self, partial(_inspect_generate, self, *args, **kwargs))

    Model.generate = generate  # type: ignore[method-assign]


def enclose_tool_call(name: str, call: Awaitable[Any]) -> Awaitable[Any]:
    """Return what awaits a call of a tool as ``enclose_calls`` said; the call itself before."""
    return call if _enclosed is None else _enclosed(name, call)


async def _call_tool(*args: Any, **kwargs: Any) -> Any:
    calls = (given for given in (*args, *kwargs.values()) if isinstance(given, ToolCall))
    call = next(calls)

    async def carry_out() -> Any:
        try:
            return await _inspect_call_tool(*args, **kwargs)
        except Exception as error:
            tools: list[ToolDef] = args[0] if args else kwargs["tools"]
            if _note_refused is not None and _is_about_arguments(error, call, tools):
                _note_refused(call, error)
            raise

    return await enclose_tool_call(call.function, carry_out())


def _is_about_arguments(error: Exception, call: ToolCall, tools: list[ToolDef]) -> bool:
    """Whether a call failed as the conversion of its arguments fails: it is tried once more."""
    tool = next((each.tool for each in tools if each.name == call.function), None)
    try:
        if isinstance(tool, AgentTool):
            tool_params({**call.arguments, "state": None}, tool.agent)
        elif tool is not None:
            tool_params(call.arguments, tool)
    except Exception as refused:
        return type(refused) is type(error)
    return False


def route_tool_calls(current: Callable[[], ToolRouter | None]) -> None:
    """Let the router of the running context choose what carries out its approved tool calls.

    Inspect announces an approved and validated call through ``on_execute`` and looks the
    tool's function up only then; the function is exchanged at that moment, on a copy of the
    definition. Handoffs to agents are left alone, and so are calls in a context without a router.
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
            return await _call_tool(*args, **kwargs)
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

        return await _call_tool(**{**given, "tools": chosen, "on_execute": announced})

    _call_tools.call_tool = call_tool
