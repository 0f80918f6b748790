"""A logged rollout as the episode that it was: what a reward, or a scorer, is given of it."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from inspect_ai.dataset import Sample
from inspect_ai.event import ScoreEvent
from inspect_ai.log import EvalLog, EvalSample, resolve_sample_attachments
from inspect_ai.model import Model, ModelName, ModelUsage, get_model
from inspect_ai.scorer import SampleScore, Score, Scorer, Target
from inspect_ai.solver import TaskState
from inspect_ai.util import span

from inspect_tinker_plugin import inspect_internals as internals
from inspect_tinker_plugin.contracts.episodes import EpisodeResult
from inspect_tinker_plugin.contracts.errors import ConfigError
from inspect_tinker_plugin.contracts.policy import POLICY_MODEL
from inspect_tinker_plugin.logs.rollout import SAMPLED_KEY, figures, own_metadata
from inspect_tinker_plugin.logs.spec import EXPECTED_SCORES
from inspect_tinker_plugin.processes.cancellation import contained
from inspect_tinker_plugin.rewards import UnscoredError
from inspect_tinker_plugin.rewards.scores import ScoreReward


def expected_scores(log: EvalLog) -> dict[str, tuple[str, ...]]:
    """Return the names of the task's scorers with their keys; empty for logs that lack them."""
    found = (log.eval.metadata or {}).get(EXPECTED_SCORES) or {}
    return {name: tuple(keys) for name, keys in found.items()}


def episode_result(
    record: EvalSample, log: EvalLog, scores: Mapping[str, Score], *, metrics: Mapping[str, Any]
) -> EpisodeResult:
    """Make the result of a logged rollout again, without the error that ended its scoring.

    Args:
        record: The rollout.
        log: Its log.
        scores: Its scores, without the reward.
        metrics: Its metrics, without those of the reward.
    """
    seen = figures(record)
    record = resolve_sample_attachments(record)
    expected = expected_scores(log)
    ordered = [*(n for n in expected if n in scores), *(n for n in scores if n not in expected)]
    metadata = own_metadata(record)
    sample = Sample(
        id=record.id,
        input=record.input,
        choices=record.choices,
        target=record.target,
        metadata=metadata,
        sandbox=record.sandbox,
        setup=record.setup,
    )
    return EpisodeResult(
        task=log.eval.task,
        sample=sample,
        epoch=record.epoch,
        state=_state(record, scores),
        scores={
            name: SampleScore(
                score=scores[name], sample_id=record.id, sample_metadata=metadata, scorer=name
            )
            for name in ordered
        },
        limit=record.limit,
        error=None,
        turns=int(seen.get("turns") or 0),
        usage=record.model_usage.get(POLICY_MODEL) or ModelUsage(),
        truncated=record.output.stop_reason == "max_tokens",
        expected_scores=expected,
        metrics=dict(metrics),
        build_log=lambda: record,
    )


def unread_scores(result: EpisodeResult) -> list[str]:
    """Return the task's scorers whose score is missing, or is no number."""
    missing = []
    for name in result.expected_scores:
        try:
            ScoreReward(name).read(result)
        except UnscoredError:
            missing.append(name)
    return missing


@dataclass(frozen=True)
class Scorers:
    """The scorers of a log, made again as ``inspect score`` makes them."""

    by_name: Mapping[str, Scorer]
    roles: Mapping[str, Model | list[Model]]
    model: Model

    @classmethod
    def of(cls, log: EvalLog, roles: Mapping[str, Any]) -> Scorers:
        """Make the scorers and judges that a log's header names.

        Args:
            log: The log.
            roles: Judges that override the log's, by role.

        Raises:
            ConfigError: One cannot be made.
        """
        try:
            made = internals.resolve_scorers(log) if log.eval.scorers else []
            judges = internals.model_roles_config_to_model_roles(log.eval.model_roles) or {}
            given = {role: get_model(model, role=role) for role, model in roles.items()}
            model = get_model(log.eval.model)
        except Exception as error:  # each package, key or provider raises its own kind
            reason = internals.in_one_line(error)
            raise ConfigError(f"the scorers of {log.location} cannot be made: {reason}") from error
        named: dict[str, Scorer] = {}
        for scorer in made:
            named[internals.unique_scorer_name(scorer, list(named))] = scorer
        return cls(named, {**judges, **given}, model)

    async def run(
        self, record: EvalSample, scores: Mapping[str, Score], names: Sequence[str]
    ) -> dict[str, Score]:
        """Run scorers on a logged rollout; the record gets the events of those that end.

        It runs in a context of its own: call it in a separate task. There is no sandbox.

        Args:
            record: The rollout; its ``events`` are extended.
            scores: Its scores, without the reward.
            names: The scorers to run.

        Returns:
            All scores; a scorer that returned ``None`` has none.

        Raises:
            KeyError: The log's header does not name the scorer.
            Exception: Whatever a scorer raises.
        """
        whole = resolve_sample_attachments(record)
        kept = {name: score for name, score in scores.items() if name not in names}
        state = _state(whole, kept)
        transcript = internals.enter_scoring_context(
            self.model, dict(self.roles), state, whole.events
        )
        before = len(whole.events)
        async with span("scorers"):
            for name in names:
                scorer = self.by_name[name]
                async with span(name, type="scorer"):
                    score = await contained("the scorer", scorer(state, Target(whole.target)))
                    if score is None:
                        continue
                    kept[name] = score
                    internals.record_event(
                        ScoreEvent(
                            score=score,
                            target=whole.target,
                            scorer=name,
                            scorer_args=internals.scorer_args(scorer),
                            model_usage=whole.model_usage or None,
                            role_usage=whole.role_usage or None,
                        )
                    )
        record.events = [*record.events, *internals.recorded_events(transcript)[before:]]
        return kept


def _state(record: EvalSample, scores: Mapping[str, Score]) -> TaskState:
    """Return the final state of a rollout whose attachments are resolved."""
    state = TaskState(
        model=ModelName(POLICY_MODEL),
        sample_id=record.id,
        epoch=record.epoch,
        input=record.input,
        target=Target(record.target),
        choices=record.choices,
        messages=record.messages,
        output=record.output,
        completed=True,
        metadata=own_metadata(record),
        store={name: value for name, value in record.store.items() if name != SAMPLED_KEY},
        scores=dict(scores),
    )
    return state
