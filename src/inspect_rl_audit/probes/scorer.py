"""Probes the scorer: is it repeatable, does its reward vary, on which replies does it fail?"""

from __future__ import annotations

import asyncio
import statistics
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from inspect_ai.dataset import Sample
from inspect_ai.scorer import score
from inspect_ai.solver import TaskState

from inspect_rl_audit.answers import FORMS, UNKNOWING, always, right_answer
from inspect_rl_audit.codes import CODES
from inspect_rl_audit.contract import TINY, AuditContext, finding
from inspect_rl_audit.findings import Finding, Severity
from inspect_rl_audit.options import SLOW_SCORING
from inspect_rl_audit.probes.gold import target_is_answer
from inspect_rl_audit.records import EpisodeRecord
from inspect_rl_audit.scorer_code import shifted_clock
from inspect_rl_audit.stage import Move, Notes, Play, PolicyReply
from inspect_tinker_plugin.contracts.wording import counted

TIMES = 5
"""How often one state is scored, and one policy is played."""

_FEW = 3
_PAUSES = (0.541, 0.374, 0.174, 0.186)
"""Seconds between the scores of one state. Chosen by search: a value that changes once to sixty
times per second is seen to change, whatever the phase at which the first score falls. One
sample's states show that."""
_AT_ONCE = (0.0,) * len(_PAUSES)
"""For the others, whose scores may only differ by chance or by what a scorer remembers."""

_MUCH = 3
"""How many times the limit the slowest policy may take."""


@dataclass(frozen=True)
class ScorerChecks:
    """Scores states again, and gives answers that are right, wrong and neither."""

    async def __call__(self, audit: AuditContext) -> Sequence[Finding]:
        if not audit.task.scorer:
            return [finding("no-scorer", CODES["no-scorer"].meaning)]
        if not audit.judged and not audit.reference.judge_missing:
            return []  # no episode runs, and the samples' probe reports that
        if not audit.judged:
            record = next(iter(audit.reference.null.values()))
            message = f"The scorer asks a model that is not available: {record.error}"
            return [finding("judge-missing", message, evidence=record.evidence())]
        found = await self._repeatable(audit)
        found += _raising(audit)
        found += _values(audit)
        found += _speed(audit)
        return found

    # repeatable

    async def _repeatable(self, audit: AuditContext) -> list[Finding]:
        samples = audit.chosen[:2]
        plays = []
        for number, sample in enumerate(samples):
            after = _rescore(_AT_ONCE if number else _PAUSES)
            for policy, reply in _answering(audit, sample):
                plays.append(
                    Play(policy=f"rescored:{policy}", sample=sample, reply=reply, after=after)
                )
        # alone: between two scores of one state, no other episode's may fall
        rescored = [r for r in await audit.stage.run(plays, alone=True) if r is not None]
        moved = _differing(rescored, "again")
        if moved is not None:
            values = moved.notes["again"]
            message = (
                f"The same state, scored {len(values)} times, has the scores {_listed(values)}."
            )
            return [
                finding(
                    "scorer-not-repeatable",
                    message,
                    sample=moved.sample,
                    evidence=moved.evidence(values=values),
                )
            ]
        found = await self._by_the_clock(audit, samples)
        return found or await self._by_the_episode(audit, samples)

    async def _by_the_clock(self, audit: AuditContext, samples: Sequence[Sample]) -> list[Finding]:
        plays = [
            Play(
                policy=f"clock:{policy}",
                sample=sample,
                reply=reply,
                after=_other_times(audit.task.scorer or []),
            )
            for sample in samples
            for policy, reply in _answering(audit, sample)
        ]
        records = [r for r in await audit.stage.run(plays, alone=True) if r is not None]
        moved = _differing(records, "times")
        if moved is None:
            return []
        values = moved.notes["times"]
        message = f"The same state, scored at other times of day and year, has {_listed(values)}."
        return [
            finding(
                "time-dependent-score",
                message,
                sample=moved.sample,
                evidence=moved.evidence(values=values),
            )
        ]

    async def _by_the_episode(
        self, audit: AuditContext, samples: Sequence[Sample]
    ) -> list[Finding]:
        plays = [
            Play(policy=f"repeated:{policy}", sample=sample, reply=reply, repeat=n)
            for sample in samples
            for policy, reply in _answering(audit, sample)
            for n in range(1, TIMES + 1)
        ]
        by_play: dict[tuple[str, int | str], list[EpisodeRecord]] = {}
        for record in await audit.stage.run(plays):
            timed = record is not None and record.limit in ("time", "working")
            if record is not None and record.reward is not None and not timed:
                by_play.setdefault((record.policy, record.sample), []).append(record)
        for records in by_play.values():
            rewards = [record.reward for record in records]
            if max(rewards) - min(rewards) > TINY:  # type: ignore[type-var,operator]
                message = f"{len(rewards)} equal episodes earn {_listed(rewards)}."
                return [
                    finding(
                        "reward-not-repeatable",
                        message,
                        sample=records[0].sample,
                        evidence=records[0].evidence(values=rewards),
                    )
                ]
        return []


# policies


def _answering(audit: AuditContext, sample: Sample) -> Iterator[tuple[str, PolicyReply]]:
    """Yield the two honest policies: with the answer, where it is known, and without."""
    yield "unknowing", always(UNKNOWING)
    if sample.id in audit.reference.gold:
        write, gold = FORMS[audit.reference.form], audit.gold_of(sample)
        yield "gold", always(lambda request: write(right_answer(sample, request, gold)))


# scoring a state again


def _rescore(pauses: Sequence[float]) -> Move:
    async def after(state: TaskState, notes: Notes) -> None:
        values = [await _score_once(state)]
        for pause in pauses:
            await asyncio.sleep(pause)
            values.append(await _score_once(state))
        notes["again"] = values

    return after


def _other_times(scorers: Sequence[object]) -> Move:
    """Score while the scorers' own modules see other times."""

    async def after(state: TaskState, notes: Notes) -> None:
        values = [await _score_once(state)]
        for hours in (5, 11, 17, 24 * 3, 24 * 200, 24 * 800):
            with shifted_clock(scorers, hours * 3600.0 + 1801.0):
                values.append(await _score_once(state))
        notes["times"] = values

    return after


async def _score_once(state: TaskState) -> Any:
    """Return the values of all scorers; an exception differs from every value."""
    try:
        return [_plain(each.value) for each in await score(state)]
    except Exception as error:
        # the boundary of a scorer under test; the episode's own scoring reports it
        return f"{type(error).__name__}: {error}"[:200]


def _plain(value: object) -> Any:
    if isinstance(value, Mapping):
        return {str(key): _plain(each) for key, each in value.items()}
    if isinstance(value, list | tuple):
        return [_plain(each) for each in value]
    return repr(value) if value != value else value


# findings over all episodes


def _differing(records: Sequence[EpisodeRecord], note: str) -> EpisodeRecord | None:
    for record in records:
        values = record.notes.get(note) or []
        if any(value != values[0] for value in values):
            return record
    return None


def _raising(audit: AuditContext) -> list[Finding]:
    raised = [r for r in audit.stage.records if r.cause == "scorer"]
    unscored = [r for r in audit.stage.records if r.cause in ("unscored", "reward")]
    found = []
    for code, records in (("scorer-raises", raised), ("unscored", unscored)):
        if not records:
            continue
        honest = [r for r in records if r.policy.startswith(("gold", "unknowing"))]
        record = (honest or records)[0]
        policies = sorted({r.policy for r in records})
        message = f"{CODES[code].meaning} ({', '.join(policies[:4])}: {record.error})"
        severity = Severity.HIGH if honest else Severity.MEDIUM
        samples = sorted({str(r.sample) for r in records})
        found.append(
            finding(
                code,
                message,
                severity=severity,
                sample=record.sample if len(samples) == 1 else None,
                evidence=record.evidence(samples=samples[:50]),
            )
        )
    return found


def _values(audit: AuditContext) -> list[Finding]:
    """Report a reward that has only one value."""
    rewards = {round(r.reward, 6) for r in audit.stage.records if r.reward is not None}
    found = []
    worst = min(rewards, default=0.0)
    if worst < -TINY:
        record = next(r for r in audit.stage.records if r.reward == min_reward(audit))
        message = f"The least reward seen is {worst:g} ({record.policy})."
        found.append(finding("negative-reward", message, evidence=record.evidence()))
    most = max(rewards, default=0.0)
    if most > 1 + TINY:
        record = next(r for r in audit.stage.records if r.reward and r.reward > 1 + TINY)
        message = f"The highest reward seen is {most:g}."
        found.append(finding("reward-above-one", message, evidence=record.evidence()))
    policies = {r.policy for r in audit.stage.records if r.reward is not None}
    if len(rewards) == 1 and len(policies) > 3:
        value = rewards.pop()
        record = next(r for r in audit.stage.records if r.reward is not None)
        tried = sum(r.reward is not None for r in audit.stage.records)
        # zero everywhere is what a hard task gives to policies that know nothing
        # part of the reward may be for harm that was not done, the rest for work that scripts
        # do not do: if there are tools, that says little
        paid = abs(value) > TINY and (not record.tools or audit.reference.is_full(value))
        grave = paid or (audit.reference.gold and target_is_answer(audit))
        message = f"{counted(tried, 'episode')} of {len(policies)} policies all earned {value:g}."
        severity = Severity.HIGH if grave else Severity.LOW
        if not grave:
            message += " No right answer is known, so there may be one that earns more."
        found.append(
            finding("constant-reward", message, severity=severity, evidence=record.evidence())
        )
    return found


def min_reward(audit: AuditContext) -> float:
    """Return the least reward of all episodes."""
    return min(r.reward for r in audit.stage.records if r.reward is not None)


def _speed(audit: AuditContext) -> list[Finding]:
    """Report slow scoring: of most policies, or of one, each by its fastest episode.

    The fastest one depends least on what else the machine does.
    """
    records = [r for r in audit.stage.records if r.reward is not None]
    if not records:
        return []
    fastest: dict[str, EpisodeRecord] = {}
    for record in records:
        best = fastest.setdefault(record.policy, record)
        if record.scoring_seconds < best.scoring_seconds:
            fastest[record.policy] = record
    usual = statistics.median(r.scoring_seconds for r in fastest.values())
    slowest = max(fastest.values(), key=lambda r: r.scoring_seconds)
    audit.figures["scoring"] = {
        "mean_seconds": round(statistics.fmean(r.scoring_seconds for r in records), 4),
        "slowest_seconds": max(r.scoring_seconds for r in records),
        "judge_tokens_per_episode": round(statistics.fmean(r.judge_tokens for r in records), 1),
    }
    limit = audit.options.slow_scoring if audit.options is not None else SLOW_SCORING
    if usual < limit and slowest.scoring_seconds < _MUCH * limit:
        return []
    message = (
        f"Scoring usually takes {usual:.1f} s, and {slowest.scoring_seconds:.1f} s for the "
        f"policy {slowest.policy}."
    )
    return [finding("scorer-slow", message, evidence=slowest.evidence())]


def _listed(values: Sequence[object]) -> str:
    return ", ".join(f"{value}" for value in values)
