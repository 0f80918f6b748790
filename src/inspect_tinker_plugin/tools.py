"""Tool executors: those that ship with the package, and how one takes the place of a tool.

Inspect parses, approves and validates a call as usual; then the executor takes the place of
the tool's function. Only the context of an episode that has an executor is affected.
"""

from __future__ import annotations

import asyncio
import copy
import fnmatch
import functools
import inspect
import json
from collections.abc import Callable, Iterator, Mapping
from concurrent.futures import Future
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass, field
from typing import Any, Literal, cast

from inspect_ai.tool import ToolCall, ToolError, ToolResult
from inspect_ai.util import OutputLimitExceededError

from inspect_tinker_plugin import inspect_internals
from inspect_tinker_plugin.contracts.errors import ConfigError
from inspect_tinker_plugin.contracts.hooks import (
    ToolExecutor,
    ToolExecutorError,
    ToolFunction,
    ToolInvocation,
    ToolScope,
    carry_out,
)
from inspect_tinker_plugin.contracts.wording import counted, object_name
from inspect_tinker_plugin.plugins.manager import build_from

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


@dataclass(frozen=True)
class InspectExecutor:
    """Lets Inspect run its own tool; the default when no executor is chosen."""

    async def __call__(self, invocation: ToolInvocation) -> ToolResult:
        return await invocation.run()


@dataclass(frozen=True)
class CachedExecutor:
    """Answers the same call (tool and arguments) with the same result, without running it again.

    For tools that neither use the sandbox nor keep a state: a call during which the tool
    asked for the sandbox is never cached, but effects on the store or on the world outside
    cannot be seen and are not repeated. Calls that fail are not cached. An identical call
    that arrives while the first is running waits for its result.
    """

    scope: Literal["episode", "group", "dataset"] = "group"
    """How far results are shared; nothing is shared between processes."""

    inner: ToolExecutor = field(default_factory=InspectExecutor)
    """Carries out the calls that are not in the cache."""

    def __post_init__(self) -> None:
        if self.scope not in ("episode", "group", "dataset"):
            raise ConfigError(f"scope is 'episode', 'group' or 'dataset', not {self.scope!r}")
        _require_executor(self.inner)

    async def __call__(self, invocation: ToolInvocation) -> ToolResult:
        memory = invocation.scope.memory(self.scope)
        arguments = json.dumps(invocation.call.arguments, sort_keys=True, default=repr)
        key = (self, invocation.scope.task, invocation.tool, arguments)
        mine: Future[None] = Future()
        # setdefault: a dataset's episodes may run in several threads, each with its own loop
        while (found := memory.setdefault(key, mine)) is not mine:
            if not isinstance(found, Future):
                return cast(ToolResult, copy.deepcopy(found))
            # shielded: the future is shared by all waiters, and one of them may be cancelled
            await asyncio.shield(asyncio.wrap_future(found))
        try:
            with inspect_internals.watch_sandbox_use() as watch:
                result = await carry_out(self.inner, invocation)
            if watch.used:
                del memory[key]
            else:
                memory[key] = copy.deepcopy(result)
        except BaseException:
            del memory[key]
            raise
        finally:
            mine.set_result(None)
        return result


@dataclass(frozen=True)
class LimitedExecutor:
    """Limits time, result size and number of calls; the model is told which limit it reached."""

    timeout: float | None = field(default=None, kw_only=True)
    """Seconds per call; the model is told that it timed out, as by a sandbox."""

    output: int | None = field(default=None, kw_only=True)
    """Bytes of a textual result; the rest is cut, and the model is told."""

    calls: int | None = field(default=None, kw_only=True)
    """Calls of one tool per episode; further ones are refused."""

    inner: ToolExecutor = field(default_factory=InspectExecutor, kw_only=True)
    """Carries out the calls."""

    def __post_init__(self) -> None:
        for name in ("timeout", "output", "calls"):
            value = getattr(self, name)
            number = isinstance(value, int | float) and not isinstance(value, bool)
            if value is not None and (not number or value <= 0):
                raise ConfigError(f"{name} is a number above 0, not {value!r}")
        if self.timeout is self.output is self.calls is None:
            raise ConfigError("give at least one of timeout, output and calls")
        _require_executor(self.inner)

    async def __call__(self, invocation: ToolInvocation) -> ToolResult:
        if self.calls is not None:
            counts = invocation.scope.episode.setdefault((self, "calls"), {})
            counts[invocation.tool] = counts.get(invocation.tool, 0) + 1
            if counts[invocation.tool] > self.calls:
                calls = counted(self.calls, "call")
                raise ToolError(f"The limit of {calls} to {invocation.tool} is reached.")
        async with asyncio.timeout(self.timeout):
            result = await carry_out(self.inner, invocation)
        if self.output is not None and isinstance(result, str):
            data = result.encode()
            if len(data) > self.output:
                kept = data[: self.output].decode(errors="ignore")
                raise OutputLimitExceededError(f"{self.output} bytes", kept)
        return result


@dataclass(frozen=True, eq=False)
class ScriptedExecutor:
    """Answers every call of the tools that it names; for tests. Inspect runs the others."""

    answers: Mapping[str, ToolResult]
    """Answers by the name of the tool."""

    async def __call__(self, invocation: ToolInvocation) -> ToolResult:
        if invocation.tool not in self.answers:
            return await invocation.run()
        return self.answers[invocation.tool]


@dataclass(frozen=True, eq=False)
class RoutedExecutor:
    """Chooses an executor by the tool's name; tools that match no pattern are run by Inspect."""

    routes: Mapping[str, ToolExecutor | ToolFunction]
    """Executors by pattern (``bash``, ``web_*``), tried in order; the first match is used."""

    def __post_init__(self) -> None:
        for executor in self.routes.values():
            _require_executor(executor)

    async def __call__(self, invocation: ToolInvocation) -> ToolResult:
        for pattern, executor in self.routes.items():
            if fnmatch.fnmatchcase(invocation.tool, pattern):
                return await carry_out(executor, invocation)
        return await invocation.run()


def scripted(**answers: str) -> ScriptedExecutor:
    """Answer every call of the named tools with a text."""
    return ScriptedExecutor(answers)


def route(**routes: ToolExecutor) -> RoutedExecutor:
    """Choose executors by patterns of tool names: ``route("web_*"=cached, bash=limited(…))``."""
    return RoutedExecutor(routes)


TOOL_EXECUTORS: Mapping[str, Callable[..., ToolExecutor]] = {
    "inspect": InspectExecutor,
    "cached": CachedExecutor,
    "limited": LimitedExecutor,
    "scripted": scripted,
    "route": route,
}
"""Built-in tool executors by name."""


def _require_executor(executor: Any) -> None:
    if not callable(executor):
        raise ConfigError(f"a tool executor was expected, not {executor!r}")


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
        own = copy.deepcopy(call)  # the call is part of what the policy said
        invocation = ToolInvocation(call=own, arguments=arguments, scope=scope, inspect=tool)
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
        return self.spec if isinstance(self.spec, str) else object_name(self.executor)

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
        checked = _check_executor(built.value, spec, built.origin)
        return ResolvedToolExecutor(spec, checked, built.origin) if built.origin else checked
    if isinstance(spec, Mapping):
        routes = {str(pattern): _resolve(inner) for pattern, inner in spec.items()}
        return RoutedExecutor({p: e or InspectExecutor() for p, e in routes.items()})
    return _check_executor(spec, spec)


def _check_executor(executor: Any, spec: object, origin: str = "") -> ToolExecutor | ToolFunction:
    call = getattr(executor, "__call__", None)  # noqa: B004
    if isinstance(executor, type) or not any(map(inspect.iscoroutinefunction, (executor, call))):
        raise ConfigError(
            f"tool executor: {spec!r:.80}{origin} is neither an expression, an executor nor an "
            "async function of one tool invocation"
        )
    checked: ToolExecutor | ToolFunction = executor
    return checked
