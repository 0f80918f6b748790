"""The limits of an episode: which ones apply, and the scopes that enforce them on the solver."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from inspect_ai import Task
from inspect_ai.solver import TaskState
from inspect_ai.util import Limit, time_limit, turn_limit, working_limit

from inspect_tinker_plugin import inspect_internals as internals
from inspect_tinker_plugin.options import EpisodeOptions


@dataclass(frozen=True)
class SampleLimits:
    """The limits of a sample: the caller's where given, else the task's."""

    message: int | None
    token: int | None
    token_type: Any
    turn: int | None
    time: int | None
    working: int | None
    cost: float | None

    @classmethod
    def of(cls, task: Task, options: EpisodeOptions) -> SampleLimits:
        """Merge as ``eval()`` does; a token limit keeps its own way of counting."""

        def first(mine: Any, theirs: Any) -> Any:
            return theirs if mine is None else mine

        own_token = options.token_limit is not None
        return cls(
            message=first(options.message_limit, task.message_limit),
            token=first(options.token_limit, task.token_limit),
            token_type="all" if own_token else (task.token_limit_type or "all"),
            turn=task.turn_limit,
            time=first(options.time_limit, task.time_limit),
            working=first(options.working_limit, task.working_limit),
            cost=first(options.cost_limit, task.cost_limit),
        )

    def scopes(self, state: TaskState) -> tuple[Limit, Limit, Limit, Limit, Limit, Limit]:
        """Make the scopes of all limits, to be entered in this order.

        Message, token and cost limits are those of the state.
        """
        return (
            *internals.state_limits(state),
            turn_limit(self.turn),
            time_limit(self.time),
            working_limit(self.working),
        )
