"""Finds where two traces differ, by path, and describes each difference in one line."""

from __future__ import annotations

import math
import re
from collections.abc import Iterator
from dataclasses import dataclass

from inspect_tinker_plugin.testing.record import Json, Trace


class _Absent:
    def __repr__(self) -> str:
        return "(absent)"


ABSENT = _Absent()
"""Stands for a value that one side does not have; ``None`` is a value."""


@dataclass(frozen=True)
class Difference:
    """One place where the two sides disagree."""

    path: str
    """Where, e.g. ``requests[1].tools[0].name``."""
    eval: Json
    """What ``inspect_ai.eval`` had, or ``ABSENT``."""
    episode: Json
    """What the episode had, or ``ABSENT``."""

    def __str__(self) -> str:
        return f"{self.path}: eval {_short(self.eval)}, episode {_short(self.episode)}"


def compare_traces(
    eval_side: Trace, episode_side: Trace, *, same_tokens: bool = True
) -> list[Difference]:
    """Return all differences between two traces, in the order of the run.

    Args:
        eval_side: The run under ``inspect_ai.eval``.
        episode_side: The run as an episode.
        same_tokens: Whether both sides count tokens alike. If not, the count in the reason
            of a token or cost limit is left out; nothing else is.
    """
    left, right = eval_side.comparable(), episode_side.comparable()
    if not same_tokens:
        for side in (left, right):
            side["limit"] = _without_count(side["limit"])
    return list(differences(left, right))


def _without_count(limit: Json) -> Json:
    if limit is None or limit["type"] not in ("token", "cost"):
        return limit
    return {**limit, "reason": re.sub(r"value: [^;]+;", "value: …;", limit["reason"])}


def differences(left: Json, right: Json, path: str = "") -> Iterator[Difference]:
    """Compare two JSON values recursively; numbers agree only within their type, NaN equals NaN."""
    if isinstance(left, dict) and isinstance(right, dict):
        for key in [*left, *(key for key in right if key not in left)]:
            where = f"{path}.{key}" if path else str(key)
            yield from differences(left.get(key, ABSENT), right.get(key, ABSENT), where)
    elif isinstance(left, list) and isinstance(right, list):
        for index in range(max(len(left), len(right))):
            yield from differences(
                left[index] if index < len(left) else ABSENT,
                right[index] if index < len(right) else ABSENT,
                f"{path}[{index}]",
            )
    elif not _same(left, right):
        yield Difference(path, left, right)


def _same(left: Json, right: Json) -> bool:
    if isinstance(left, float) and isinstance(right, float):
        return left == right or (math.isnan(left) and math.isnan(right))
    return type(left) is type(right) and bool(left == right)


def _short(value: Json, width: int = 160) -> str:
    text = repr(value)
    return text if len(text) <= width else f"{text[: width - 1]}…"
