"""A real model, small enough for a test: a Qwen2 with random weights, which says anything."""

from __future__ import annotations

from dataclasses import dataclass, field
from functools import cached_property
from typing import Any

import tinker
import torch
from tests.rl.policies import tokenizer
from tinker_cookbook.completers import StopCondition, TokenCompleter, TokensWithLogprobs


@dataclass
class TinyModel(TokenCompleter):
    """Samples from it on the CPU. The same prompt gets the same reply, so that two runs compare."""

    max_tokens: int = 16
    asked: list[int] = field(default_factory=list)

    @cached_property
    def model(self) -> Any:
        from transformers import Qwen2Config, Qwen2ForCausalLM

        torch.manual_seed(0)
        shape = {"hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 2}
        heads = {"num_attention_heads": 2, "num_key_value_heads": 1}
        return Qwen2ForCausalLM(Qwen2Config(vocab_size=len(tokenizer()), **shape, **heads)).eval()

    async def __call__(
        self,
        model_input: tinker.ModelInput,
        stop: StopCondition,
        *,
        max_tokens: int | None = None,
    ) -> TokensWithLogprobs:
        prompt = model_input.to_ints()
        self.asked.append(len(prompt))
        chance = torch.Generator().manual_seed(hash(tuple(prompt)))
        tokens: list[int] = []
        logprobs: list[float] = []
        seen, cache = torch.tensor([prompt]), None
        with torch.no_grad():
            while len(tokens) < min(self.max_tokens, max_tokens or self.max_tokens):
                out = self.model(seen, past_key_values=cache, use_cache=True)
                cache = out.past_key_values
                chances = torch.log_softmax(out.logits[0, -1].double(), dim=-1)
                token = int(torch.multinomial(chances.exp(), 1, generator=chance))
                tokens.append(token)
                logprobs.append(float(chances[token]))
                if token in stop:
                    return TokensWithLogprobs(tokens, logprobs, "stop")
                seen = torch.tensor([[token]])
        return TokensWithLogprobs(tokens, logprobs, "length")
