"""How one tool call is carried out: the contract of tool executors."""

from __future__ import annotations

from collections.abc import Awaitable, Callable, MutableMapping
from dataclasses import dataclass, field
from typing import Any, Literal, Protocol, TypeAlias, runtime_checkable

from inspect_ai.tool import ToolCall, ToolResult

Memory: TypeAlias = MutableMapping[Any, Any]
"""What executors keep between calls; the key starts with the executor itself."""


@dataclass(frozen=True, kw_only=True)
class ToolScope:
    """The episode that tool calls belong to, and what its executors remember.

    Executors are shared and stay as they are; whatever they keep is kept here.
    """

    task: str
    """Name of the task."""

    sample_id: int | str | None
    """Id of the sample."""

    epoch: int = 1
    """Epoch of the sample, from 1."""

    episode: Memory = field(default_factory=dict)
    """Kept for this episode."""

    group: Memory = field(default_factory=dict)
    """Kept for the episodes of one group."""

    dataset: Memory = field(default_factory=dict)
    """Kept for all episodes of a dataset in this process."""

    def memory(self, span: Literal["episode", "group", "dataset"]) -> Memory:
        """Return what is kept for a span."""
        return {"episode": self.episode, "group": self.group, "dataset": self.dataset}[span]


@dataclass(frozen=True, kw_only=True)
class ToolInvocation:
    """One tool call that Inspect has parsed, approved and validated, about to be carried out."""

    call: ToolCall
    """The call, with the changes of an approver."""

    arguments: dict[str, Any]
    """Arguments as the tool's function takes them (dataclasses and models made of JSON)."""

    scope: ToolScope
    """The episode, and what executors remember."""

    inspect: Callable[..., Awaitable[ToolResult]] = field(repr=False)
    """The tool's own function."""

    @property
    def tool(self) -> str:
        """Name of the tool."""
        return self.call.function

    async def run(self) -> ToolResult:
        """Let Inspect carry the call out: call the tool's own function."""
        return await self.inspect(**self.arguments)


@runtime_checkable
class ToolExecutor(Protocol):
    """Decides how one tool call is carried out: run it, replace, cache, limit or simulate it.

    What it returns or raises reaches messages, events and limits as if the tool had: a
    ``ToolError`` or ``TimeoutError`` is reported to the model, another exception ends the
    episode. Several calls may run at once. Keep it a frozen dataclass: it is shared by
    episodes and travels to worker processes.
    """

    async def __call__(self, invocation: ToolInvocation, /) -> ToolResult:
        """Carry out a call."""
        ...


ToolFunction: TypeAlias = Callable[[ToolInvocation], Awaitable[ToolResult]]
"""An async function that serves as an executor."""
