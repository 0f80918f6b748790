"""Samplers, messages and results as JSON."""

from __future__ import annotations

import json
from dataclasses import is_dataclass
from typing import Any

from inspect_ai.model import ChatMessage, ChatMessageAssistant, ChatMessageTool, ContentReasoning
from pydantic import BaseModel, ConfigDict, Field
from pydantic_core import PydanticSerializationError, to_json

from inspect_tinker_plugin.serve.endpoint import Endpoint, Form
from inspect_tinker_plugin.serve.results import RolloutResult


class LentSampler(BaseModel):
    """The model server that a request lends; see ``Endpoint``."""

    model_config = ConfigDict(extra="forbid")

    url: str
    model: str = ""
    form: Form = "completions"
    api_key: str | None = None
    max_tokens: int = Field(default=1024, ge=1)
    sampling: dict[str, Any] = {}
    policy_version: int | str | None = None

    def endpoint(self) -> Endpoint:
        """Return the server.

        Raises:
            ConfigError: Its address is none.
        """
        return Endpoint(**self.model_dump())


def write_message(message: ChatMessage) -> dict[str, Any]:
    """Write a message as in OpenAI's chat completions; prompts with images are refused before."""
    written: dict[str, Any] = {"role": message.role, "content": message.text}
    if isinstance(message, ChatMessageTool):
        if message.error is not None:
            written["content"] = message.error.message
        written |= {"tool_call_id": message.tool_call_id or "", "name": message.function}
    elif isinstance(message, ChatMessageAssistant):
        parts = message.content if isinstance(message.content, list) else []
        thoughts = [part.reasoning for part in parts if isinstance(part, ContentReasoning)]
        if thoughts:
            written["reasoning_content"] = "\n".join(thoughts)
        if message.tool_calls:
            written["tool_calls"] = [
                {
                    "id": call.id,
                    "type": "function",
                    "function": {"name": call.function, "arguments": json.dumps(call.arguments)},
                }
                for call in message.tool_calls
            ]
    return written


def write_result(result: RolloutResult) -> dict[str, Any]:
    """Write a result without its turns, whose tokens are in its branches."""
    return {
        "task": result.task,
        "sample_id": result.sample_id,
        "number": result.number,
        "reward": result.reward,
        "failure": result.failure,
        "stop_reason": result.stop_reason,
        "scores": result.scores,
        "metrics": result.metrics,
        "messages": [write_message(each) for each in result.messages],
        "branches": result.branches,
    }


def write_json(value: Any) -> bytes:
    """Write an answer, whatever tasks, models and clients put into it."""
    try:
        return to_json(value, inf_nan_mode="strings", fallback=str)
    except PydanticSerializationError:  # half a surrogate pair has no UTF-8
        plain = json.loads(json.dumps(value, default=_plain), parse_constant=str)
        return json.dumps(plain).encode()


def _plain(value: Any) -> Any:
    return vars(value) if is_dataclass(value) else str(value)
