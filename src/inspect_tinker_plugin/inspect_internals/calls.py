"""Calls of models and tools: who watches them, who carries them out, and what may be left out."""

from __future__ import annotations

import ast
import hashlib
import inspect
import sys
import textwrap
from collections.abc import Awaitable, Callable
from contextlib import AbstractAsyncContextManager, nullcontext
from contextvars import ContextVar
from copy import copy
from functools import cache, wraps
from importlib.metadata import version
from types import FrameType
from typing import Any

from inspect_ai._util.registry import registry_unqualified_name
from inspect_ai.agent._bridge.sandbox.service import call_tool as _inspect_host_tools
from inspect_ai.agent._handoff import AgentTool
from inspect_ai.model import Model, _call_tools
from inspect_ai.model._call_tools import parse_tool_call, tool_parse_error_message
from inspect_ai.solver import TaskState
from inspect_ai.tool import ToolCall, ToolDef
from inspect_ai.util import display_type

from inspect_tinker_plugin.contracts.errors import VersionError
from inspect_tinker_plugin.inspect_internals.names import optional_names

__all__ = [
    "KNOWN_MODEL_CALLS",
    "contain_tool_calls",
    "digest_of_model_calls",
    "host_tool_called",
    "knows_model_calls",
    "leave_out_solver_events",
    "parse_tool_call",
    "record_solver_events_with",
    "role_falls_back_on_active_model",
    "route_tool_calls",
    "somebody_watches_model_calls",
    "tool_parse_error_message",
]

_MODEL_CALL = ("generate", "_generate", "_record_model_interaction", "_connection_concurrency")
"""Methods of ``Model`` that the fast path of model calls stands for."""

KNOWN_MODEL_CALLS = {
    "ce2bd91aafd55392": "0.3.281",
    "56dd0f3536071e96": "0.3.282",
    "029d70e574b0e3e5": "0.3.283",
    "9067fa6926aabc84": "0.3.285",
}
"""Releases whose model calls are known to do what the fast path does, by what those methods use.

They differ in retries, in copies for events and in what a monitor is told; the fast path has none
of these. Up to 0.3.280, a call counts its waiting time itself; up to 0.3.278, it also prepares its
input.
"""


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


SolverRecorder = Callable[[Any, TaskState, str | None], Any]
"""Takes the place of ``solver_transcript``: a solver, its state and its name."""

ToolRecorder = Callable[[str], AbstractAsyncContextManager[Any]]
"""Takes the place of the span around a tool with this name."""

_recorders: ContextVar[tuple[SolverRecorder, ToolRecorder] | None] = ContextVar(
    "inspect_rl_solver_events", default=None
)


class _Unrecorded(AbstractAsyncContextManager["_Unrecorded"]):
    """Takes the place of the events around a solver."""

    async def __aexit__(self, *_: object) -> None:
        pass

    def complete(self, after_state: TaskState) -> None:
        """Compare nothing."""


def _unrecorded(solver: Any, state: TaskState, name: str | None = None) -> _Unrecorded:
    if name is None:
        registry_unqualified_name(solver)
    return _Unrecorded()


def leave_out_solver_events() -> None:
    """Record neither spans nor changes of the solvers and tools that run in this context.

    A solver that could not be recorded, for want of a name, still fails.
    """
    record_solver_events_with(_unrecorded, lambda _: nullcontext())


def record_solver_events_with(of_solver: SolverRecorder, of_tool: ToolRecorder) -> None:
    """Have the solvers and tools that run in this context recorded in another way.

    Inspect looks both of its functions up each time that it needs them.
    """
    parts = optional_names("solver_transcript", "span")
    if parts is None:
        return
    module = sys.modules["inspect_ai.solver._transcript"]
    if module.solver_transcript is parts.solver_transcript:

        def solver_transcript(solver: Any, state: TaskState, name: str | None = None) -> Any:
            recorders = _recorders.get()
            record = parts.solver_transcript if recorders is None else recorders[0]
            return record(solver, state, name)

        def span_of(name: str, *, type: str | None = None, **others: Any) -> Any:
            recorders = _recorders.get()
            if recorders is not None and type == "tool" and not others:
                return recorders[1](name)
            return parts.span(name=name, type=type, **others)

        module.solver_transcript = solver_transcript  # type: ignore[attr-defined]
        sys.modules["inspect_ai.model._call_tools"].span = span_of  # type: ignore[attr-defined]
    _recorders.set((of_solver, of_tool))


ToolRouter = Callable[[Any, ToolCall], Any]
"""Takes a tool's function and the approved call, and returns what to call instead."""

Contained = Callable[[str, Awaitable[Any]], Awaitable[Any]]
"""Awaits a call of the tool with this name, and decides what its exceptions become."""

_inspect_call_tool = _call_tools.call_tool
_contained: Contained | None = None
_USED_OF_CALL_TOOL = {"tools", "call", "on_execute"}
"""Parameters of Inspect's dispatcher that matter here; 0.3.283 inserted one between them."""


def contain_tool_calls(contained: Contained) -> None:
    """Have every tool call of the process awaited by a function, which knows whose it is.

    Those that programs make through an agent bridge are among them.
    """
    global _contained
    _contained = contained
    if _call_tools.call_tool is _inspect_call_tool:
        _call_tools.call_tool = _call_tool
    vars(sys.modules[_inspect_host_tools.__module__])["call_tool"] = _host_tools


async def _call_tool(*args: Any, **kwargs: Any) -> Any:
    called = _inspect_call_tool(*args, **kwargs)
    if _contained is None:
        return await called
    calls = (given for given in (*args, *kwargs.values()) if isinstance(given, ToolCall))
    return await _contained(next(calls).function, called)


def _host_tools(bridge: Any) -> Callable[..., Awaitable[Any]]:
    """Return what calls the tools of the host for a program."""
    inspects = _inspect_host_tools(bridge)

    @wraps(inspects)
    async def execute(server: str, tool: str, arguments: Any) -> Any:
        called = inspects(server, tool, arguments)
        if _contained is None:
            return await called
        try:
            return await _contained(tool, called)
        except RuntimeError as error:
            # Inspect fails the sample for exceptions only; the program is told of all.
            if error.__cause__ is not None and not isinstance(error.__cause__, Exception):
                getattr(bridge, "request_fail", _nothing)(error)
            raise

    return execute


def _nothing(error: Exception) -> None:
    """Do nothing, in releases whose programs are told of errors, and nobody else."""


def host_tool_called(frame: FrameType) -> str | None:
    """Return the name of the tool that a frame calls for a program; ``None`` if it calls none."""
    name = frame.f_locals.get("tool")
    return name if frame.f_code in _host_tools.__code__.co_consts else None


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
