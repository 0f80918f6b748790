"""Policies with scripted words and real tokens, for tests of the RL layer."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from functools import cache
from pathlib import Path
from typing import Any

import tinker
from tinker_cookbook.completers import StopCondition, TokenCompleter, TokensWithLogprobs
from tinker_cookbook.renderers import Renderer, get_renderer
from tinker_cookbook.rl.rollout_strategy import RolloutStrategy
from tinker_cookbook.rl.rollouts import do_group_rollout
from tinker_cookbook.rl.types import TrajectoryGroup
from tinker_cookbook.tokenizer_utils import Tokenizer, get_tokenizer

import inspect_tinker_plugin
from inspect_tinker_plugin.rl.dataset import as_rl_dataset

TOKENIZER = Path(inspect_tinker_plugin.__file__).parent / "testing_data" / "tokenizer"
END = "<|im_end|>"


@cache
def tokenizer() -> Tokenizer:
    return get_tokenizer(str(TOKENIZER))


@cache
def renderer(name: str = "qwen3_instruct") -> Renderer:
    return get_renderer(name, tokenizer())


def encode(text: str) -> list[int]:
    return [int(token) for token in tokenizer().encode(text, add_special_tokens=False)]


def tool_call(name: str, arguments: str) -> str:
    """Text of a tool call in Qwen3's format, with the arguments' JSON as given."""
    return f'<tool_call>\n{{"name": "{name}", "arguments": {arguments}}}\n</tool_call>'


@dataclass
class Words(TokenCompleter):
    """Says the scripted lines in order, each ended properly, and again from the start.

    A callable line is given the prompt's text. ``prompts`` keeps what the policy saw.
    """

    lines: Sequence[str | Callable[[str], str]]
    delay_s: float = 0.0
    first_s: float = 0.0
    """Seconds for the first reply, on top."""

    truncate: frozenset[int] = frozenset()
    prompts: list[list[int]] = field(default_factory=list)
    stops: list[StopCondition] = field(default_factory=list)

    async def __call__(
        self,
        model_input: tinker.ModelInput,
        stop: StopCondition,
        *,
        max_tokens: int | None = None,
    ) -> TokensWithLogprobs:
        prompt = model_input.to_ints()
        turn = len(self.prompts)
        self.prompts.append(prompt)
        self.stops.append(stop)
        if delay := self.delay_s + (0.0 if turn else self.first_s):
            await asyncio.sleep(delay)
        line = self.lines[turn % len(self.lines)]
        text = line(str(tokenizer().decode(prompt))) if callable(line) else line
        cut = turn in self.truncate
        tokens = encode(text if cut else text + END)
        return TokensWithLogprobs(
            tokens=tokens,
            maybe_logprobs=[-0.5] * len(tokens),
            stop_reason="length" if cut else "stop",
        )


async def roll_out_task(
    task: Any,
    policy: Words | Sequence[str | Callable[[str], str]],
    strategy: RolloutStrategy | None = None,
    **options: Any,
) -> TrajectoryGroup:
    """Roll out the group of a task's first sample; a policy may be given as its lines."""
    builder = as_rl_dataset(task, renderer(), **options).get_batch(0)[0]
    words = policy if isinstance(policy, Words) else Words(policy)
    return await do_group_rollout(builder, words, strategy)


def trained_tokens(data: Iterable[tinker.Datum]) -> list[int]:
    """Return the tokens that are in the loss."""
    found = []
    for datum in data:
        targets, mask = (datum.loss_fn_inputs[name].tolist() for name in ("target_tokens", "mask"))
        found += [token for token, trained in zip(targets, mask, strict=True) if trained]
    return found


def plain(datum: tinker.Datum) -> dict[str, Any]:
    """All of a datum as lists, which are equal when every bit is."""
    inputs = {name: (each.dtype, each.tolist()) for name, each in datum.loss_fn_inputs.items()}
    return {"model_input": datum.model_input.to_ints(), **inputs}
