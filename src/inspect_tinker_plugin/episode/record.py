"""The record of one sample while it runs: its state, its metrics, and what ended it."""

from __future__ import annotations

import itertools
from dataclasses import dataclass, field
from logging import getLogger

from inspect_ai.dataset import Sample
from inspect_ai.event import ErrorEvent
from inspect_ai.log import EvalSampleLimit
from inspect_ai.solver import TaskState

from inspect_tinker_plugin import inspect_internals as internals
from inspect_tinker_plugin.contracts.episodes import Metrics
from inspect_tinker_plugin.contracts.errors import Cause, EpisodeError
from inspect_tinker_plugin.episode.causes import AGENT_PROGRAM, attribute, episode_error, reported
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

    number: int = field(default_factory=itertools.count(1).__next__)
    """Tells the episodes of this process apart."""

    def catch_up(self) -> None:
        """Take the most recent state, which a solver that was cut off could not return."""
        self.state = internals.sample_state() or self.state

    def note_worked(self, what: str) -> None:
        """Note that a tool has given a result, if there is a sandbox that it may have used."""
        if self.sandboxes.environments:
            self.task.worked_inside.setdefault(self.sandboxes.kind, set()).add(what)

    def note_end(self) -> None:
        """Note that the solver has come to its end after replies of the policy."""
        if self.policy.answered:
            self.note_worked(AGENT_PROGRAM)

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
        in_sandbox: bool = False,
        whole: Exception | None = None,
    ) -> None:
        """Record a failure and its cause.

        Args:
            error: What was raised.
            phase: What was running.
            in_sandbox: Whether a limit cut an operation of a sandbox off.
            whole: The group that it is the first of, if there is one; all of it tells the cause.
        """
        whole, error = whole or error, reported(error)
        internals.record_event(ErrorEvent(error=internals.error_record(error)))
        if self.error is not None:
            logger.warning("a further failure after %s: %s", self.error, internals.text_of(error))
            return
        self.catch_up()
        cause = attribute(
            whole,
            phase=phase,
            sandbox_modules=self.sandboxes.modules,
            policy_spoke=self.policy.answered > 0,
            worked=self.task.worked_inside.get(self.sandboxes.kind, ()),
            episode=self.number,
        )
        if in_sandbox and cause is phase:
            cause = self.cause_of_hanging(phase)
        self.error = self.attributed(error, cause)

    def cause_of_hanging(self, phase: Cause) -> Cause:
        """Return whose fault an operation of a sandbox is that does not end."""
        return Cause.INSIDE_SANDBOX if self.policy.answered > 0 else phase

    def attributed(self, error: Exception, cause: Cause) -> EpisodeError:
        """Wrap an exception with its cause and the name of this sample."""
        return episode_error(
            error,
            cause=cause,
            task=self.task.name,
            sample_id=self.sample.id,
            epoch=self.epoch,
            sandbox_modules=self.sandboxes.modules,
        )
