"""A tokenizer of our own around one that was given: short texts are encoded once, in any thread.

The fast tokenizers of ``transformers`` keep settings in their compiled part, which ``encode``
changes: whether control tokens in a text are encoded as such. A renderer that encodes with
``split_special_tokens=True`` and a reward function in another thread that does not would change
them under each other's hands. So a renderer of ours has a copy of that part to itself.
"""

from __future__ import annotations

import threading
from array import array
from collections.abc import Callable
from copy import deepcopy
from typing import Any
from weakref import WeakValueDictionary

from tinker_cookbook.renderers import Renderer

_UNDERSTOOD = frozenset({"add_special_tokens", "split_special_tokens"})
"""Arguments of ``encode`` that are understood here."""

_SHORT = 256
"""Characters of texts that are remembered: headers, ends of messages, stubs."""

_REMEMBERED = 4096
"""Texts remembered per tokenizer; then it begins anew."""


class OwnTokenizer:
    """Encodes like the tokenizer that it was made of, which it stands for.

    Headers and ends of messages return in every prompt, and each costs as much as a paragraph:
    tokens of short texts are remembered. Other texts are encoded without the places of tokens in
    the text, a third of the work. What it does not understand is left to the tokenizer.

    Args:
        tokenizer: The tokenizer.
    """

    def __init__(self, tokenizer: Any) -> None:
        self._tokenizer = tokenizer
        self._lock = threading.RLock()
        self._of: object = None
        self._backend: Any = None
        self._known: dict[tuple[str, bool, bool], array[int]] = {}

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__"):
            raise AttributeError(name)
        return getattr(self._tokenizer, name)

    def __len__(self) -> int:
        """Return the size of the vocabulary."""
        return len(self._tokenizer)

    def encode(self, text: Any, *args: Any, **kwargs: Any) -> Any:
        """Encode a text as the tokenizer does."""
        if args or type(text) is not str or not kwargs.keys() <= _UNDERSTOOD:
            return self._tokenizer.encode(text, *args, **kwargs)
        split = bool(kwargs.get("split_special_tokens", self._tokenizer.split_special_tokens))
        special = bool(kwargs.get("add_special_tokens", True))
        with self._lock:
            backend, key = self._own_backend(), (text, split, special)
            known = self._known.get(key)
            if known is not None:
                return known.tolist()
            backend.encode_special_tokens = split
            [encoding] = backend.encode_batch_fast([text], add_special_tokens=special)
            if len(text) <= _SHORT:
                if len(self._known) >= _REMEMBERED:
                    self._known.clear()
                self._known[key] = array("i", encoding.ids)
            return encoding.ids

    def _own_backend(self) -> Any:
        """Return our copy of the compiled part, made again when the original was replaced.

        A length that the original is set to does not apply to it.
        """
        theirs = self._tokenizer.backend_tokenizer
        if self._of is not theirs:
            self._backend, self._of, self._known = deepcopy(theirs), theirs, {}
            self._backend.no_truncation()
            self._backend.no_padding()
        return self._backend


_own: WeakValueDictionary[int, OwnTokenizer] = WeakValueDictionary()
_making = threading.Lock()


def own_tokenizer(tokenizer: Any) -> Any:
    """Return our tokenizer around one of ``transformers``, and any other as it is.

    Tokenizers written in Python, and ``tiktoken``, have no settings that encoding changes; a class
    that encodes in a way of its own is left alone.
    """
    if isinstance(tokenizer, OwnTokenizer) or not _encodes_as_usual(tokenizer):
        return tokenizer
    with _making:
        found = _own.get(id(tokenizer))
        if found is None:
            made = OwnTokenizer(tokenizer)
            try:
                made._own_backend()
            except Exception:  # parts written in Python cannot be copied
                return tokenizer
            found = _own[id(tokenizer)] = made
        return found


def _encodes_as_usual(tokenizer: Any) -> bool:
    for owner in type(tokenizer).__mro__:
        if "backend_tokenizer" in vars(owner):
            usual: Callable[..., Any] | None = vars(owner).get("_encode_plus")
            return (
                type(tokenizer)._encode_plus is usual and type(tokenizer).encode is owner.encode  # type: ignore[attr-defined]  # a class of transformers
            )
    return False


def with_own_tokenizer(renderer: Renderer) -> Renderer:
    """Return a copy of a renderer that encodes with our tokenizer, if it can do so."""
    tokenizer = own_tokenizer(getattr(renderer, "tokenizer", None))
    if not isinstance(tokenizer, OwnTokenizer):
        return renderer
    own = object.__new__(type(renderer))
    vars(own).update(vars(renderer), tokenizer=tokenizer)
    return own
