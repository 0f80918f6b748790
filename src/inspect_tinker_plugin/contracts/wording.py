r"""How texts are written: counts, wrong names, places in code, half surrogate pairs.

Half surrogate pairs fit in neither tokenizers nor JSON files. JSON can name them (``"\ud83d"``), so
a policy's tool calls may contain them, and tools may return them. They are written as Inspect's
logs write them.
"""

from __future__ import annotations

import difflib
import json
import re
import traceback
from collections.abc import Callable, Iterable
from dataclasses import is_dataclass
from pathlib import Path
from typing import Any

from pydantic_core import PydanticSerializationError, to_json

# A terminal would obey these if a model or a tool wrote them; tab and newline are harmless.
_CONTROL = re.compile(r"[\x00-\x08\x0b-\x1f\x7f-\x9f]")


def clean_text(text: str) -> str:
    """Replace what a terminal would obey."""
    return _CONTROL.sub("\N{REPLACEMENT CHARACTER}", text)


def counted(count: float, noun: str) -> str:
    """Write a count with its noun: ``1 rollout``, ``2 batches``, ``1.5 turns``."""
    number = int(count) if count == int(count) else count
    ending = "" if number == 1 else "es" if noun.endswith("tch") else "s"
    return f"{number:,} {noun}{ending}"


def part_of(part: int, whole: int, noun: str) -> str:
    """Write a part of a count with its noun: ``1 of 1 sample``, ``3 of 8 samples``."""
    return f"{part:,} of {counted(whole, noun)}"


def suggestion(name: str, known: Iterable[str], *, most: int = 8) -> str:
    """Say which known names are close to a wrong one, or what there is when they are few.

    Args:
        name: The wrong name.
        known: What there is.
        most: Names that are listed when none is close.

    Returns:
        A sentence with a blank in front of it, or nothing.
    """
    names = list(known)
    if close := difflib.get_close_matches(name, names, n=2, cutoff=0.6):
        return f" Did you mean {' or '.join(close)}?"
    return f" There is {', '.join(names)}." if 0 < len(names) <= most else ""


def missing_extra(what: str, extra: str) -> str:
    """Say that a package is not installed, and which extra of ours brings it."""
    return (
        f"{what} is not installed; install the extra: pip install 'inspect-tinker-plugin[{extra}]'"
    )


LEFT_OUT = ("tinker", "tinker_cookbook", "torch")
"""What an installation for exports and audits does without (``docs/install.md``)."""


def missing_package(error: Exception) -> str | None:
    """Say what to install where an error is that such a package is missing; else ``None``."""
    if isinstance(error, ModuleNotFoundError) and error.name in LEFT_OUT:
        return f"{error.name} is not installed, which this needs: pip install inspect-tinker-plugin"
    return None


def object_name(spec: object) -> str:
    """Name a function or an object for messages."""
    return getattr(spec, "__qualname__", None) or type(spec).__qualname__


def first_error(error: Exception) -> Exception:
    """Return the first exception of a group, whose text says nothing, or the exception itself."""
    while isinstance(error, ExceptionGroup):
        error = error.exceptions[0]
    return error


def place_in_code(error: BaseException, *, skipping: tuple[str, ...]) -> str:
    """Return the deepest line of an error's traceback: `` (file.py:3)``, or nothing.

    Args:
        error: The error.
        skipping: Parts of the paths of files whose lines are of no use to the reader; those of
            this package are skipped, too.
    """
    if isinstance(error, SyntaxError) and error.filename:
        return f" ({error.filename}:{error.lineno})"
    ours = str(Path(__file__).parents[1])
    for frame in reversed(traceback.extract_tb(error.__traceback__)):
        if not any(part in frame.filename for part in (ours, *skipping)):
            return f" ({frame.filename}:{frame.lineno})"
    return ""


def spell_out(text: str) -> str:
    r"""Return a text with each half surrogate pair as ``\ud83d``; any other text is unchanged."""
    if text.isascii():
        return text
    try:
        text.encode()
    except UnicodeEncodeError:
        return text.encode(errors="backslashreplace").decode()
    return text


def spell_all_out(value: Any, write: Callable[[str], str] = spell_out) -> Any:
    """Do the same, or what ``write`` does, in each text and each key of JSON data."""
    if isinstance(value, str):
        return write(value)
    if isinstance(value, list):
        return [spell_all_out(item, write) for item in value]
    if isinstance(value, dict):
        return {write(key): spell_all_out(item, write) for key, item in value.items()}
    return value


def write_json(value: Any) -> bytes:
    """Write strict JSON in one line, whatever tasks, models and clients put into a value."""
    try:
        return to_json(value, inf_nan_mode="strings", fallback=str)
    except PydanticSerializationError:  # half a surrogate pair has no UTF-8
        plain = json.loads(json.dumps(value, default=_plain), parse_constant=str)
        return json.dumps(plain).encode()


def _plain(value: Any) -> Any:
    return vars(value) if is_dataclass(value) else str(value)
