r"""Spells out half surrogate pairs, which neither tokenizers nor JSON files can hold.

JSON can name them (``"\ud83d"``), so a policy's tool calls may contain them, and tools may return
them. They are written as Inspect's logs write them.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any


def spelt_out(text: str) -> str:
    r"""Return a text with each half surrogate pair as ``\ud83d``; any other text is unchanged."""
    if text.isascii():
        return text
    try:
        text.encode()
    except UnicodeEncodeError:
        return text.encode(errors="backslashreplace").decode()
    return text


def all_spelt_out(value: Any, write: Callable[[str], str] = spelt_out) -> Any:
    """Do the same, or what ``write`` does, in each text and each key of JSON data."""
    if isinstance(value, str):
        return write(value)
    if isinstance(value, list):
        return [all_spelt_out(item, write) for item in value]
    if isinstance(value, dict):
        return {write(key): all_spelt_out(item, write) for key, item in value.items()}
    return value
