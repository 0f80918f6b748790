"""How messages say counts, and what may have been meant by a wrong name."""

from __future__ import annotations

import difflib
from collections.abc import Iterable


def counted(count: float, noun: str) -> str:
    """Write a count with its noun: ``1 rollout``, ``2 rollouts``, ``1.5 turns``."""
    number = int(count) if count == int(count) else count
    return f"{number:,} {_of(number, noun)}"


def part_of(part: int, whole: int, noun: str) -> str:
    """Write a part of a count with its noun: ``1 of 1 sample``, ``3 of 8 samples``."""
    return f"{part:,} of {counted(whole, noun)}"


def _of(count: float, noun: str) -> str:
    return noun if count == 1 else f"{noun}s"


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
