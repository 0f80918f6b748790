"""Tasks with tools, run as episodes under an executor."""

from __future__ import annotations

from typing import Any

from inspect_ai import Task
from inspect_ai.dataset import Sample
from inspect_ai.event import ToolEvent
from inspect_ai.model import ChatMessageTool
from inspect_ai.scorer import includes
from inspect_ai.solver import generate, use_tools
from inspect_ai.tool import Tool, ToolError
from tests.functions import make_tool

from inspect_tinker_plugin.contracts.episodes import EpisodeResult
from inspect_tinker_plugin.testing import Script, play_episode
from inspect_tinker_plugin.tools import ToolExecutor, ToolFunction, ToolScope

ran: list[tuple[Any, ...]] = []
"""The calls that the tools below really carried out; emptied by each test."""


@make_tool
async def add(x: int, y: int) -> str:
    """Add two numbers.

    Args:
        x: first
        y: second
    """
    ran.append(("add", x, y))
    return str(x + y)


@make_tool
async def fail(text: str) -> str:
    """Always fail.

    Args:
        text: what to say
    """
    ran.append(("fail", text))
    raise ToolError(text)


def scope(**memories: Any) -> ToolScope:
    return ToolScope(task="tools", sample_id=1, **memories)


def looping(*tools: Tool, **options: Any) -> Task:
    """A task whose model may call tools until it is done."""
    return Task(
        name="tools",
        dataset=[Sample(id=1, input="Do it.", target="done")],
        solver=[use_tools(*tools), generate()],
        scorer=includes(),
        **options,
    )


async def run(
    task: Task,
    script: Script,
    executor: ToolExecutor | ToolFunction | None,
    within: ToolScope | None = None,
) -> EpisodeResult:
    """Run the task's first sample with an executor in force."""
    result = await play_episode(task, script, tool_executor=executor, scope=within or scope())
    if result.error is not None and result.error.__cause__ is not None:
        raise result.error.__cause__
    return result


def tool_texts(result: EpisodeResult) -> list[str]:
    """Return the tools' answers to the model, errors included."""
    return [
        f"{message.error.type}: {message.error.message}" if message.error else message.text
        for message in result.state.messages
        if isinstance(message, ChatMessageTool)
    ]


def tool_events(result: EpisodeResult) -> list[ToolEvent]:
    """The tool events of the episode's log."""
    assert result.build_log is not None
    return [event for event in result.build_log().events if isinstance(event, ToolEvent)]
