"""Reads Inspect scores as numbers, and refuses values that are not numbers.

Inspect's own ``value_to_float`` does the conversion. It returns 0 (with a log line) for text
that it does not understand, lists and dicts; here those are errors or are examined.
"""

from __future__ import annotations

import math
from collections.abc import Container, Iterator, Mapping, Sequence
from dataclasses import dataclass, fields, is_dataclass
from types import MappingProxyType
from typing import ClassVar

from inspect_ai.scorer import (
    CORRECT,
    INCORRECT,
    NOANSWER,
    PARTIAL,
    SampleScore,
    value_to_float,
)

from inspect_tinker_plugin.contracts.episodes import EpisodeResult, Metrics
from inspect_tinker_plugin.contracts.errors import RewardError
from inspect_tinker_plugin.contracts.rewards import Reward, RewardAggregator, UnscoredError
from inspect_tinker_plugin.contracts.wording import suggestion

_GRADES = {CORRECT, INCORRECT, PARTIAL, NOANSWER}
_WORDS = {"yes", "true", "no", "false"}
_to_float = value_to_float()


@dataclass(frozen=True)
class ScoreReward:
    """One score, or one key of a dict score: ``score:judge.helpfulness``."""

    path: str
    """Name of the score, followed by ``.key`` for one key of a dict (or index of a list)."""

    at_once: ClassVar[bool] = True
    """It runs nothing that somebody else has written."""

    async def __call__(self, result: EpisodeResult) -> Reward:
        return self.read(result)

    def read(self, result: EpisodeResult) -> Reward:
        """Read the score as a number.

        Raises:
            UnscoredError: there is no such score or key, or it is not a number.
        """
        return read_score(self.path, result.scores, result.expected_scores)


def read_score(
    path: str,
    scores: Mapping[str, SampleScore],
    expected: Mapping[str, Sequence[str]] = MappingProxyType({}),
) -> Reward:
    """Read one of several scores as a number.

    Args:
        path: Its name, or ``name.key`` for one key of a dict (or index of a list).
        scores: The scores by name.
        expected: Names of the task's scorers, each with the keys that it must have.
    """
    scorer, key = locate_score(path, scores)
    if not scorer:
        if path in expected:
            raise UnscoredError(f"scorer {path!r} gave no score (it returned None)", scorer=path)
        given = _list_names(scores) if scores else "none at all"
        raise UnscoredError(f"no score named {path!r}; there is {given}", scorer=path)
    score = scores[scorer]
    if not key:
        return score_reward(scorer, score, keys=expected.get(scorer, ()))
    entries = dict(_entries(score.score.value))
    if key not in entries:
        raise UnscoredError(
            f"score {scorer!r} has no key {key!r}; "
            + (f"its keys are {_list_names(entries)}" if entries else "it is a single value"),
            scorer=scorer,
            key=key,
        )
    value = _number(entries[key], scorer, key, score)
    return Reward(value, {f"score/{scorer}.{key}": value})


def locate_score(path: str, names: Container[str]) -> tuple[str, str]:
    """Split ``name.key``; the longest beginning that is a name wins, for names with dots."""
    name = path
    while name and name not in names:
        name = name.rpartition(".")[0]
    return name, path[len(name) + 1 :] if name else ""


@dataclass(frozen=True)
class Term:
    """A part of a weighted sum."""

    part: RewardAggregator
    """The reward that is weighted."""

    weight: float
    """Its factor; may be negative. Weights are used as they are, not normalised."""


def score_reward(scorer: str, score: SampleScore, *, keys: Sequence[str] = ()) -> Reward:
    """Read a whole score as a number; a dict or list score is the mean of its entries."""
    value = score.score.value
    missing = [key for key in keys if isinstance(value, Mapping) and key not in value]
    if missing:
        raise UnscoredError(
            f"score {scorer!r} has no key {missing[0]!r}, which the scorer's metrics name",
            scorer=scorer,
            key=missing[0],
        )
    if isinstance(value, str) or not isinstance(value, Mapping | Sequence):
        number = _number(value, scorer, None, score)
        return Reward(number, {f"score/{scorer}": number})
    numbers = {key: _number(entry, scorer, key, score) for key, entry in _entries(value)}
    if not numbers:
        raise UnscoredError(f"score {scorer!r} is empty", scorer=scorer)
    mean = sum(numbers.values()) / len(numbers)
    metrics: Metrics = {f"score/{scorer}.{key}": number for key, number in numbers.items()}
    return Reward(mean, {**metrics, f"score/{scorer}": mean})


def all_scores(result: EpisodeResult) -> list[Reward]:
    """Read every score of an episode, in the scorers' order."""
    names = score_names(result)
    if not names:
        raise UnscoredError("the episode has no score")
    return [ScoreReward(name).read(result) for name in names]


def score_names(result: EpisodeResult) -> list[str]:
    """Names of the scores that an episode should have: of the task's scorers, then its solver's."""
    return [*result.expected_scores, *(n for n in result.scores if n not in result.expected_scores)]


def require_scores(
    expression: object,
    aggregator: object,
    scorers: Sequence[str],
    *,
    whose: str = "scorer of the task gives; its scorers are",
) -> None:
    """Check that there are the scores that a reward expression names.

    Only expressions are checked. A score that a solver sets itself has no scorer; in a task that
    has scorers, name it with an aggregator in Python, ``reward=ScoreReward("name")``. The names of
    a task's scores are not known in advance if it has no scorers.
    """
    if not isinstance(expression, str) or not scorers:
        return
    for path in _named_scores(aggregator):
        if not any(path == name or path.startswith(f"{name}.") for name in scorers):
            raise RewardError(
                f"reward {expression!r} names the score {path!r}, which no {whose} "
                f"{', '.join(scorers)}.{suggestion(path, list(scorers), most=0)}"
            )


def reads_other_than_scorers(expression: object, aggregator: object) -> bool:
    """Whether a reward needs no scorers: it is a function, or names a score."""
    return not isinstance(expression, str) or any(True for _ in _named_scores(aggregator))


def _named_scores(part: object) -> Iterator[str]:
    """Find the names of scores in an aggregator and in its parts."""
    if isinstance(part, ScoreReward):
        yield part.path
    elif is_dataclass(part):
        for each in fields(part):
            yield from _named_scores(getattr(part, each.name))
    elif isinstance(part, list | tuple):
        for value in part:
            yield from _named_scores(value)


def _entries(value: object) -> Iterator[tuple[str, object]]:
    if isinstance(value, Mapping):
        yield from ((str(key), entry) for key, entry in value.items())
    elif isinstance(value, Sequence) and not isinstance(value, str):
        yield from ((str(index), entry) for index, entry in enumerate(value))


def _number(value: object, scorer: str, key: str | None, score: SampleScore) -> float:
    number = read_number(value)
    if number is not None:
        return number
    name = scorer if key is None else f"{scorer}.{key}"
    if value is None or (isinstance(value, float) and math.isnan(value)):
        problem = f"score {name!r} is unscored ({value})"
    else:
        problem = f"score {name!r} is not a number: {value!r:.80}"
    evidence = score.score.reason or score.score.explanation
    raise UnscoredError(
        f"{problem}: {evidence:.200}" if evidence else problem, scorer=scorer, key=key
    )


def read_number(value: object) -> float | None:
    """Convert a value with Inspect's function; ``None`` where it would fall back to 0."""
    if isinstance(value, int | float):
        try:
            number = _to_float(value)
        except OverflowError:  # an integer beyond every float
            return None
        return number if math.isfinite(number) else None
    if not isinstance(value, str):
        return None
    if value in _GRADES or value.lower() in _WORDS:
        return _to_float(value)
    try:
        number = float(value)
    except ValueError:
        return None
    # Only text that Inspect reads as the same number counts; Python's reading may differ one day.
    return number if math.isfinite(number) and _to_float(value) == number else None


def _list_names(names: Mapping[str, object]) -> str:
    return ", ".join(repr(name) for name in names)
