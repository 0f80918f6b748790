"""What a trainer gets of a rollout: turns, sequences, reward, what failed; and it as JSON."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal

from inspect_ai.model import ChatMessage, ChatMessageAssistant, ChatMessageTool, ContentReasoning
from inspect_ai.tool import ToolInfo


@dataclass(frozen=True, kw_only=True)
class Failure:
    """Why a rollout has no reward. It is never a reward of zero."""

    cause: str
    """The part that failed, a key of ``on_error``; ``sampler`` if the lent sampler did."""

    message: str


@dataclass(kw_only=True)
class SampledTurn:
    """One model call that the policy answered."""

    prompt_tokens: Sequence[int]
    tokens: Sequence[int]
    """The sampled tokens that the task saw."""

    logprobs: Sequence[float]
    stop_reason: Literal["stop", "length"]
    policy_version: int | str | None
    messages: Sequence[ChatMessage]
    """The conversation that was continued."""

    tools: Sequence[ToolInfo]
    """The tools that were offered."""

    reply: ChatMessageAssistant
    """The reply, as the task read it."""

    trained: bool = True
    """Whether the reply is trained on: not if a program asked for a side model, or nobody waited
    for the reply any more. Known once the rollout has ended."""

    branch: int = 0
    """Index of its branch in the result."""


@dataclass(frozen=True, kw_only=True)
class Span:
    """Consecutive sampled tokens of a branch."""

    start: int
    end: int
    trained: bool
    policy_version: int | str | None
    stop_reason: Literal["stop", "length"]


@dataclass(frozen=True, kw_only=True)
class Branch:
    """One training sequence. An episode has several if it held several conversations."""

    tokens: Sequence[int]
    """Prompt, replies and what came between them."""

    logprobs: Sequence[float]
    """One per token; 0 where nothing was sampled."""

    mask: Sequence[int]
    """One per token; 1 where it is trained on."""

    spans: Sequence[Span]
    """The sampled parts, in order."""

    @property
    def prompt_tokens(self) -> Sequence[int]:
        """The tokens before the first reply."""
        return self.tokens[: self.spans[0].start]


@dataclass(frozen=True, kw_only=True)
class RolloutResult:
    """One rollout of a sample."""

    task: str
    sample_id: int | str | None
    number: int
    """Number of the rollout in its group, from 1."""

    reward: float | None
    """``None`` if the rollout failed."""

    failure: Failure | None
    stop_reason: str | None
    """Why it ended, in the cookbook's words: ``completed``, ``max_turns`` …"""

    scores: Mapping[str, Mapping[str, Any]]
    """Value, answer and explanation of each score, by scorer."""

    metrics: Mapping[str, float | int]
    messages: Sequence[ChatMessage]
    """The conversation as the task left it."""

    turns: Sequence[SampledTurn]
    """All answered model calls, branch by branch."""

    branches: Sequence[Branch]
    """The training sequences, equal to the datums of a Tinker training of the same replies."""


def join_turns(turns: Sequence[SampledTurn]) -> list[Branch]:
    """Join turns to training sequences, and note in each turn its branch.

    A turn continues the one before it if its prompt begins with that whole sequence; this is the
    cookbook's rule (``rl/data_processing.py``), so the turns come branch by branch.
    """
    branches: list[Branch] = []
    tokens: list[int] = []
    logprobs: list[float] = []
    mask: list[int] = []
    spans: list[Span] = []
    for turn in turns:
        prompt = list(turn.prompt_tokens)
        if not branches or prompt[: len(tokens)] != tokens:
            tokens, logprobs, mask, spans = [], [], [], []
            branches.append(Branch(tokens=tokens, logprobs=logprobs, mask=mask, spans=spans))
        new = prompt[len(tokens) :]
        start = len(prompt)
        tokens += [*new, *turn.tokens]
        logprobs += [0.0] * len(new) + list(turn.logprobs)
        mask += [0] * len(new) + [int(turn.trained)] * len(turn.tokens)
        spans.append(
            Span(
                start=start,
                end=len(tokens),
                trained=turn.trained,
                policy_version=turn.policy_version,
                stop_reason=turn.stop_reason,
            )
        )
        turn.branch = len(branches) - 1
    return branches


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
