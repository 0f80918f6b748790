"""The sampling options that a solver asks for, and those that an environment can honour."""

from __future__ import annotations

from inspect_tinker_plugin.episode.types import TurnRequest
from inspect_tinker_plugin.tokens.dataset_renderer import DatasetRenderer

SAMPLER_OPTIONS = (
    "max_tokens",
    "temperature",
    "top_p",
    "top_k",
    "min_p",
    "frequency_penalty",
    "presence_penalty",
    "repetition_penalty",
    "logit_bias",
    "seed",
    "logprobs",
    "top_logprobs",
    "reasoning_effort",
    "reasoning_tokens",
    "response_schema",
)
"""Options that the trainer decides: an environment only passes on a stop condition."""


def stop_condition(
    context: DatasetRenderer, request: TurnRequest, task: str
) -> list[str] | list[int]:
    """Return the renderer's stop sequences together with the solver's.

    A sampler takes strings or token ids, not both. A stop sequence that is one token joins
    a renderer's ids; for any other, the reply is cut when it is parsed.
    """
    wanted = [seq for seq in request.config.stop_seqs or [] if seq]
    texts = [stop for stop in context.stops if isinstance(stop, str)]
    if texts:
        return list(dict.fromkeys([*texts, *wanted]))
    ids = [stop for stop in context.stops if isinstance(stop, int)]
    for seq in wanted:
        tokens = context.tokenizer.encode(seq, add_special_tokens=False)
        if len(tokens) == 1:
            ids.append(tokens[0])
        else:
            context.warn_once(
                f"stop_seqs:{seq}",
                f"task {task!r}: the stop sequence {seq!r} is not one token, so the sampler "
                "cannot stop at it; replies are cut there afterwards.",
            )
    return list(dict.fromkeys(ids))


def warn_of_ignored(context: DatasetRenderer, request: TurnRequest, task: str) -> None:
    """Warn, once per dataset, about options that have no effect in training."""
    config = request.config
    ignored = [name for name in SAMPLER_OPTIONS if getattr(config, name, None) is not None]
    if ignored:
        context.warn_once(
            f"config:{','.join(ignored)}",
            f"task {task!r} sets {', '.join(ignored)}; the trainer's sampler decides about "
            "these, so they have no effect.",
        )
    if request.tool_choice not in ("auto", "none") and request.tools:
        context.warn_once(
            "tool_choice",
            f"task {task!r} forces a tool choice ({request.tool_choice}), which cannot be "
            "imposed on the sampler: the policy is free to answer as it likes.",
        )
