"""What the right answer earns: the reference of an audit, and a probe that examines it."""

from __future__ import annotations

import base64
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path

from inspect_ai.dataset import Sample
from inspect_ai.util import registry_info

from inspect_rl_audit.contract import TINY, AuditContext, Gold, Reference
from inspect_rl_audit.moves import play_script
from inspect_rl_audit.policies import FORMS, NULL, UNKNOWING, Play, always, gold_reply, to_all
from inspect_rl_audit.probes.baselines import first_tool, with_tools
from inspect_rl_audit.records import (
    EpisodeRecord,
    Finding,
    Severity,
    finding,
    on_samples,
    per_sample,
)
from inspect_rl_audit.stage import Stage
from inspect_tinker_plugin.plugins import counted, part_of
from inspect_tinker_plugin.tasks import choice_texts, targets

SCRIPT = "gold:script"
"""Name of the policy that runs a solution script."""

_SOLVING = 150
"""Seconds that a solution script may take, where it is not run by the task's tool."""

_OUTPUT = 1000
"""Characters of its output that are kept."""

_USUAL = ("ANSWER", "bare")
_FIELDS = ("solution", "canonical_solution", "answer", "gold", "gold_answer", "reference", "label")


async def learn_reference(
    stage: Stage, chosen: Sequence[Sample], wide: Sequence[Sample], gold: Gold
) -> Reference:
    """Play the honest policies, and find the form of the right answer that pays best.

    Every form is tried on the chosen samples; the best one, and others where it does not pay, on
    the wider choice.
    """
    null = await _unknowing(stage, chosen)
    if any(record.error is None or record.cause == "judge" for record in null.values()):
        null = await _unknowing(stage, wide)
    judged = Reference(null=null, gold={}, form="", full=1.0).scored
    known = [sample for sample in wide if gold.known(sample)] if judged else []
    trials = _Trials(stage, gold)
    form = _USUAL[0]
    if known:
        form = await trials.find_form([sample for sample in chosen if gold.known(sample)])
        others = [sample for sample in known if sample.id not in trials.best]
        await trials.play(others, form)
        failing = [s for s in trials.find_unpaid(others) if s.id in trials.best]
        for other in FORMS:
            if failing and other != form:
                await trials.play(failing[:8], other)
    full = max([1.0, *(r.reward for r in trials.best.values() if r.reward is not None)])
    return Reference(null=null, gold=trials.best, form=form, full=full)


async def _unknowing(stage: Stage, samples: Sequence[Sample]) -> Mapping[int | str, EpisodeRecord]:
    reply = always(UNKNOWING)
    plays = [Play(policy=NULL, kind="unknowing", sample=s, reply=reply) for s in samples]
    return {record.sample: record for record in await stage.run(plays)}


class _Trials:
    """Trials of the right answers in several forms; ``best`` has the one that pays best."""

    def __init__(self, stage: Stage, gold: Gold) -> None:
        self._stage = stage
        self._gold = gold
        self.best: dict[int | str, EpisodeRecord] = {}

    async def play(
        self, samples: Sequence[Sample], form: str, field: str | None = None
    ) -> list[EpisodeRecord]:
        """Play one form, and keep the episodes that pay better than those kept so far."""
        gold = self._gold if field is None else Gold(field)
        plays = [gold_play(sample, form, gold) for sample in samples]
        if field is not None:
            plays = [replace(play, policy=f"{play.policy}:{field}") for play in plays]
        played = await self._stage.run(plays)
        for record in played:
            known = self.best.get(record.sample)
            if known is None or _rank(record) > _rank(known):
                self.best[record.sample] = record
        return played

    def find_unpaid(self, samples: Sequence[Sample]) -> list[Sample]:
        """Return the samples whose best episode earns less than 1, or that have none."""
        paid = {id for id, r in self.best.items() if (r.reward or 0) >= 1 - TINY}
        return [sample for sample in samples if sample.id not in paid]

    async def find_form(self, samples: Sequence[Sample]) -> str:
        """Play the forms until one pays in full everywhere; return the one that pays most."""
        sums: dict[str, float] = {}
        for form in FORMS:
            rest = samples if form in _USUAL else self.find_unpaid(samples)
            if form not in _USUAL and not rest:
                break
            played = await self.play(rest, form)
            sums[form] = sum(max(record.reward or 0.0, 0.0) for record in played)
        if self._gold.source is None and all((r.reward or 0) <= 0 for r in self.best.values()):
            for field in _FIELDS:
                own = [s for s in samples if isinstance((s.metadata or {}).get(field), str)]
                for form in ("bare", "code") if own else ():
                    await self.play(own, form, field)
        return max(sums, key=lambda form: sums[form])


def gold_play(sample: Sample, form: str, gold: Gold) -> Play:
    """Return a play of the right answer to a sample, by a script if there is one."""
    if gold.script is None:
        reply = gold_reply(sample, form, gold.of(sample))
        return Play(policy=f"gold:{form}", kind="right", sample=sample, reply=reply)
    packed = base64.b64encode(gold.script.read_bytes()).decode()
    shell = (
        f"printf %s {packed} | base64 -d > .solution.sh && chmod +x .solution.sh\n"
        'case "$(head -c 2 .solution.sh)" in "#!") ./.solution.sh ;; *) sh .solution.sh ;; esac\n'
        "code=$?; rm -f .solution.sh; exit $code"
    )
    finish = always(", ".join(targets(sample)) or "Done.")
    return replace(play_script(SCRIPT, sample, shell, finish, seconds=_SOLVING), kind="right")


def _rank(record: EpisodeRecord) -> tuple[bool, float]:
    return record.reward is not None, record.reward or 0.0


# the probe


_COMPARING = {"match", "includes", "exact", "pattern", "answer", "choice", "f1", "math"}
"""Scorers of Inspect that compare the reply with the target, which therefore is the answer."""

_AGAIN = 3
"""Samples that are played again when a limit of time ended the right answer."""


async def check_gold(audit: AuditContext) -> Sequence[Finding]:
    """Give the right answer and examine what it earns."""
    if not audit.judged:
        return []
    if not audit.reference.gold:
        message = "No sample has a target, and --gold was not given."
        return [] if any(map(targets, audit.samples)) else [finding("no-gold", message)]
    found = await _check_limits(audit)
    found += _failing(audit)
    found += _find_inverted_scores(audit)
    found += await _try_alternatives(audit)
    return found + await _check_limits_with_tools(audit)


async def _check_limits(audit: AuditContext) -> list[Finding]:
    """Report limits that end the right answer; limits of time only if they do so again, alone."""
    stopped = [record for record in audit.reference.gold.values() if record.limit is not None]
    timed = {record.sample for record in stopped if record.limit in ("time", "working")}
    plays = [
        replace(gold_play(sample, audit.reference.form, audit.gold), policy="gold:again")
        for sample in [s for s in audit.wide if s.id in timed][:_AGAIN]
    ]
    again = await audit.stage.run(plays, alone=True)
    stopped = [record for record in stopped if record.sample not in timed] + again
    return _limits(stopped, "The right answer, given at once,")


async def _check_limits_with_tools(audit: AuditContext) -> list[Finding]:
    """Check that a tool call and the answer fit into the limits."""
    if audit.task.message_limit is None and audit.task.turn_limit is None:
        return []
    unlimited = [record for record in audit.reference.gold.values() if record.limit is None]
    samples = with_tools(audit.chosen[:2], unlimited)
    records = await audit.play("first-tool", samples, to_all(first_tool))
    return _limits(records, "One tool call and an answer")


def _limits(records: Sequence[EpisodeRecord], doing: str) -> list[Finding]:
    stopped = [record for record in records if record.limit]
    if not stopped:
        return []
    seen = counted(len(stopped), "sample")
    message = f"{doing} runs into the task's {stopped[0].limit} limit (seen on {seen})."
    return [finding("limit-too-small", message, stopped)]


async def _try_alternatives(audit: AuditContext) -> list[Finding]:
    """Check that every further target of a sample is accepted, too."""
    reference = audit.reference
    seen = {}
    samples = [s for s in audit.chosen if len(targets(s)) > 1 and not s.choices]
    for sample in list(filter(reference.pays, samples))[:5]:
        for number, target in enumerate(targets(sample)[1:6], start=2):
            reply = to_all(always(reference.write(target)))
            for record in await audit.play(f"alternative:{number}", [sample], reply, "reworded"):
                if record.reward is not None and not reference.beats_null(record):
                    message = f"The target {target!r:.80}, number {number} of the list, earns "
                    seen[record.sample] = (f"{message}nothing.", record)
    return per_sample("alternative-fails", seen)


def _failing(audit: AuditContext) -> list[Finding]:
    reference = audit.reference
    scored = {id: r for id, r in reference.gold.items() if r.reward is not None}
    partial = {id: r for id, r in scored.items() if not reference.is_full(r.reward)}
    nothing = {id: r for id, r in partial.items() if not reference.beats_null(r)}
    below = [r for id, r in partial.items() if id not in nothing]
    found = []
    if scored and len(nothing) == len(scored):
        found.append(_all_fail(audit, list(scored.values())))
    elif nothing:
        # for other samples the target is the answer, so here it should be, too
        severity = None if 2 * len(nothing) <= len(scored) or _compares(audit) else Severity.MEDIUM
        pay = part_of(len(scored) - len(nothing), len(scored), "sample")
        by_id = {sample.id: sample for sample in audit.wide}
        seen = {}
        for id, record in nothing.items():
            message = f"The right answer {_answer_to(by_id[id], audit)!r:.120} earns "
            seen[id] = (f"{message}{record.reward:g}; {pay} pay for theirs.", record)
        found += per_sample("gold-fails", seen, severity=severity)
    if below:
        least = min(record.reward or 0.0 for record in below)
        message = f"The right answer earns less than {reference.full:g} on "
        message += f"{on_samples(below, scored)}; the least is {least:g}."
        severity = Severity.LOW if len(below) == len(scored) else None
        found.append(finding("gold-below-full", message, below, severity=severity))
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
    tried = f"{counted(len(records), 'sample')} tried"
    if records[0].policy == SCRIPT:
        name = Path(str(audit.options.gold)).name
        output = records[0].output[-_OUTPUT:]
        message = f"The solution script {name} earns nothing on {tried}. It said: "
        message += output.strip()[-200:] or "nothing"
        return finding("gold-fails", message, records, output=output)
    field = audit.options.gold
    what = "target" if field is None else f"field {field!r} (--gold)"
    message = f"The {what} as the answer earns nothing on {tried}, in "
    message += f"{counted(len(FORMS), 'form')}."
    likely = field is not None or target_is_answer(audit)
    if not likely:
        message += " The target may not be the answer; if so, name the answer with --gold."
    severity = Severity.HIGH if likely else Severity.MEDIUM
    return finding("gold-fails", message, records, severity=severity)


def _find_inverted_scores(audit: AuditContext) -> list[Finding]:
    gold, unknowing = audit.reference.gold, audit.reference.null
    pairs = [
        (record, null)
        for id, record in gold.items()
        if (null := unknowing.get(id)) is not None
        and record.reward is not None
        and null.reward is not None
        and record.reward < null.reward - TINY
    ]
    if not pairs or 2 * len(pairs) < len(gold):
        return []
    record, null = pairs[0]
    message = f"The right answer earns {record.reward:g} where 'I do not know.' earns "
    message += f"{null.reward:g}, on {on_samples(pairs, gold)}."
    severity = Severity.HIGH if _compares(audit) or (null.reward or 0) > TINY else Severity.MEDIUM
    return [finding("inverted-reward", message, record, severity=severity)]


def _compares(audit: AuditContext) -> bool:
    """Whether all scorers are those of Inspect that compare the reply with the target."""
    names = []
    for scorer in audit.task.scorer or []:
        try:
            names.append(registry_info(scorer).name.removeprefix("inspect_ai/"))
        except ValueError:
            return False
    return bool(names) and set(names) <= _COMPARING


def _answer_to(sample: Sample, audit: AuditContext) -> str:
    texts = choice_texts(sample) if sample.choices else None
    return audit.gold.of(sample) or ", ".join(texts or targets(sample))
