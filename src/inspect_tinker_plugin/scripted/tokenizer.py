"""The shipped tokenizer, and renderers over it: real tokens without a download."""

from __future__ import annotations

from functools import cache
from pathlib import Path
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from tinker_cookbook.renderers import Renderer
    from tinker_cookbook.tokenizer_utils import Tokenizer


def tokenizer_path() -> Path:
    """Return the folder of the shipped byte-level tokenizer, which has Qwen3's special tokens."""
    return Path(__file__).resolve().parents[1] / "testing_data" / "tokenizer"


@cache
def load_tokenizer() -> Tokenizer:
    """Load the shipped tokenizer, once per process."""
    from tinker_cookbook.tokenizer_utils import get_tokenizer

    return get_tokenizer(str(tokenizer_path()))


def load_renderer(name: str = "qwen3_instruct") -> Renderer:
    """Make one of the cookbook's renderers over the shipped tokenizer.

    Args:
        name: A renderer of the Qwen3 family, as ``tinker_cookbook.renderers.get_renderer``
            takes it: ``qwen3``, ``qwen3_instruct``, ``qwen3_disable_thinking``.
    """
    from tinker_cookbook.renderers import get_renderer

    return get_renderer(name, load_tokenizer())
