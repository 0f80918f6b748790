"""The contract of tool executors, which decide how one tool call is carried out."""

from __future__ import annotations

import inspect
from collections.abc import Awaitable, Callable, MutableMapping
from dataclasses import dataclass, field
from typing import Any, Literal, Protocol, TypeAlias, cast, runtime_checkable

from inspect_ai.model import (
    ContentAudio,
    ContentDocument,
    ContentImage,
    ContentText,
    ContentVideo,
)
from inspect_ai.tool import ToolCall, ToolResult

from inspect_tinker_plugin.contracts.errors import InspectRLError
from inspect_tinker_plugin.contracts.wording import object_name

Memory: TypeAlias = MutableMapping[Any, Any]
"""What executors keep between calls; keys start with the executor itself."""


@dataclass(frozen=True, kw_only=True)
class ToolScope:
    """The episode that tool calls belong to, with the memory of its executors.

    Executors are shared and never change; whatever they need to keep is stored here.
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
        """Return the memory of a span."""
        return {"episode": self.episode, "group": self.group, "dataset": self.dataset}[span]


@dataclass(frozen=True, kw_only=True)
class ToolInvocation:
    """One tool call that Inspect has parsed, approved and validated, about to be carried out."""

    call: ToolCall
    """A copy of the call, with the changes of an approver."""

    arguments: dict[str, Any]
    """Arguments as the tool's function takes them (dataclasses and models made of JSON)."""

    scope: ToolScope
    """The episode, and the memory of executors."""

    inspect: Callable[..., Awaitable[ToolResult]] = field(repr=False)
    """The tool's own function."""

    given: list[type] = field(default_factory=list, repr=False, compare=False)
    """Types of the tool's own results in this call; an executor may pass them on."""

    @property
    def tool(self) -> str:
        """Name of the tool."""
        return self.call.function

    async def run(self) -> ToolResult:
        """Let Inspect carry the call out: call the tool's own function."""
        try:
            result = await self.inspect(**self.arguments)
        except SystemExit as error:  # the tool's own, not its executor's
            raise RuntimeError(f"a tool raised {error!r}") from error
        self.given.append(type(result))
        return result


@runtime_checkable
class ToolExecutor(Protocol):
    """Decides how one tool call is carried out: run it, replace, cache, limit or simulate it.

    What it returns or raises reaches messages, events and limits as if the tool had done so: a
    ``ToolError`` or ``TimeoutError`` is reported to the model, another exception ends the
    episode. Several calls may run at once. Keep it a frozen dataclass: it is shared by
    episodes and travels to worker processes.
    """

    async def __call__(self, invocation: ToolInvocation, /) -> ToolResult:
        """Carry out a call."""
        ...


ToolFunction: TypeAlias = Callable[[ToolInvocation], Awaitable[ToolResult]]
"""An async function that serves as an executor."""


class ToolExecutorError(InspectRLError):
    """A tool executor returned something that is not a result of a tool.

    Inspect would show the model its text, e.g. ``None``, as if the tool had returned that.

    Attributes:
        executor: its expression or name.
        tool: name of the tool that was called.
    """

    def __init__(self, message: str, *, executor: str, tool: str) -> None:
        super().__init__(message)
        self.executor = executor
        self.tool = tool


async def carry_out(
    executor: ToolExecutor | ToolFunction,
    invocation: ToolInvocation,
    *,
    name: str | None = None,
    origin: str = "",
) -> ToolResult:
    """Let an executor carry out a call, and check the result.

    Args:
        executor: the executor.
        invocation: the call.
        name: the executor's name for messages, if not its own.
        origin: the plugin that it comes from, for the message.

    Raises:
        ToolExecutorError: it returned no tool result, or would have ended the process. Results of
            the tool itself are accepted.
    """
    name = name or object_name(executor)
    try:
        answer: Any = executor(invocation)
        result: Any = await answer if inspect.isawaitable(answer) else answer
    except SystemExit as error:
        raise ToolExecutorError(
            f"tool executor {name!r}{origin} raised {error!r} for a call of {invocation.tool!r}",
            executor=name,
            tool=invocation.tool,
        ) from error
    if _is_result(result) or type(result) in invocation.given:
        return cast(ToolResult, result)
    if inspect.iscoroutine(result):
        result.close()
    raise ToolExecutorError(
        f"tool executor {name!r}{origin} gave {result!r:.80} for a call of {invocation.tool!r}, "
        "not a result of a tool: text, a number, content or a list of content",
        executor=name,
        tool=invocation.tool,
    )


_CONTENT = (ContentText, ContentImage, ContentAudio, ContentVideo, ContentDocument)


def _is_result(value: object) -> bool:
    if isinstance(value, list):
        return all(isinstance(each, _CONTENT) for each in value)
    return isinstance(value, (str, int, float, *_CONTENT))
