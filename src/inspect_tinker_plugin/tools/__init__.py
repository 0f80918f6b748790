"""Tools: how the calls of an episode are carried out, by Inspect itself or by an executor."""

from __future__ import annotations

from inspect_tinker_plugin.contracts.tools import (
    ToolExecutor,
    ToolExecutorError,
    ToolFunction,
    ToolInvocation,
    ToolScope,
)
from inspect_tinker_plugin.tools.executors import (
    CachedExecutor,
    InspectExecutor,
    LimitedExecutor,
    RoutedExecutor,
    ScriptedExecutor,
    ToolExecutorSpec,
    resolve_tool_executor,
    use_tool_executor,
)

__all__ = [
    "CachedExecutor",
    "InspectExecutor",
    "LimitedExecutor",
    "RoutedExecutor",
    "ScriptedExecutor",
    "ToolExecutor",
    "ToolExecutorError",
    "ToolExecutorSpec",
    "ToolFunction",
    "ToolInvocation",
    "ToolScope",
    "resolve_tool_executor",
    "use_tool_executor",
]
