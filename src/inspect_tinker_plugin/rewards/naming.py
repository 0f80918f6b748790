"""The scores that a reward expression names, compared with those that there are."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import fields, is_dataclass

from inspect_tinker_plugin.contracts.errors import RewardError
from inspect_tinker_plugin.contracts.wording import suggestion
from inspect_tinker_plugin.rewards.builtin import ScoreReward


def require_scores(
    option: str,
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

    Args:
        option: The caller's name for the expression.
        expression: The reward expression.
        aggregator: The aggregator that it was resolved to.
        scorers: Names of the scorers, including those that plugins add.
        whose: How the message goes on between "which no" and the names.

    Raises:
        RewardError: There is no such scorer; the message lists the existing ones.
    """
    if not isinstance(expression, str) or not scorers:
        return
    for path in _paths(aggregator):
        if not any(path == name or path.startswith(f"{name}.") for name in scorers):
            raise RewardError(
                f"{option} {expression!r} names the score {path!r}, which no {whose} "
                f"{', '.join(scorers)}.{suggestion(path, list(scorers), most=0)}"
            )


def reads_other_than_scorers(expression: object, aggregator: object) -> bool:
    """Whether a reward needs no scorers: it is a function, or names a score."""
    return not isinstance(expression, str) or any(True for _ in _paths(aggregator))


def _paths(part: object) -> Iterator[str]:
    """Find the names of scores in an aggregator and in its parts."""
    if isinstance(part, ScoreReward):
        yield part.path
    elif is_dataclass(part):
        for each in fields(part):
            yield from _paths(getattr(part, each.name))
    elif isinstance(part, Mapping):
        for value in part.values():
            yield from _paths(value)
    elif isinstance(part, Sequence) and not isinstance(part, str):
        for value in part:
            yield from _paths(value)
