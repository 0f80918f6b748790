"""Calls Inspect's hooks on samples for an episode, in the order in which an eval calls them."""

from __future__ import annotations

from dataclasses import dataclass
from datetime import datetime
from logging import getLogger

import anyio
from inspect_ai.dataset import Sample
from inspect_ai.log import EvalSample, EvalSampleSummary
from inspect_ai.solver import TaskState

from inspect_tinker_plugin import inspect_internals as internals

_LONGEST_END = 60.0
"""Seconds that the hooks at the end of an episode may take, also of one that was cancelled."""

logger = getLogger(__name__)


@dataclass
class SampleHooks:
    """The hooks around one episode; calls nothing unless some are installed and enabled.

    Attributes:
        run: Id of the dataset, which hooks see as the run and as the eval.
    """

    run: str
    enabled: bool
    _sample: str = ""
    _summary: EvalSampleSummary | None = None

    async def report_init(self, sample: Sample, state: TaskState, began: datetime) -> None:
        """Report a sample whose input has been read and whose sandbox has not started."""
        if not self.enabled:
            return
        assert sample.id is not None
        self._sample = state.uuid
        self._summary = EvalSampleSummary(
            id=sample.id,
            epoch=state.epoch,
            uuid=state.uuid,
            input=sample.input,
            choices=sample.choices,
            target=sample.target,
            metadata=sample.metadata or {},
            started_at=began.isoformat(),
        )
        await internals.emit("sample_init", self.run, self._sample, summary=self._summary)

    async def report_start(self) -> None:
        """Report that the solver is about to begin."""
        if self._summary is not None:
            given = {"summary": self._summary}
            await internals.emit("sample_start", self.run, self._sample, **given)
            await internals.emit("sample_attempt_start", self.run, self._sample, **given, attempt=1)

    def follow_events(self, transcript: internals.Transcript) -> None:
        """Report events while the solver runs, from the task group of the running sample on."""
        if self._summary is not None:
            internals.follow_events(transcript, self.run, self._sample)

    async def report_scoring(self) -> None:
        """Report that scorers are about to begin."""
        if self._summary is not None:
            await internals.emit("sample_scoring", self.run, self._sample)

    async def report_end(self, sample: EvalSample) -> None:
        """Report the end of an episode whose start has been reported, also of a cancelled one.

        Never raises: the episode has its result.
        """
        if self._summary is None:
            return
        summary, self._summary = self._summary, None
        given = {"summary": summary, "attempt": 1, "error": sample.error, "will_retry": False}
        with anyio.move_on_after(_LONGEST_END, shield=True) as scope:
            try:
                await internals.drain_events()
                await internals.emit("sample_attempt_end", self.run, self._sample, **given)
                await internals.emit("sample_end", self.run, self._sample, sample=sample)
            except Exception as error:  # a limit: the others are warned of by Inspect
                logger.warning("a hook at the end of sample %s has failed: %r", sample.id, error)
        if scope.cancelled_caught:
            logger.warning(
                "hooks at the end of sample %s took more than %g s", sample.id, _LONGEST_END
            )
