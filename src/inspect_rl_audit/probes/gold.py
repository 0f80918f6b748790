"""The gold policy: whether the right answer earns what it should, and can be given at all."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

from inspect_ai.dataset import Sample
from inspect_ai.util import registry_info

from inspect_rl_audit.answers import FORMS, always, choice_texts, targets
from inspect_rl_audit.contract import (
    TINY,
    AuditContext,
    finding,
    per_sample,
)
from inspect_rl_audit.findings import Finding, Severity
from inspect_rl_audit.probes.baselines import first_tool
from inspect_rl_audit.records import EpisodeRecord
from inspect_rl_audit.reference import SCRIPT, Gold, gold_play
from inspect_rl_audit.stage import Play
from inspect_tinker_plugin.contracts.wording import counted, part_of

_COMPARING = {"match", "includes", "exact", "pattern", "answer", "choice", "f1", "math"}
"""Scorers of Inspect that compare the reply with the target, which therefore is the answer."""

_AGAIN = 3
"""Samples that are played again when a limit of time ended the right answer."""


@dataclass(frozen=True)
class GoldAnswers:
    """Gives the right answer and examines what it earns."""

    async def __call__(self, audit: AuditContext) -> Sequence[Finding]:
        if not audit.judged:
            return []
        gold = audit.reference.gold
        if not gold:
            return [] if any(map(targets, audit.samples)) else [_no_gold(audit)]
        found = _limits(await self._not_by_chance(audit, gold.values()))
        found += _failing(audit)
        found += _inverted(audit)
        found += await self._alternatives(audit)
        found += await self._limits_with_tools(audit)
        return found

    async def _not_by_chance(
        self, audit: AuditContext, records: Iterable[EpisodeRecord]
    ) -> list[EpisodeRecord]:
        """Return records that a limit ended; limits of time only if they do so again, alone."""
        stopped = [record for record in records if record.limit is not None]
        timed = {r.sample: r for r in stopped if r.limit in ("time", "working")}
        samples = [s for s in audit.wide if s.id in timed][:_AGAIN]
        gold = Gold(audit.options.gold if audit.options is not None else None)
        plays = [
            replace(gold_play(s, audit.reference.form, gold), policy="gold:again") for s in samples
        ]
        again = [r for r in await audit.stage.run(plays, alone=True) if r is not None]
        return [r for r in stopped if r.sample not in timed] + [r for r in again if r.limit]

    async def _alternatives(self, audit: AuditContext) -> list[Finding]:
        """Check that every further target of a sample is accepted, too."""
        reference = audit.reference
        several = [
            s for s in audit.chosen if len(targets(s)) > 1 and not s.choices and reference.pays(s)
        ]
        write = FORMS[reference.form]
        plays = [
            Play(policy=f"alternative:{n}", sample=s, reply=always(write(target)))
            for s in several[:5]
            for n, target in enumerate(targets(s)[1:6], start=2)
        ]
        seen = {}
        for play, record in zip(plays, await audit.stage.run(plays), strict=True):
            if record is not None and record.reward is not None:
                number = int(play.policy.rpartition(":")[2])
                target = targets(play.sample)[number - 1]
                if not reference.beats_null(record):
                    message = (
                        f"The target {target!r:.80}, number {number} of the list, earns nothing."
                    )
                    seen[record.sample] = (message, record.evidence())
        return per_sample("alternative-fails", seen)

    async def _limits_with_tools(self, audit: AuditContext) -> list[Finding]:
        """Check that a tool call and the answer fit into the limits."""
        if audit.task.message_limit is None and audit.task.turn_limit is None:
            return []
        samples = [
            s
            for s in audit.chosen[:2]
            if (record := audit.reference.gold_of(s)) is not None
            and record.limit is None
            and [name for name in record.tools if "submit" not in name]
        ]
        plays = [Play(policy="first-tool", sample=s, reply=first_tool) for s in samples]
        stopped = [r for r in await audit.stage.run(plays) if r is not None and r.limit]
        return _limits(stopped, doing="One tool call and an answer")


def _limits(
    records: Iterable[EpisodeRecord], doing: str = "The right answer, given at once,"
) -> list[Finding]:
    stopped = [record for record in records if record.limit is not None]
    if not stopped:
        return []
    record = stopped[0]
    seen = counted(len(stopped), "sample")
    message = f"{doing} runs into the task's {record.limit} limit (seen on {seen})."
    return [
        finding(
            "limit-too-small",
            message,
            evidence=record.evidence(samples=[r.sample for r in stopped][:50]),
        )
    ]


def _failing(audit: AuditContext) -> list[Finding]:
    reference = audit.reference
    by_id = {sample.id: sample for sample in audit.wide}
    scored = {id: r for id, r in reference.gold.items() if r.reward is not None}
    nothing = {id: r for id, r in scored.items() if not reference.beats_null(r)}
    nothing = {id: r for id, r in nothing.items() if not reference.is_full(r.reward)}
    found = []
    if scored and len(nothing) == len(scored):
        found += [_all_fail(audit, list(scored.values()))]
    elif nothing:
        # for other samples the target is the answer, so here it should be, too
        severity = None if 2 * len(nothing) <= len(scored) or _compares(audit) else Severity.MEDIUM
        found += per_sample(
            "gold-fails",
            {
                id: (
                    f"The right answer {_said(by_id[id], audit)!r:.120} earns "
                    f"{record.reward:g}; "
                    f"{part_of(len(scored) - len(nothing), len(scored), 'sample')} pay for theirs.",
                    record.evidence(),
                )
                for id, record in nothing.items()
            },
            severity=severity,
        )
    below = [r for id, r in scored.items() if id not in nothing and not reference.is_full(r.reward)]
    if below:
        least = min(r.reward or 0.0 for r in below)
        found.append(
            finding(
                "gold-below-full",
                f"The right answer earns less than {reference.full:g} on "
                f"{part_of(len(below), len(scored), 'sample')}; the least is {least:g}.",
                sample=below[0].sample if len(below) == 1 else None,
                severity=Severity.LOW if len(below) == len(scored) else None,
                evidence=below[0].evidence(samples=[r.sample for r in below][:50]),
            )
        )
    return found


def target_is_answer(audit: AuditContext) -> bool:
    """Whether the target is surely meant as the answer: not a rubric, tests or a state to reach."""
    if _compares(audit):
        return True
    short = all(len(" ".join(targets(s))) <= 80 for s in audit.wide if targets(s))
    records = audit.reference.gold.values()
    acting = any(r.notes.get("scorer_did") or r.tools for r in records)
    return short and not acting


def _all_fail(audit: AuditContext, records: list[EpisodeRecord]) -> Finding:
    """Report that all fail: the scorer is wrong, or the target is not the answer."""
    if records[0].policy == SCRIPT:
        name = Path(str(audit.options.gold)).name
        said = str(records[0].notes.get("solution", ""))
        return finding(
            "gold-fails",
            f"The solution script {name} earns nothing on {counted(len(records), 'sample')} tried. "
            f"It said: {said.strip()[-200:] or 'nothing'}",
            sample=records[0].sample if len(records) == 1 else None,
            evidence=records[0].evidence(output=said, samples=[r.sample for r in records][:50]),
        )
    likely = target_is_answer(audit)
    message = (
        f"The target as the answer earns nothing on {counted(len(records), 'sample')} tried, in "
        f"{counted(len(FORMS), 'form')}."
    )
    if not likely:
        message += " The target may not be the answer; if so, name the answer with --gold."
    return finding(
        "gold-fails",
        message,
        severity=Severity.HIGH if likely else Severity.MEDIUM,
        sample=records[0].sample if len(records) == 1 else None,
        evidence=records[0].evidence(samples=[r.sample for r in records][:50]),
    )


def _inverted(audit: AuditContext) -> list[Finding]:
    pairs = [
        (record, null)
        for id, record in audit.reference.gold.items()
        if (null := audit.reference.null.get(id)) is not None
        and record.reward is not None
        and null.reward is not None
        and record.reward < null.reward - TINY
    ]
    if not pairs or 2 * len(pairs) < len(audit.reference.gold):
        return []
    record, null = pairs[0]
    message = (
        f"The right answer earns {record.reward:g} where 'I do not know.' earns {null.reward:g}, "
        f"on {part_of(len(pairs), len(audit.reference.gold), 'sample')}."
    )
    severity = Severity.HIGH if _compares(audit) or (null.reward or 0) > TINY else Severity.MEDIUM
    return [finding("inverted-reward", message, severity=severity, evidence=record.evidence())]


def _compares(audit: AuditContext) -> bool:
    """Whether all scorers are those of Inspect that compare the reply with the target."""
    names = []
    for scorer in audit.task.scorer or []:
        try:
            names.append(registry_info(scorer).name.removeprefix("inspect_ai/"))
        except ValueError:
            return False
    return bool(names) and set(names) <= _COMPARING


def _said(sample: Sample, audit: AuditContext) -> str:
    named = audit.gold_of(sample)
    if named is not None:
        return named
    texts = choice_texts(sample) if sample.choices else None
    return ", ".join(texts or targets(sample))


def _no_gold(audit: AuditContext) -> Finding:
    return finding("no-gold", "No sample has a target, and --gold was not given.")
