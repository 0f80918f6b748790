"""The columns of an export: one sample's first prompt as a row of plain strings."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from typing import Any

from inspect_ai.dataset import Sample
from inspect_ai.model import (
    ChatMessage,
    ChatMessageAssistant,
    ChatMessageTool,
    ContentReasoning,
    ContentText,
)
from inspect_ai.solver import TaskState
from inspect_ai.tool import ToolInfo
from pydantic_core import to_json

from inspect_tinker_plugin.contracts.episodes import TurnRequest
from inspect_tinker_plugin.contracts.errors import ExportError
from inspect_tinker_plugin.export.schema import Schema

PROMPTS = Schema(
    {
        "id": "text",
        "prompt": "messages",
        "answer": "text",
        "info": "text",
        "task": "text",
        "tools": "text",
    }
)
"""The columns of an export of prompts."""


def row_of(task: str, sample: Sample, request: TurnRequest, state: TaskState) -> dict[str, Any]:
    """Make the row of a sample.

    Args:
        task: Name of the task.
        sample: The sample, with its id.
        request: The first model call of its episode.
        state: The state of the episode at that moment; it holds the order of choices that
            the solver shuffled.

    Raises:
        ExportError: The prompt has content that is not text, or the sample has a value that
            JSON and Arrow cannot hold.
    """
    row: dict[str, Any] = {
        "id": str(sample.id),
        "prompt": [message_row(message) for message in request.messages],
        "answer": _answer(sample, state),
        "info": _info(sample),
        "task": task,
        "tools": tools_json(request.tools),
    }
    require_text(row)
    return row


def require_text(row: Mapping[str, Any]) -> None:
    """Check that a row can be written.

    Raises:
        ExportError: It has a text that is none in UTF-8.
    """
    try:
        json.dumps(row, ensure_ascii=False).encode()
    except UnicodeEncodeError as error:
        raise ExportError(f"its text cannot be written as UTF-8 ({error.reason}).") from error


def message_row(message: ChatMessage) -> dict[str, Any]:
    """Return a message as chat templates take it.

    It has ``role`` and ``content``; reasoning, tool calls, and the call that is answered, where
    they apply.

    Raises:
        ExportError: It has content that is not text.
    """
    content, reasoning = _content(message)
    made: dict[str, Any] = {"role": message.role, "content": content}
    if reasoning:
        made["reasoning_content"] = reasoning
    if isinstance(message, ChatMessageAssistant) and message.tool_calls:
        made["tool_calls"] = [
            {
                "id": call.id,
                "type": "function",
                "function": {"name": call.function, "arguments": to_text(call.arguments)},
            }
            for call in message.tool_calls
        ]
    if isinstance(message, ChatMessageTool):
        if message.error is not None:
            made["content"] = f"Error: {message.error.message}"  # as Inspect's providers say it
        if message.tool_call_id is not None:
            made["tool_call_id"] = message.tool_call_id
        if message.function is not None:
            made["name"] = message.function
    return made


def _content(message: ChatMessage) -> tuple[str, str | None]:
    """Return the text and the reasoning of a message."""
    if isinstance(message.content, str):
        return message.content, None
    texts, reasoning = [], []
    for part in message.content:
        if isinstance(part, ContentText):
            texts.append(part.text)
        elif isinstance(part, ContentReasoning):
            # What a provider encrypted is not what the model thought; its summary may be there.
            reasoning.append((part.summary or "") if part.redacted else part.reasoning)
        else:
            raise ExportError(
                f"it has content of type {part.type!r} in a {message.role} message; an "
                "export carries text only."
            )
    return "\n".join(texts), "\n".join(filter(None, reasoning)) or None


def _answer(sample: Sample, state: TaskState) -> str:
    """Return the target as one string: itself, or a JSON list when there are several."""
    targets = [sample.target] if isinstance(sample.target, str) else list(sample.target)
    if sample.choices:
        targets = _shuffled_letters(targets, [c.original_position for c in state.choices])
    return targets[0] if len(targets) == 1 else to_text(targets) if targets else ""


def _shuffled_letters(targets: Sequence[str], positions: Sequence[int]) -> list[str]:
    """Rename choice letters when the solver shows the choices in another order.

    Args:
        targets: Letters of the sample's own order; anything else is left alone.
        positions: For each shown choice, its position in the sample.
    """
    if list(positions) == sorted(positions):
        return list(targets)
    shown = {chr(ord("A") + old): chr(ord("A") + new) for new, old in enumerate(positions)}
    return ["".join(shown.get(letter, letter) for letter in target) for target in targets]


def _info(sample: Sample) -> str:
    return to_text(
        {
            "sample_id": sample.id,
            "target": sample.target,
            "choices": sample.choices,
            "metadata": sample.metadata or {},
            "files": sorted(sample.files) if sample.files else [],
            "sandbox": sample.sandbox,
        }
    )


def tools_json(tools: Sequence[ToolInfo]) -> str:
    """Describe tools as chat templates and OpenAI-compatible servers expect them, as JSON."""
    return to_text([_tool(tool) for tool in tools])


def _tool(tool: ToolInfo) -> dict[str, Any]:
    return {
        "type": "function",
        "function": {
            "name": tool.name,
            "description": tool.description,
            "parameters": tool.parameters.model_dump(exclude_none=True),
        },
    }


def to_text(value: object) -> str:
    """Write JSON: dates as ISO text, models as objects, anything unknown as its ``str``."""
    try:
        return to_json(
            value, fallback=str, inf_nan_mode="strings", bytes_mode="base64", by_alias=True
        ).decode()
    except Exception as error:
        raise ExportError(f"it has a value that JSON cannot hold ({error}).") from error
