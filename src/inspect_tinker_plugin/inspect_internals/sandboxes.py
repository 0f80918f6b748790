"""Sandboxes: how Inspect starts, finds and releases them, and the agent bridges into them."""

from __future__ import annotations

import sys
from collections.abc import Awaitable, Callable, Iterator, Mapping
from contextlib import contextmanager
from contextvars import ContextVar
from functools import wraps
from typing import Any

import anyio
import inspect_ai.agent
from anyio.abc import TaskGroup
from inspect_ai._eval.loader import resolve_task_sandbox
from inspect_ai._eval.task.sandbox import (
    read_sandboxenv_file,
    resolve_sample_files,
    resolve_sandbox,
)
from inspect_ai._util.entrypoints import ensure_entry_points as load_extensions
from inspect_ai._util.environ import environ_vars
from inspect_ai._util.path import chdir
from inspect_ai.agent._bridge.sandbox.bridge import (  # type: ignore[attr-defined]  # to exchange
    sandbox_with_injected_tools as _inspect_bridge_sandbox,
)
from inspect_ai.agent._bridge.sandbox.service import MODEL_SERVICE
from inspect_ai.agent._bridge.sandbox.service import (  # type: ignore[attr-defined]  # to exchange
    sandbox_service as _inspect_bridge_service,
)
from inspect_ai.agent._bridge.util import in_bridge_model_generate
from inspect_ai.util import SandboxEnvironment
from inspect_ai.util._sandbox.context import (
    init_sandbox_environments_sample,
    sandbox_environments_context_var,
    sandbox_with_environments_context_var,
)
from inspect_ai.util._sandbox.events import SandboxTimeoutError
from inspect_ai.util._sandbox.lifecycle import SandboxLifecycleState, _lifecycle_state
from inspect_ai.util._sandbox.limits import set_sandbox_limits
from inspect_ai.util._sandbox.registry import registry_find_sandboxenv
from inspect_ai.util._sandbox.service import SandboxService

from inspect_tinker_plugin.inspect_internals.calls import enclose_tool_call

__all__ = [
    "MODEL_SERVICE",
    "TRACE",
    "SandboxLifecycleState",
    "SandboxService",
    "SandboxTimeoutError",
    "_lifecycle_state",
    "bridge_dialect",
    "chdir",
    "environ_vars",
    "in_dialect",
    "init_sandbox_environments_sample",
    "load_extensions",
    "read_sandboxenv_file",
    "registry_find_sandboxenv",
    "resolve_sample_files",
    "resolve_sandbox",
    "resolve_task_sandbox",
    "route_agent_bridges",
    "set_sandbox_limits",
    "strip_proxy",
    "watch_sandbox_use",
]

TRACE = 13
"""Level of the records in Inspect's trace log, between ``DEBUG`` and ``INFO``."""

_DIALECTS = {
    "generate_completions": "chat",
    "generate_responses": "responses",
    "generate_anthropic": "anthropic",
    "generate_google": "google",
}
"""Model APIs by the methods of a bridge's service."""

_dialect: ContextVar[str] = ContextVar("inspect_rl_bridge_dialect", default="unknown")

_is_bridged: Callable[[], object] = getattr(
    inspect_ai.agent, "current_agent_bridge_context", in_bridge_model_generate
)
"""In later releases also of calls that the bridge itself makes, such as those of a compaction."""


def bridge_dialect() -> str | None:
    """Return the model API through which a call reached an agent bridge, if it did.

    Inspect translates all of them into the same call and does not record which one it was. It is
    ``unknown`` for bridges into this process, whose calls pass nothing of ours.
    """
    return _dialect.get() if _is_bridged() else None


@contextmanager
def in_dialect(dialect: str) -> Iterator[None]:
    """Note that the calls of this context came through a model API."""
    token = _dialect.set(dialect)
    try:
        yield
    finally:
        _dialect.reset(token)


def strip_proxy(environment: SandboxEnvironment) -> SandboxEnvironment:
    """Return the provider's own object behind the proxy that records sandbox events."""
    inner = getattr(environment, "_sandbox", environment)
    assert isinstance(inner, SandboxEnvironment)
    return inner


def route_agent_bridges(
    is_active: Callable[[], bool],
    stand_in: Callable[[str | None], Awaitable[Any]],
    serve: Callable[..., Awaitable[None]],
) -> None:
    """Let contexts of episodes choose what an agent bridge takes for its sandbox.

    Args:
        is_active: Tells whether the running context is one of them.
        stand_in: Given a sandbox's name, returns its stand-in, or ``None`` for Inspect's own way.
        serve: Given a stand-in, the service's name, its methods and the event that tells of its
            start, carries out what programs ask of it.
    """

    async def sandbox_with_injected_tools(*, sandbox_name: str | None = None) -> Any:
        found = await stand_in(sandbox_name) if is_active() else None
        if found is not None:
            return found
        return await _inspect_bridge_sandbox(sandbox_name=sandbox_name)

    async def sandbox_service(**given: Any) -> Any:
        if not is_active():
            return await _inspect_bridge_service(**given)
        async with anyio.create_task_group() as tasks:
            methods = _enclose_methods(given["methods"], tasks)
            if isinstance(given["sandbox"], SandboxEnvironment):
                await _inspect_bridge_service(**{**given, "methods": methods})
            else:
                await serve(given["sandbox"], given["name"], methods, given.get("started"))

    parts = "inspect_ai.agent._bridge.sandbox"
    vars(sys.modules[f"{parts}.bridge"])["sandbox_with_injected_tools"] = (
        sandbox_with_injected_tools
    )
    vars(sys.modules[f"{parts}.service"])["sandbox_service"] = sandbox_service


def _enclose_methods(
    methods: Mapping[str, Callable[..., Any]], tasks: TaskGroup
) -> dict[str, Callable[..., Any]]:
    """Have the methods of a bridge's service note their dialect, and tools stamp errors."""
    enclosed = {}
    for name, method in methods.items():
        if name in _DIALECTS:
            method = _note_dialect(_DIALECTS[name], method)
        enclosed[name] = _enclose_host_tools(method, tasks) if name == "call_tool" else method
    return enclosed


def _note_dialect(dialect: str, method: Callable[..., Any]) -> Callable[..., Any]:
    @wraps(method)  # services look at the parameters
    async def noted(*args: Any, **kwargs: Any) -> Any:
        with in_dialect(dialect):
            return await method(*args, **kwargs)

    return noted


def _enclose_host_tools(method: Callable[..., Any], tasks: TaskGroup) -> Callable[..., Any]:
    @wraps(method)
    async def execute(server: str, tool: str, arguments: Any) -> Any:
        try:
            return await enclose_tool_call(tool, method(server, tool, arguments))
        except RuntimeError as error:
            # Inspect fails the sample for exceptions only; the program is told of all.
            if error.__cause__ is not None and not isinstance(error.__cause__, Exception):
                tasks.start_soon(_fail_with, error)
            raise

    return execute


async def _fail_with(error: Exception) -> None:
    raise error


class SandboxWatch(dict[str, SandboxEnvironment]):
    """The sandboxes of a sample; notices when they are looked up."""

    used = False

    def __getattribute__(self, name: str) -> Any:
        if name in {"get", "keys", "values", "items"}:
            self.used = True
        return super().__getattribute__(name)

    def __len__(self) -> int:
        self.used = True
        return super().__len__()

    def __getitem__(self, name: str) -> SandboxEnvironment:
        self.used = True
        return super().__getitem__(name)


@contextmanager
def watch_sandbox_use() -> Iterator[SandboxWatch]:
    """Notice whether this context (a tool call, say) asks for a sandbox."""
    environments = sandbox_environments_context_var.get(None)
    if environments is None:  # asking for one raises
        yield SandboxWatch()
        return
    watch = SandboxWatch(environments)
    token = sandbox_environments_context_var.set(watch)
    found = sandbox_with_environments_context_var.set({})
    try:
        yield watch
    finally:
        sandbox_environments_context_var.reset(token)
        sandbox_with_environments_context_var.reset(found)
