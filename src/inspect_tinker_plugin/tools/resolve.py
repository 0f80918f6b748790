"""Turns what ``tool_executor=`` takes into the executor of a dataset's episodes."""

from __future__ import annotations

import inspect
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from inspect_ai.tool import ToolResult

from inspect_tinker_plugin.contracts.errors import ConfigError
from inspect_tinker_plugin.contracts.tools import (
    ToolExecutor,
    ToolFunction,
    ToolInvocation,
    carry_out,
    executor_name,
)
from inspect_tinker_plugin.plugins.manager import build_from
from inspect_tinker_plugin.tools.builtin import InspectExecutor, RoutedExecutor

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
