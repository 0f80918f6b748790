"""Puts the executor of an episode between Inspect's tool dispatcher and the tool.

Inspect parses, approves and validates a call as usual; then the executor takes the place of
the tool's function. Only the context of an episode that has an executor is affected.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from typing import Any

from inspect_ai.tool import ToolCall, ToolResult

from inspect_tinker_plugin.contracts.tools import (
    ToolExecutor,
    ToolFunction,
    ToolInvocation,
    ToolScope,
    carry_out,
)


class _Active:
    """An executor in force, with the episode that it works for."""

    def __init__(self, executor: ToolExecutor | ToolFunction, scope: ToolScope) -> None:
        self.executor = executor
        self.scope = scope


_active: ContextVar[_Active | None] = ContextVar("inspect_rl_tool_executor", default=None)


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
    token = _active.set(_Active(executor, scope))
    try:
        yield
    finally:
        _active.reset(token)


def _router() -> Callable[[Any, ToolCall], Any] | None:
    """Return the function that replaces a tool by this context's executor; ``None`` without one."""
    active = _active.get()
    return None if active is None else lambda tool, call: _Executed(tool, call, active)


class _Executed:
    """Stands in for a tool's function for one call."""

    def __init__(self, tool: Any, call: ToolCall, active: _Active) -> None:
        self._tool = tool
        self._call = call
        self._active = active

    async def __call__(self, **arguments: Any) -> ToolResult:
        invocation = ToolInvocation(
            call=self._call,
            arguments=arguments,
            scope=self._active.scope,
            inspect=self._tool,
        )
        return await carry_out(self._active.executor, invocation)

    def __getattr__(self, name: str) -> Any:
        return getattr(self._tool, name)
