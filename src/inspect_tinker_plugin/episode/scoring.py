"""The scores of one episode: those of its scorers, and those that its solver set itself."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Sequence
from contextlib import AbstractAsyncContextManager, nullcontext

from inspect_ai.dataset import Sample
from inspect_ai.event import ScoreEvent
from inspect_ai.scorer import SampleScore, Score, Target
from inspect_ai.solver import TaskState
from inspect_ai.util import span, time_limit

from inspect_tinker_plugin import inspect_internals as internals
from inspect_tinker_plugin.episode.cancellation import being_cancelled, contained, stray
from inspect_tinker_plugin.episode.record import SampleRecord
from inspect_tinker_plugin.episode.task import NamedScorer
from inspect_tinker_plugin.errors import Cause


class EpisodeTranscript:
    """Spans and score events, which only a log needs: they take a third of an episode's time."""

    def __init__(self, *, keep: bool) -> None:
        self._keep = keep

    def span(self, name: str, kind: str | None = None) -> AbstractAsyncContextManager[None]:
        """Group the events of one part of the episode."""
        return span(name, type=kind) if self._keep else nullcontext()

    def score(self, score: Score, *, name: str, sample: Sample) -> None:
        """Record a score."""
        if self._keep:
            internals.record_event(ScoreEvent(score=score, target=sample.target, scorer=name))


class Scoring:
    """Runs scorers over a final state.

    Attributes:
        scores: What has been scored so far, also when a later scorer raises.
    """

    def __init__(self, transcript: EpisodeTranscript) -> None:
        self.scores: dict[str, SampleScore] = {}
        self._transcript = transcript

    async def run(self, record: SampleRecord) -> None:
        """Score the state that the solver left; a failure goes into the record."""
        state, sample = record.state, record.sample
        state.completed = True
        internals.set_sample_state(state)
        if state.scores is None:
            state.scores = {}
        if record.error is not None and not record.task.score_on_error:
            self._keep(list(state.scores), state, sample)
            return
        started = time.perf_counter()
        # As in an eval, half of the sample's time limit is available for scoring.
        budget = record.task.limits.time
        try:
            with time_limit(budget / 2 if budget else None):
                await self._run_scorers(record.task.scorers, state, sample)
        except asyncio.CancelledError as error:
            if being_cancelled():
                raise
            record.fail(stray("the scorer", error), Cause.SCORER)
        except Exception as error:
            record.fail(error, Cause.SCORER)
        record.metrics["time/scoring_s"] = time.perf_counter() - started

    async def _run_scorers(
        self, scorers: Sequence[NamedScorer], state: TaskState, sample: Sample
    ) -> None:
        """Run the scorers in order, then add the solver's own scores."""
        of_solver = list(state.scores or {})
        async with self._transcript.span("scorers"):
            for named in scorers:
                await self._score_with(named, state, sample)
        self._keep(of_solver, state, sample)

    async def _score_with(self, named: NamedScorer, state: TaskState, sample: Sample) -> None:
        assert state.scores is not None
        async with self._transcript.span(named.name, "scorer"):
            score = await contained("the scorer", named.scorer(state, Target(sample.target)))
            if named.name in state.scores:
                raise RuntimeError(f"Scorer {named.name} has modified state.scores")
            if score is None:
                return
            state.scores[named.name] = score
            self._transcript.score(score, name=named.name, sample=sample)
            self.scores[named.name] = SampleScore(
                score=score,
                sample_id=sample.id,
                sample_metadata=sample.metadata,
                scorer=internals.registry_unqualified_name(named.scorer),
            )

    def _keep(self, names: Sequence[str], state: TaskState, sample: Sample) -> None:
        scores = state.scores or {}
        for name in names:
            self._transcript.score(scores[name], name=name, sample=sample)
            self.scores[name] = SampleScore(
                score=scores[name], sample_id=state.sample_id, sample_metadata=state.metadata
            )
