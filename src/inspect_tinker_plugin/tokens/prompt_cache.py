"""A cache for the first prompts that the episodes of a group have in common."""

from __future__ import annotations

import hashlib
from collections import OrderedDict
from collections.abc import Sequence

import tinker

from inspect_tinker_plugin.tokens.message_keys import MessageKey


class PromptCache:
    """A bounded cache of rendered prompts; pickles empty.

    Args:
        size: prompts kept; the least recently used is dropped. A group asks for one
            prompt, or for a few when its solver adds something random.
    """

    def __init__(self, size: int = 8) -> None:
        self._size = size
        self._prompts: OrderedDict[bytes, list[tinker.ModelInputChunk]] = OrderedDict()

    def get(self, key: bytes) -> list[tinker.ModelInputChunk] | None:
        """Return the chunks of a prompt, if it was rendered before."""
        if key in self._prompts:
            self._prompts.move_to_end(key)
        return self._prompts.get(key)

    def put(self, key: bytes, chunks: list[tinker.ModelInputChunk]) -> None:
        """Keep the chunks of a prompt."""
        self._prompts[key] = chunks
        if len(self._prompts) > self._size:
            self._prompts.popitem(last=False)

    def __len__(self) -> int:
        return len(self._prompts)

    def __reduce__(self) -> tuple[type[PromptCache], tuple[int]]:
        """Pickle without the prompts: another process renders its own."""
        return (type(self), (self._size,))


def prompt_key(tools: str, keys: Sequence[MessageKey]) -> bytes:
    """Return a key for a prompt: the contents of its messages, and its tools."""
    return hashlib.sha256(repr((tools, list(keys))).encode()).digest()
