"""The tool executors that ship with the package: ``inspect``, ``cached``, ``limited`` and so on."""

from __future__ import annotations

import asyncio
import copy
import fnmatch
import json
from collections.abc import Callable, Mapping
from concurrent.futures import Future
from dataclasses import dataclass, field
from typing import Any, Literal, cast

from inspect_ai.tool import ToolError, ToolResult
from inspect_ai.util import OutputLimitExceededError

from inspect_tinker_plugin import inspect_internals
from inspect_tinker_plugin.contracts.errors import ConfigError
from inspect_tinker_plugin.contracts.tools import (
    ToolExecutor,
    ToolFunction,
    ToolInvocation,
    carry_out,
)
from inspect_tinker_plugin.contracts.wording import counted


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
