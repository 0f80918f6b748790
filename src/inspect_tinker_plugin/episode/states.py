"""The states of an episode; ``docs/design/episodes.md`` says what every call does in each."""

from __future__ import annotations

from enum import StrEnum


class EpisodeState(StrEnum):
    """The state of an episode. It only moves down this list, to one of the last two."""

    NEW = "new"
    """Nothing has run."""

    STARTING = "starting"
    """Input, sandbox, files and set-up script are being prepared; the solver has not begun."""

    RUNNING = "running"
    """The solver runs, or waits for the policy."""

    STOPPING = "stopping"
    """The solver has ended or was told to; scorers, clean-up and release run."""

    SCORED = "scored"
    """There is a result: scores, an error, or both."""

    CLOSED = "closed"
    """Closed before there was a result, so there will be none."""

    def before(self, other: EpisodeState) -> bool:
        """Whether this state comes before another."""
        return _ORDER[self] < _ORDER[other]


_ORDER = {state: place for place, state in enumerate(EpisodeState)}
