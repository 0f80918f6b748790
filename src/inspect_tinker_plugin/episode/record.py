"""The record of one sample while it runs: its state, its metrics, and what ended it."""

from __future__ import annotations

from dataclasses import dataclass, field
from logging import getLogger

from inspect_ai.dataset import Sample
from inspect_ai.event import ErrorEvent
from inspect_ai.log import EvalSampleLimit
from inspect_ai.solver import TaskState

from inspect_tinker_plugin import inspect_internals as internals
from inspect_tinker_plugin.contracts.episodes import Metrics
from inspect_tinker_plugin.contracts.errors import Cause, EpisodeError
from inspect_tinker_plugin.episode.boundaries import (
    Boundaries,
    Stamp,
    episode_error,
    first_error,
    is_timeout,
)
from inspect_tinker_plugin.episode.model import PolicyAPI
from inspect_tinker_plugin.episode.sandbox import NO_SANDBOXES, SampleSandboxes
from inspect_tinker_plugin.episode.task import PreparedTask

logger = getLogger(__name__)


@dataclass(slots=True)
class SampleRecord:
    """What set-up, solver and scorers of one sample share: its state, limit, error and metrics."""

    task: PreparedTask
    """The task."""

    sample: Sample
    """The sample; its media are read in during set-up."""

    epoch: int
    """Epoch of the sample, from 1."""

    state: TaskState
    """The most recent state."""

    policy: PolicyAPI
    """The model under training, which knows how many replies it has given."""

    keep_log: bool
    """Whether a log is kept."""

    sandboxes: SampleSandboxes = NO_SANDBOXES
    """The sandboxes, once they have started."""

    limit: EvalSampleLimit | None = None
    """The limit that ended the solver, if there was one."""

    error: EpisodeError | None = None
    """The first failure; a later one (in clean-up, say) does not replace it."""

    metrics: Metrics = field(default_factory=dict)
    """Metrics of sandboxes and scoring."""

    boundaries: Boundaries = field(default_factory=Boundaries)
    """What foreign code has raised, with its causes."""

    def catch_up(self) -> None:
        """Take the most recent state, which a solver that was cut off could not return."""
        self.state = internals.sample_state() or self.state

    def end_by_limit(self, kind: str, limit: float | None, reason: str) -> None:
        """Record the limit that ended the solver."""
        self.catch_up()
        self.limit = EvalSampleLimit.model_validate(
            {"type": kind, "limit": limit if limit is not None else -1, "reason": reason}
        )

    def fail(
        self,
        error: Exception,
        phase: Cause,
        *,
        whole: Exception | None = None,
        cut_off_since: float | None = None,
    ) -> None:
        """Record a failure and its cause.

        Args:
            error: What was raised.
            phase: What was running.
            whole: The group that it is the first of, if there is one; all of it tells the cause.
            cut_off_since: When the limit was reached that it is about, if it is about one.
        """
        whole, error = whole or error, first_error(error)
        internals.record_event(ErrorEvent(error=internals.error_record(error)))
        if self.error is not None:
            logger.warning("a further failure after %s: %s", self.error, internals.text_of(error))
            return
        self.catch_up()
        stamp = self.boundaries.attribute(whole, phase, cut_off_since=cut_off_since)
        if stamp.cause is phase and is_timeout(whole) and self.sandboxes.operations.awaited:
            stamp = Stamp(Cause.INSIDE_SANDBOX, "a command that goes on")
        if stamp.cause is Cause.INSIDE_SANDBOX:
            stamp = Stamp(self.cause_inside(phase), stamp.call)
        self.error = self.wrap(error, stamp)

    def cause_inside(self, phase: Cause) -> Cause:
        """Return ``inside_sandbox``; before its first reply, a policy has done nothing inside."""
        return Cause.INSIDE_SANDBOX if self.policy.answered > 0 else phase

    def wrap(self, error: Exception, stamp: Stamp) -> EpisodeError:
        """Wrap an exception with its cause and the name of this sample."""
        return episode_error(
            error, stamp, task=self.task.name, sample_id=self.sample.id, epoch=self.epoch
        )
