"""Makes the fast tokenizers of ``transformers`` usable from several threads at once.

Their compiled part refuses a change of settings while another thread encodes ("Already
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
from collections.abc import Callable
from typing import Any
from weakref import WeakKeyDictionary

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


def _guarded(method: Callable[..., Any]) -> Callable[..., Any]:
    @functools.wraps(method)
    def guarded(self: Any, *args: Any, **kwargs: Any) -> Any:
        with _lock_of(self):
            return method(self, *args, **kwargs)

    guarded._inspect_rl_guarded = True  # type: ignore[attr-defined]
    return guarded


def _lock_of(tokenizer: object) -> threading.RLock:
    lock = _locks.get(tokenizer)
    if lock is None:
        with _making:
            lock = _locks.setdefault(tokenizer, threading.RLock())
    return lock
