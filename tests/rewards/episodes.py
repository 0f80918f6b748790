"""Finished episodes to try aggregators on: real results, made without running a model."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from inspect_ai.dataset import Sample
from inspect_ai.model import (
    ChatMessage,
    ChatMessageAssistant,
    ChatMessageUser,
    ModelName,
    ModelOutput,
    ModelUsage,
)
from inspect_ai.scorer import SampleScore, Score
from inspect_ai.solver import TaskState

from inspect_tinker_plugin.contracts.episodes import EpisodeResult
from inspect_tinker_plugin.contracts.errors import Cause, EpisodeError
from inspect_tinker_plugin.rewards import GroupMember, Reward


def finished(
    scores: Mapping[str, Any] | None = None,
    *,
    completion: str = "four",
    turns: int = 1,
    output_tokens: int = 10,
    messages: list[ChatMessage] | None = None,
    error: EpisodeError | None = None,
) -> EpisodeResult:
    """An episode that ended with these scores (values, or whole `Score` objects)."""
    sample = Sample(id="s1", input="2 + 2?", target="4")
    output = ModelOutput.from_content("scripted", completion)
    state = TaskState(
        model=ModelName("mockllm/model"),
        sample_id="s1",
        epoch=1,
        input="2 + 2?",
        messages=messages
        or [ChatMessageUser(content="2 + 2?"), ChatMessageAssistant(content=completion)],
        output=output,
    )
    return EpisodeResult(
        task="sums",
        sample=sample,
        epoch=1,
        state=state,
        scores={
            name: SampleScore(score=s if isinstance(s, Score) else Score(value=s))
            for name, s in (scores or {}).items()
        },
        limit=None,
        error=error,
        turns=turns,
        usage=ModelUsage(output_tokens=output_tokens),
    )


def member(reward: float, *, completion: str = "four") -> GroupMember:
    """A member of a group that ended well."""
    return GroupMember(
        result=finished({"match": reward}, completion=completion), reward=Reward(reward)
    )


def failed_member() -> GroupMember:
    """A member whose sandbox died."""
    error = EpisodeError("gone", cause=Cause.SANDBOX, task="sums", sample_id="s1")
    return GroupMember(result=finished(error=error), reward=None)
