"""Tokenizers that many threads share, and what was encoded with them lately.

The fast tokenizers of ``transformers`` are made usable from several threads at once. Their
compiled part refuses a change of settings while another thread encodes ("Already
borrowed"), and ``encode`` changes settings: a renderer that encodes with
``split_special_tokens=True`` and a reward function that does not keep changing them. Reward
functions and scorers run in threads, trainers decode in theirs, and all of them share the one
tokenizer that ``get_tokenizer`` caches. So the lock is on the tokenizer's class, one per
tokenizer, and every user of a tokenizer waits for the others. A copy per user would not do: tokens
that were added in memory, and image processors, do not survive every way of copying.
"""

from __future__ import annotations

import functools
import threading
from array import array
from collections.abc import Callable
from typing import Any
from weakref import WeakKeyDictionary

from inspect_tinker_plugin.episode.fast_paths import FastPath, taken

_GUARDED = (
    "_encode_plus",
    "_batch_encode_plus",
    "_decode",
    "_add_tokens",
    "set_truncation_and_padding",
    "train_new_from_iterator",
)
"""Methods through which all encoding, decoding and changes of settings go."""

_locks: WeakKeyDictionary[Any, threading.RLock] = WeakKeyDictionary()
_making = threading.Lock()


def make_thread_safe(tokenizer: object) -> None:
    """Guard the class of a tokenizer, once per process; does nothing for other kinds.

    Tokenizers written in Python, and ``tiktoken``, have no settings that encoding changes.
    """
    for owner in type(tokenizer).__mro__:
        if "backend_tokenizer" not in vars(owner):
            continue
        with _making:
            for name in _GUARDED:
                method = vars(owner).get(name)
                if method is not None and not hasattr(method, "_inspect_rl_guarded"):
                    setattr(owner, name, _guarded(method))
            encode = getattr(owner, "encode", None)
            if encode is not None and not hasattr(encode, "_inspect_rl_remembering"):
                owner.encode = _remembering(encode, of=owner)  # type: ignore[attr-defined]  # a class of transformers
            decode = getattr(owner, "decode", None)
            if decode is not None and not hasattr(decode, "_inspect_rl_straight"):
                owner.decode = _straight(decode)  # type: ignore[attr-defined]  # the same


def _guarded(method: Callable[..., Any]) -> Callable[..., Any]:
    @functools.wraps(method)
    def guarded(self: Any, *args: Any, **kwargs: Any) -> Any:
        with _lock_of(self):
            if method.__name__ == "_add_tokens":
                _forget(self)
            return method(self, *args, **kwargs)

    guarded._inspect_rl_guarded = True  # type: ignore[attr-defined]
    return guarded


def _lock_of(tokenizer: object) -> threading.RLock:
    lock = _locks.get(tokenizer)
    if lock is None:
        with _making:
            lock = _locks.setdefault(tokenizer, threading.RLock())
    return lock


_SHORT = 256
"""Characters of texts that are remembered at once: headers, ends of messages, stubs."""

_LONG = 65_536
"""Characters beyond which a text is not remembered."""

_REMEMBERED = 1_000_000
"""Characters remembered per tokenizer, and as many of those that were wanted before them."""

_SEEN = 16_384
"""Longer texts of which it is known that they were encoded once."""


class _Encodings:
    """The tokens of the texts that one tokenizer encoded lately.

    Longer texts, most of which never return, are remembered when they are encoded for the second
    time: the system message of a task, or a tool's result that a group's episodes have in common.
    """

    __slots__ = ("_before", "_latest", "_seen", "_size", "backend")

    def __init__(self, backend: object) -> None:
        self.backend = backend
        self._latest: dict[tuple[str, bool], array[int]] = {}
        self._before = self._latest
        self._size = 0
        self._seen: set[int] = set()

    def get(self, key: tuple[str, bool]) -> list[int] | None:
        """Return the tokens of a text, if they are remembered: a list of the caller's own."""
        tokens = self._latest.get(key)
        if tokens is None:
            tokens = self._before.get(key)
            if tokens is None:
                return None
            self._keep(key, tokens)
        return tokens.tolist()

    def put(self, key: tuple[str, bool], tokens: list[int]) -> None:
        """Remember the tokens of a text, or that it was encoded."""
        length = len(key[0])
        if length > _LONG:
            return
        if length > _SHORT:
            name = hash(key)
            if name not in self._seen:
                if len(self._seen) >= _SEEN:
                    self._seen.clear()
                self._seen.add(name)
                return
        self._keep(key, array("i", tokens))

    def _keep(self, key: tuple[str, bool], tokens: array[int]) -> None:
        length = len(key[0]) + _SHORT  # an entry costs as much as a short text
        if self._size + length > _REMEMBERED:
            self._before, self._latest, self._size = self._latest, {}, 0
        self._latest[key] = tokens
        self._size += length


_encodings: WeakKeyDictionary[Any, _Encodings] = WeakKeyDictionary()


def _encodings_of(tokenizer: Any) -> _Encodings:
    """Return what is remembered for a tokenizer: nothing yet if its compiled part was replaced."""
    known = _encodings.get(tokenizer)
    if known is None or known.backend is not tokenizer.backend_tokenizer:
        with _making:
            known = _encodings[tokenizer] = _Encodings(tokenizer.backend_tokenizer)
    return known


def _forget(tokenizer: Any) -> None:
    """Forget what was encoded with a tokenizer, and with copies of it that share its tokens."""
    backend = tokenizer.backend_tokenizer
    with _making:
        for other, known in list(_encodings.items()):
            if known.backend is backend:
                del _encodings[other]


_here = threading.local()


class RememberedEncodings:
    """Shortens, in a block of this thread, what a renderer asks of a tokenizer.

    Much of what it encodes was encoded before: headers and ends of messages, each of which costs
    as much as a paragraph, and what episodes of a task have in common. Their tokens are
    remembered. Other texts are encoded without the places of tokens in the text, a third of the
    work. Decoding takes lists of integers as they are.
    """

    __slots__ = ("_before",)

    def __enter__(self) -> None:
        """Begin to remember."""
        self._before = getattr(_here, "remembers", False)
        _here.remembers = taken(FastPath.ENCODINGS)

    def __exit__(self, *_: object) -> None:
        """Do as before."""
        _here.remembers = self._before


_UNDERSTOOD = frozenset({"add_special_tokens", "split_special_tokens"})
"""Arguments of ``encode`` that the short ways know."""

_BOOL = frozenset({bool})


def _remembering(method: Callable[..., Any], *, of: type) -> Callable[..., Any]:
    @functools.wraps(method)
    def encode(self: Any, text: Any, *args: Any, **kwargs: Any) -> Any:
        if (
            not getattr(_here, "remembers", False)
            or args
            or type(text) is not str
            or not kwargs.keys() <= _UNDERSTOOD
            or not _BOOL.issuperset(map(type, kwargs.values()))
            or type(self)._encode_plus is not vars(of).get("_encode_plus")
        ):
            return method(self, text, *args, **kwargs)
        split = kwargs.get("split_special_tokens", self.split_special_tokens)
        special = kwargs.get("add_special_tokens", True)
        known = None if special else _encodings_of(self)  # what is added depends on more settings
        tokens = None if known is None else known.get((text, split))
        if tokens is None:
            tokens = _encoded(self, text, special=special, split=split)
            if tokens is None:
                return method(self, text, **kwargs)
            if known is not None:
                known.put((text, split), tokens)
        return tokens

    encode._inspect_rl_remembering = True  # type: ignore[attr-defined]
    return encode


def _encoded(tokenizer: Any, text: str, *, special: bool, split: bool) -> list[int] | None:
    """Encode one text as ``encode`` does, which also finds out where each token stands in it.

    ``None`` where settings of the tokenizer, which ``encode`` changes, are not the usual ones.
    """
    with _lock_of(tokenizer):
        backend = tokenizer.backend_tokenizer
        if backend.truncation is not None or backend.padding is not None:
            return None
        if backend.encode_special_tokens != split:
            backend.encode_special_tokens = split
        [encoding] = backend.encode_batch_fast([text], add_special_tokens=special)
    tokens: list[int] = encoding.ids
    if len(tokens) > tokenizer.model_max_length:
        tokenizer._eventual_warn_about_too_long_sequence(tokens, None, True)
    return tokens


def _straight(method: Callable[..., Any]) -> Callable[..., Any]:
    """Decode sampled tokens, which are a list of integers, without a look at the kind of each."""

    @functools.wraps(method)
    def decode(self: Any, token_ids: Any, *args: Any, **kwargs: Any) -> Any:
        if (
            args
            or kwargs
            or not getattr(_here, "remembers", False)
            or type(token_ids) is not list
            or {*map(type, token_ids)} != {int}
        ):
            return method(self, token_ids, *args, **kwargs)
        return self._decode(token_ids=token_ids, skip_special_tokens=False)

    decode._inspect_rl_straight = True  # type: ignore[attr-defined]
    return decode
