"""The columns of an export: one sample's first prompt as a row of plain strings."""

from __future__ import annotations

import json
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any, TypedDict

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

from inspect_tinker_plugin.episode.types import TurnRequest
from inspect_tinker_plugin.errors import ExportError

if TYPE_CHECKING:
    from datasets import Features

COLUMNS = ("id", "prompt", "answer", "info", "task", "tools")

RICH_KEYS = ("reasoning_content", "tool_calls", "tool_call_id", "name")
"""Keys of a message besides role and content; only in exports where a prompt needs them."""


class ExportRow(TypedDict):
    """One row. ``info`` and ``tools`` are JSON, so that the schema never depends on the data."""

    id: str
    prompt: list[dict[str, Any]]
    answer: str
    info: str
    task: str
    tools: str


def features(*, rich: bool) -> Features:
    """Return the schema of an export.

    Args:
        rich: Messages also have :data:`RICH_KEYS`. Chat templates recognise an assistant message
            with tool calls by the presence of the key, so plain exports leave the keys out.
    """
    from datasets import Features, List, Value

    text = Value("string")
    message: dict[str, Any] = {"role": text, "content": text}
    if rich:
        call = {"id": text, "type": text, "function": {"name": text, "arguments": text}}
        message |= {
            "reasoning_content": text,
            "tool_calls": List(call),
            "tool_call_id": text,
            "name": text,
        }
    return Features(
        {
            "id": text,
            "prompt": List(message),
            "answer": text,
            "info": text,
            "task": text,
            "tools": text,
        }
    )


def is_rich(row: ExportRow) -> bool:
    """Whether a prompt has more than roles and texts."""
    return any(len(message) > 2 for message in row["prompt"])


def widened(row: ExportRow) -> ExportRow:
    """Give every message all the keys of the rich schema."""
    empty = dict.fromkeys(RICH_KEYS)
    return {**row, "prompt": [{**empty, **message} for message in row["prompt"]]}


def row_of(task: str, sample: Sample, request: TurnRequest, state: TaskState) -> ExportRow:
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
    row: ExportRow = {
        "id": str(sample.id),
        "prompt": [_message(message) for message in request.messages],
        "answer": _answer(sample, state),
        "info": _info(sample),
        "task": task,
        "tools": _json([_tool(tool) for tool in request.tools]),
    }
    try:
        json.dumps(row, ensure_ascii=False).encode()
    except UnicodeEncodeError as error:
        raise ExportError(f"its text cannot be written as UTF-8 ({error.reason}).") from error
    return row


def _message(message: ChatMessage) -> dict[str, Any]:
    content, reasoning = _content(message)
    made: dict[str, Any] = {"role": message.role, "content": content}
    if reasoning:
        made["reasoning_content"] = reasoning
    if isinstance(message, ChatMessageAssistant) and message.tool_calls:
        made["tool_calls"] = [
            {
                "id": call.id,
                "type": "function",
                "function": {"name": call.function, "arguments": _json(call.arguments)},
            }
            for call in message.tool_calls
        ]
    if isinstance(message, ChatMessageTool):
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
            reasoning.append(part.reasoning)
        else:
            raise ExportError(
                f"its prompt has content of type {part.type!r} in a {message.role} message; an "
                "export carries text only."
            )
    return "\n".join(texts), "\n".join(reasoning) or None


def _answer(sample: Sample, state: TaskState) -> str:
    """Return the target as one string: itself, or a JSON list when there are several."""
    targets = [sample.target] if isinstance(sample.target, str) else list(sample.target)
    if sample.choices:
        targets = _shuffled_letters(targets, [c.original_position for c in state.choices])
    return targets[0] if len(targets) == 1 else _json(targets) if targets else ""


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
    return _json(
        {
            "sample_id": sample.id,
            "target": sample.target,
            "choices": sample.choices,
            "metadata": sample.metadata or {},
            "files": sorted(sample.files) if sample.files else [],
            "sandbox": sample.sandbox,
        }
    )


def _tool(tool: ToolInfo) -> dict[str, Any]:
    """Describe a tool as chat templates and OpenAI-compatible servers expect it."""
    return {
        "type": "function",
        "function": {
            "name": tool.name,
            "description": tool.description,
            "parameters": tool.parameters.model_dump(exclude_none=True),
        },
    }


def _json(value: object) -> str:
    """Write JSON: dates as ISO text, models as objects, anything unknown as its ``str``."""
    try:
        return to_json(
            value, fallback=str, inf_nan_mode="strings", bytes_mode="base64", by_alias=True
        ).decode()
    except Exception as error:
        raise ExportError(f"it has a value that JSON cannot hold ({error}).") from error
