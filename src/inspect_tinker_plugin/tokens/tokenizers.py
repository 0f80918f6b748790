"""A tokenizer of our own around one that was given: exact for text, in any thread.

The fast tokenizers of ``transformers`` keep settings in their compiled part, which ``encode``
changes: whether control tokens in a text are encoded as such. A renderer that encodes with
``split_special_tokens=True`` and a reward function in another thread that does not would change
them under each other's hands. So a renderer of ours has a copy of that part to itself.

Neither can a tokenizer tell the control tokens that a renderer writes from a text that spells them.
A message that does is marked before it is rendered (:class:`ControlTokens`).
"""

from __future__ import annotations

import re
import secrets
import threading
from array import array
from collections.abc import Callable, Sequence
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


def copy_with(renderer: Renderer, **parts: Any) -> Renderer:
    """Return a copy of a renderer with other parts; the renderer if it cannot be copied."""
    try:  # not with copy(): those of the cookbook would load their tokenizer again
        own: Renderer = object.__new__(type(renderer))
        vars(own).update(vars(renderer), **parts)
    except Exception:  # its class makes it in another way
        return renderer
    return own


_MARK = f"q{secrets.token_hex(8)}q"
"""Breaks a control token in a text on its way through a renderer; no text can know it."""

_OF_REASONING = frozenset({"<think>", "</think>"})
"""Solvers and renderers write these as text, and they neither end a turn nor begin one."""


class ControlTokens:
    """Keeps the text of messages from becoming control tokens.

    A text may spell a token that ends a turn or begins one: a web page, a file, a question about
    chat templates. Renderers encode such a text together with the tokens that they write
    themselves, and tokenizers cannot tell the two apart. So each control token in a text is
    broken by a mark (:meth:`break_control`) before a renderer gets the text, and the tokenizer of
    our copy of the renderer encodes the parts around a mark one by one, without the mark. A text
    that spells no control token has no mark, and is encoded as ever.

    Attributes:
        renderer: A copy of the renderer that knows marks; the renderer itself where none is needed.
        ids: The control tokens.
    """

    def __init__(self, renderer: Renderer, stops: Sequence[str] | Sequence[int]) -> None:
        texts = _control_texts(renderer.tokenizer, stops)
        self.ids = frozenset(texts.values())
        written = [stop for stop in stops if isinstance(stop, str) and len(stop) > 1]
        self._openers = {text[:2] for text in [*texts, *written]}
        spelt = sorted([*texts, *written], key=len, reverse=True)
        self._spelt = re.compile("|".join(map(re.escape, spelt)) or r"(?!)")
        self._written = frozenset(written)
        self._break = _MARK
        self.renderer = copy_with(renderer, tokenizer=_MarkedTexts(renderer.tokenizer))
        probe = min(texts, key=lambda text: texts[text] not in stops, default=None)
        if probe is not None and not self._is_text(self.break_control(probe)):
            self.renderer = renderer
            self._break = "" if self._is_text(probe) else " "

    @property
    def encoded_as_text(self) -> bool:
        """Whether the policy gets the same text, and not one with a space in the control token.

        A space is all that is left where a renderer does not encode with its ``tokenizer``, unless
        what it encodes with keeps texts and control tokens apart by itself.
        """
        return self._break != " "

    def break_control(self, text: str) -> str:
        """Return a text for the renderer, in which no control token is spelled."""
        while self._break and self.find_spelled(text):
            text = self._spelt.sub(self._break_match, text)
        return text

    def find_spelled(self, texts: object) -> list[str]:
        """Return the control tokens that are spelled in a text, or in any of a list."""
        if isinstance(texts, tuple | list):
            return [token for each in texts for token in self.find_spelled(each)]
        text = texts.decode(errors="ignore") if isinstance(texts, bytes) else texts
        if not isinstance(text, str) or not any(opener in text for opener in self._openers):
            return []
        return self._spelt.findall(text)

    def _break_match(self, match: re.Match[str]) -> str:
        text = match[0]
        if text in self._written:  # the format is text itself, and has no tokens to be kept from
            at = len(text) - len(text.lstrip()) or 1
            return f"{text[:at]} {text[at:]}"
        at = next((i for i, letter in enumerate(text) if letter.isalnum()), 1) or 1
        return text[:at] + self._break + text[at:]

    def _is_text(self, token: str) -> bool:
        """Return whether our renderer writes a control token, as spelled here, as text."""
        try:
            plain, broken = (
                self.renderer.build_generation_prompt([{"role": "user", "content": content}])
                for content in ("x", f"x {token} x")
            )
            seen = [
                [each for each in prompt.to_ints() if each in self.ids]
                for prompt in (plain, broken)
            ]
            text = str(self.renderer.tokenizer.decode(broken.to_ints()))
        except Exception:  # a renderer that takes no such conversation: nothing is known of it
            return False
        return seen[0] == seen[1] and _MARK not in text


class _MarkedTexts:
    """A tokenizer that leaves out marks, and encodes what stands around them one by one."""

    def __init__(self, tokenizer: Any) -> None:
        self._tokenizer = tokenizer

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__"):
            raise AttributeError(name)
        return getattr(self._tokenizer, name)

    def encode(self, text: Any, *args: Any, **kwargs: Any) -> Any:
        """Encode a text as the tokenizer does."""
        encode = self._tokenizer.encode
        if not isinstance(text, str) or _MARK not in text:
            return encode(text, *args, **kwargs)
        if kwargs.get("split_special_tokens"):
            return encode(text.replace(_MARK, ""), *args, **kwargs)
        first, *others = text.split(_MARK)
        tokens = list(encode(first, *args, **kwargs))
        if hasattr(self._tokenizer, "backend_tokenizer"):  # others would not know the argument
            kwargs["add_special_tokens"] = False
        for other in others:
            tokens += encode(other, *args, **kwargs)
        return tokens


def _control_texts(tokenizer: Any, stops: Sequence[str] | Sequence[int]) -> dict[str, int]:
    """Return the control tokens of a tokenizer by their texts.

    Those that it calls special, the renderer's stop tokens, and others in the same spelling:
    DeepSeek's ``<｜User｜>`` is an ordinary added token.
    """
    added = getattr(tokenizer, "added_tokens_decoder", {})
    texts = {
        str(token.content): int(number)
        for number, token in added.items()
        if token.special or not {"|", "｜"}.isdisjoint(token.content)
    }
    of_tiktoken = getattr(tokenizer, "special_tokens", None)
    if isinstance(of_tiktoken, dict):
        texts |= {str(text): number for text, number in of_tiktoken.items()}
    for stop in stops:
        if isinstance(stop, int):
            texts.setdefault(str(tokenizer.decode([stop])), stop)
    return {
        text: number
        for text, number in texts.items()
        if len(text) > 1 and text not in _OF_REASONING
    }
