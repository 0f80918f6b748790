"""The states of an episode; ``docs/design/episodes.md`` says what every call does in each."""

from __future__ import annotations

from enum import StrEnum


class EpisodeState(StrEnum):
    """Where an episode is. It only moves down this list, and ends in one of the last two."""

    NEW = "new"
    """Nothing runs yet."""

    STARTING = "starting"
    """Input, sandbox, files and set-up script; no solver has begun."""

    RUNNING = "running"
    """The solver runs, or waits for the policy."""

    STOPPING = "stopping"
    """The solver has ended or was told to; scorers, clean-up and release run."""

    SCORED = "scored"
    """The result is there: scores, an error, or both."""

    CLOSED = "closed"
    """Closed before there was a result, so there will be none."""

    def before(self, other: EpisodeState) -> bool:
        """Whether an episode in this state may still enter another."""
        order = list(EpisodeState)
        return order.index(self) < order.index(other)
