"""Resolves the tool executor of a dataset, and puts it between Inspect's dispatcher and the tool.

Inspect parses, approves and validates a call as usual; then the executor takes the place of
the tool's function. Only the context of an episode that has an executor is affected.
"""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass
from typing import Any

from inspect_ai.tool import ToolCall, ToolResult

from inspect_tinker_plugin.contracts.errors import ConfigError
from inspect_tinker_plugin.contracts.tools import (
    ToolExecutor,
    ToolFunction,
    ToolInvocation,
    ToolScope,
    carry_out,
    executor_name,
)
from inspect_tinker_plugin.plugins.manager import build_from
from inspect_tinker_plugin.tools.builtin import InspectExecutor, RoutedExecutor

_active: ContextVar[tuple[ToolExecutor | ToolFunction, ToolScope] | None] = ContextVar(
    "inspect_rl_tool_executor", default=None
)
"""The executor in force, with the episode that it works for."""


@contextmanager
def use_tool_executor(
    executor: ToolExecutor | ToolFunction | None, scope: ToolScope
) -> Iterator[None]:
    """Carry out the tool calls of this context with an executor; ``None`` changes nothing.

    Applies to everything that the context starts: sub-agents, handoffs, parallel calls.
    """
    if executor is None:
        yield
        return
    from inspect_tinker_plugin import inspect_internals

    inspect_internals.route_tool_calls(_router)
    token = _active.set((executor, scope))
    try:
        yield
    finally:
        _active.reset(token)


def _router() -> Callable[[Any, ToolCall], Any] | None:
    """Return the function that replaces a tool by this context's executor; ``None`` without one."""
    active = _active.get()
    return None if active is None else functools.partial(_stand_in, *active)


def _stand_in(
    executor: ToolExecutor | ToolFunction, scope: ToolScope, tool: Any, call: ToolCall
) -> Any:
    @functools.wraps(tool)
    async def execute(**arguments: Any) -> ToolResult:
        invocation = ToolInvocation(call=call, arguments=arguments, scope=scope, inspect=tool)
        return await carry_out(executor, invocation)

    return execute


ToolExecutorSpec = str | ToolExecutor | ToolFunction | Mapping[str, Any] | None
"""What ``tool_executor=`` takes: an expression, an executor, an async function of a
`ToolInvocation`, or a mapping of tool-name patterns to any of these."""


@dataclass(frozen=True, eq=False)
class ResolvedToolExecutor:
    """An executor with its expression, which is resolved again in a worker process."""

    spec: str | Mapping[str, Any]
    """The expression or mapping."""

    executor: ToolExecutor | ToolFunction
    """The executor that it was resolved to."""

    origin: str = ""
    """Plugins that it comes from, for messages; empty for built-ins."""

    @property
    def _name(self) -> str:
        return self.spec if isinstance(self.spec, str) else executor_name(self.executor)

    async def __call__(self, invocation: ToolInvocation) -> ToolResult:
        return await carry_out(self.executor, invocation, name=self._name, origin=self.origin)

    def __reduce__(self) -> tuple[Any, ...]:
        return resolve_tool_executor, (self.spec,)


def resolve_tool_executor(spec: ToolExecutorSpec) -> ToolExecutor | ToolFunction | None:
    """Turn what ``tool_executor=`` takes into an executor.

    Args:
        spec: ``"cached"``, ``{"bash*": "limited(timeout=10)"}``, an object or an async function.

    Returns:
        The executor, or ``None`` when Inspect is to run every tool itself.

    Raises:
        ConfigError: an unknown name, a malformed expression, or an object that is no executor.
    """
    executor = _resolve(spec)
    if executor is None or isinstance(executor, InspectExecutor):
        return None
    if isinstance(spec, str | Mapping) and not isinstance(executor, ResolvedToolExecutor):
        return ResolvedToolExecutor(spec, executor)
    return executor


def _resolve(spec: ToolExecutorSpec) -> ToolExecutor | ToolFunction | None:
    if spec is None:
        return None
    if isinstance(spec, str):
        built = build_from("inspect_rl_tool_executors", spec)
        checked = _checked(built.value, spec, built.origin)
        return ResolvedToolExecutor(spec, checked, built.origin) if built.origin else checked
    if isinstance(spec, Mapping):
        routes = {str(pattern): _resolve(inner) for pattern, inner in spec.items()}
        return RoutedExecutor({p: e or InspectExecutor() for p, e in routes.items()})
    return _checked(spec, spec)


def _checked(executor: Any, spec: object, origin: str = "") -> ToolExecutor | ToolFunction:
    call = executor if inspect.isfunction(executor) else getattr(executor, "__call__", None)  # noqa: B004
    if isinstance(executor, type) or not inspect.iscoroutinefunction(call):
        raise ConfigError(
            f"tool executor: {spec!r:.80}{origin} is neither an expression, an executor nor an "
            "async function of one tool invocation"
        )
    checked: ToolExecutor | ToolFunction = executor
    return checked
