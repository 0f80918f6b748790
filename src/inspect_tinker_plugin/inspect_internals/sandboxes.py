"""Sandboxes: how Inspect starts, finds and releases them, and the agent bridges into them."""

from __future__ import annotations

import inspect
import sys
from collections.abc import Awaitable, Callable, Iterator
from contextlib import contextmanager
from typing import Any

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
    cleanup_sandbox_environments_sample,
    init_sandbox_environments_sample,
    sandbox_environments_context_var,
    sandbox_with_environments_context_var,
)
from inspect_ai.util._sandbox.events import SandboxTimeoutError
from inspect_ai.util._sandbox.lifecycle import SandboxLifecycleState, _lifecycle_state
from inspect_ai.util._sandbox.limits import set_sandbox_limits
from inspect_ai.util._sandbox.registry import registry_find_sandboxenv
from inspect_ai.util._sandbox.service import SandboxService

__all__ = [
    "MODEL_SERVICE",
    "SandboxLifecycleState",
    "SandboxService",
    "SandboxTimeoutError",
    "_lifecycle_state",
    "bridge_dialect",
    "chdir",
    "cleanup_sandbox_environments_sample",
    "environ_vars",
    "init_sandbox_environments_sample",
    "load_extensions",
    "read_sandboxenv_file",
    "registry_find_sandboxenv",
    "resolve_sample_files",
    "resolve_sandbox",
    "resolve_task_sandbox",
    "route_agent_bridges",
    "route_remote_commands",
    "sandbox_environments_context_var",
    "set_sandbox_limits",
    "unproxied",
    "watch_sandbox_use",
]

_inspect_exec_remote: Callable[..., Awaitable[Any]] = SandboxEnvironment.exec_remote

_DIALECTS = {
    "inspect_ai.agent._bridge.completions": "chat",
    "inspect_ai.agent._bridge.responses_impl": "responses",
    "inspect_ai.agent._bridge.anthropic_api_impl": "anthropic",
    "inspect_ai.agent._bridge.google_api_impl": "google",
}


def bridge_dialect() -> str | None:
    """Return the model API through which a call reached the agent bridge, if it did.

    Inspect translates all of them into the same call and does not record which one it was; the
    translator's module is among the callers.
    """
    if not in_bridge_model_generate():
        return None
    frame = inspect.currentframe()
    while frame is not None:
        dialect = _DIALECTS.get(frame.f_globals.get("__name__", ""))
        if dialect is not None:
            return dialect
        frame = frame.f_back
    return "unknown"


def unproxied(environment: SandboxEnvironment) -> SandboxEnvironment:
    """Return the provider's own object behind the proxy that records sandbox events."""
    inner = getattr(environment, "_sandbox", environment)
    assert isinstance(inner, SandboxEnvironment)
    return inner


def route_agent_bridges(
    stand_in: Callable[[str | None], Awaitable[Any]],
    serve: Callable[..., Awaitable[None]],
) -> None:
    """Let the running context choose what an agent bridge takes for its sandbox.

    Args:
        stand_in: given a sandbox's name, returns its stand-in, or ``None`` for Inspect's own way.
        serve: given a stand-in, the service's name, its methods and the event that tells of its
            start, carries out what programs ask of it.
    """

    async def sandbox_with_injected_tools(*, sandbox_name: str | None = None) -> Any:
        found = await stand_in(sandbox_name)
        if found is not None:
            return found
        return await _inspect_bridge_sandbox(sandbox_name=sandbox_name)

    async def sandbox_service(**given: Any) -> Any:
        if isinstance(given["sandbox"], SandboxEnvironment):
            return await _inspect_bridge_service(**given)
        return await serve(given["sandbox"], given["name"], given["methods"], given.get("started"))

    parts = "inspect_ai.agent._bridge.sandbox"
    vars(sys.modules[f"{parts}.bridge"])["sandbox_with_injected_tools"] = (
        sandbox_with_injected_tools
    )
    vars(sys.modules[f"{parts}.service"])["sandbox_service"] = sandbox_service


def route_remote_commands(start: Callable[..., Awaitable[Any]]) -> None:
    """Let the running context choose how a sandbox starts a command that runs beside others.

    Args:
        start: given a sandbox, the command, its options and whether it is streamed, returns what
            ``exec_remote`` returns, or ``None`` for Inspect's own way.
    """

    async def exec_remote(
        self: SandboxEnvironment, cmd: list[str], options: Any = None, *, stream: bool = True
    ) -> Any:
        found = await start(self, cmd, options, stream)
        if found is not None:
            return found
        return await _inspect_exec_remote(self, cmd, options, stream=stream)

    SandboxEnvironment.exec_remote = exec_remote  # type: ignore[method-assign]  # exchanged


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
