"""The renderers that the token tests run over, on the shipped tokenizer."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

from tinker_cookbook.renderers import Renderer, get_renderer
from tinker_cookbook.renderers.deepseek_v4_1 import DeepSeekV4_1Renderer
from tinker_cookbook.renderers.qwen3 import Qwen3DisableThinkingRenderer, Qwen3Renderer
from tinker_cookbook.tokenizer_utils import get_tokenizer
from transformers import AutoTokenizer

from inspect_tinker_plugin.testing import tokenizer_path

LLAMA3 = ["<|begin_of_text|>", "<|start_header_id|>", "<|end_header_id|>", "<|eot_id|>"]
DEEPSEEK = [
    "<｜begin▁of▁sentence｜>",
    "<｜end▁of▁sentence｜>",
    "<｜User｜>",
    "<｜Assistant｜>",
    "<｜System｜>",
    "<｜Tool｜>",
    "｜DSML｜",
    *(
        f"<｜tool▁{name}｜>"
        for name in (
            "calls▁begin",
            "calls▁end",
            "call▁begin",
            "call▁end",
            "sep",
            "outputs▁begin",
            "outputs▁end",
            "output▁begin",
            "output▁end",
        )
    ),
]
GLM = ["[gMASK]", "<sop>", *(f"<|{r}|>" for r in ("system", "user", "assistant", "observation"))]


@functools.cache
def tokenizer(*extra: str) -> Any:
    """Return the shipped tokenizer, with more special tokens when a format needs them."""
    if not extra:
        return get_tokenizer(str(tokenizer_path()))
    own = AutoTokenizer.from_pretrained(str(tokenizer_path()))
    own.add_special_tokens({"additional_special_tokens": list(extra)})
    return own


FORMATS: dict[str, Callable[[], Renderer]] = {
    "qwen3_instruct": lambda: get_renderer("qwen3_instruct", tokenizer()),
    "qwen3_keep_thinking": lambda: Qwen3Renderer(tokenizer(), strip_thinking_from_history=False),
    "qwen3_disable_keep": lambda: Qwen3DisableThinkingRenderer(
        tokenizer(), strip_thinking_from_history=False
    ),
    "role_colon": lambda: get_renderer("role_colon", tokenizer()),
    "llama3": lambda: get_renderer("llama3", tokenizer(*LLAMA3)),
    "deepseekv3": lambda: get_renderer("deepseekv3_disable_thinking", tokenizer(*DEEPSEEK)),
    "deepseekv4_1": lambda: get_renderer("deepseekv4_1_disable_thinking", tokenizer(*DEEPSEEK)),
    "deepseekv4_1_keep": lambda: DeepSeekV4_1Renderer(
        tokenizer(*DEEPSEEK), strip_thinking_from_history=False
    ),
    "glm5_3": lambda: get_renderer("glm5_3_max_reasoning", tokenizer(*GLM)),
}
"""Renderers with the extension property, by name."""

WITHOUT_TOOLS = {"role_colon", "llama3"}


def renderer(name: str) -> Renderer:
    """Return a renderer of ``FORMATS``, or any of the cookbook's by its name."""
    return FORMATS[name]() if name in FORMATS else get_renderer(name, tokenizer())
