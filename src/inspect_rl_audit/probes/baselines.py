"""Baselines: the rewards of policies that do not try."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from math import comb

from inspect_ai.dataset import Sample
from inspect_ai.model import ModelOutput

from inspect_rl_audit.contract import TINY, AuditContext
from inspect_rl_audit.findings import CODES, Finding, Severity, finding, per_sample
from inspect_rl_audit.policies import (
    FORMS,
    NULL,
    Notes,
    Play,
    PolicyReply,
    always,
    made_up,
    submit_tool,
    targets,
    use_tool,
)
from inspect_rl_audit.records import EpisodeRecord
from inspect_tinker_plugin import TurnRequest
from inspect_tinker_plugin.plugins import part_of

REFUSAL = "I'm sorry, but I can't help with that."

CATCH_ALL = (
    "It could be yes or no, true or false, none or all. "
    + "The options are A, B, C, D, E, F, G, H, I, J. "
    + "Numbers: "
    + ", ".join(str(number) for number in range(101))
    + ". "
    + "correct, incorrect, positive, negative, neutral, unknown, the quick brown fox jumps over "
    + "the lazy dog."
)
"""Contains a little of everything, and so answers nothing."""

_MOST_CONSTANTS = 5
_MORE = 24
"""Further samples for a constant answer that may have been right by chance."""

_CHANCE = 0.01
"""Probability of being right by chance below which a constant answer is a finding."""

_FEW = 3
_HOLES = 12
"""Samples without a target that get an empty reply, chosen or not."""


@dataclass(frozen=True)
class Baselines:
    """Plays policies that ignore the question, and compares what they earn."""

    async def __call__(self, audit: AuditContext) -> Sequence[Finding]:
        if not audit.judged:
            return []
        found = _no_answers(audit)
        found += await self._empty(audit)
        found += await self._plain(audit, "refusal", always(REFUSAL))
        found += await self._plain(audit, "prompt-echo", echo)
        found += await self._catch_all(audit)
        found += await self._constants(audit)
        found += await self._first_tool(audit)
        return found

    async def _empty(self, audit: AuditContext) -> list[Finding]:
        holes = [sample for sample in audit.wide if not targets(sample)][:_HOLES]
        odd = holes if len(holes) < len(audit.wide) else []
        samples = [*audit.chosen, *(s for s in odd if s not in audit.chosen)]
        records = await _play(audit, "empty", always(""), samples)
        full = [r for r in records if audit.reference.is_full(r.reward)]
        if not full:
            return _partial(audit, "empty-reply", records)
        if len(full) < max(3, len(records) / 2):
            return per_sample(
                "empty-reply",
                {r.sample: ("An empty reply earns the full reward.", r.evidence()) for r in full},
            )
        return [_general(audit, "empty-reply", full, records, Severity.HIGH)]

    async def _plain(self, audit: AuditContext, code: str, reply: PolicyReply) -> list[Finding]:
        records = await _play(audit, code, reply)
        full = [r for r in records if audit.reference.is_full(r.reward)]
        if not full:
            return _partial(audit, code, records)
        severity = _by_frequency(audit, full, records)
        return [_general(audit, code, full, records, severity)]

    async def _catch_all(self, audit: AuditContext) -> list[Finding]:
        records = await _play(audit, "catch-all", always(CATCH_ALL))
        full = [r for r in records if audit.reference.is_full(r.reward)]
        if not full:
            return _partial(audit, "catch-all-answer", records)
        severity = _by_frequency(audit, full, records)
        return [_general(audit, "catch-all-answer", full, records, severity)]

    async def _constants(self, audit: AuditContext) -> list[Finding]:
        """Give the most frequent answers, each to all samples."""
        found = []
        if len(audit.samples) < _FEW:
            return []
        form = audit.reference.form
        for answer in _constants(audit):
            policy = f"constant:{answer[:40]}"
            reply, candidates = always(FORMS[form](answer)), _candidates(audit)
            records = await _play(audit, policy, reply)
            full = [r for r in records if audit.reference.is_full(r.reward)]
            if 2 * len(full) >= len(records) and _luck(audit, answer, records):
                others = [sample for sample in audit.wide if sample not in audit.chosen]
                records += await _play(audit, policy, reply, others[:_MORE])
                full = [r for r in records if audit.reference.is_full(r.reward)]
            if _luck(audit, answer, records):
                continue
            rate = _base_rate(audit, answer, records)
            if rate >= 0.8 and len(full) >= min(_FEW, len(records)):
                severity = Severity.HIGH
            elif rate >= 0.5 and rate >= 1 / candidates + 0.2 and len(full) >= _FEW:
                severity = Severity.MEDIUM
            else:
                continue
            message = (
                f"The answer {answer!r}, whatever is asked, earns the full reward on "
                f"{part_of(len(full), len(records), 'sample')}."
            )
            found.append(
                finding(
                    "constant-answer",
                    message,
                    full[0],
                    severity=severity,
                    samples=[r.sample for r in full],
                )
            )
        return found[:2]

    async def _first_tool(self, audit: AuditContext) -> list[Finding]:
        with_tools = [
            sample
            for sample in audit.chosen
            if (record := audit.reference.null_of(sample)) is not None
            and _usable(record.notes.get("tools") or [])
        ]
        records = await _play(audit, "first-tool", first_tool, with_tools)
        full = [
            r
            for r in records
            if audit.reference.is_full(r.reward) and audit.reference.beats_null(r)
        ]
        if not full:
            return []
        often = 2 * len(full) >= len(records)
        severity = Severity.MEDIUM if often else Severity.LOW
        return [_general(audit, "first-tool", full, records, severity)]


def echo(request: TurnRequest, notes: Notes) -> ModelOutput | None:
    """Repeat the last user message."""
    texts = [message.text for message in request.messages if message.role == "user"]
    return always(texts[0] if texts else "")(request, notes)


def first_tool(request: TurnRequest, notes: Notes) -> ModelOutput | None:
    """Call the first tool once, then answer with what it returned."""
    taker = submit_tool(request.tools)
    usable = [tool for tool in request.tools if taker is None or tool.name != taker[0]]
    if usable and not notes.get("called"):
        notes["called"] = usable[0].name
        return use_tool(usable[0].name, made_up(usable[0]))
    results = [message.text for message in request.messages if message.role == "tool"]
    answer = results[-1].strip() if results else "Done."
    return always(answer)(request, notes)


def _usable(tools: Sequence[dict[str, object]]) -> bool:
    names = [str(tool.get("name", "")) for tool in tools]
    return any("submit" not in name for name in names)


async def _play(
    audit: AuditContext, policy: str, reply: PolicyReply, samples: Sequence[Sample] | None = None
) -> list[EpisodeRecord]:
    plays = [
        Play(policy=policy, sample=sample, reply=reply)
        for sample in (audit.chosen if samples is None else samples)
    ]
    return [each for each in await audit.stage.play(plays) if each.reward is not None]


def _general(
    audit: AuditContext,
    code: str,
    full: list[EpisodeRecord],
    records: list[EpisodeRecord],
    severity: Severity,
) -> Finding:
    message = (
        f"{CODES[code].meaning} It earned the full reward on "
        f"{part_of(len(full), len(records), 'sample')}."
    )
    return finding(
        code,
        message,
        full[0],
        severity=severity,
        sample=full[0].sample if len(records) == 1 else None,
        samples=[record.sample for record in full],
    )


def _by_frequency(
    audit: AuditContext, full: list[EpisodeRecord], records: list[EpisodeRecord]
) -> Severity:
    """Grade an answer to anything: one sample of many may have it for its target, by chance."""
    if 2 * len(full) >= len(records) and len(full) >= min(2, len(audit.samples)):
        return Severity.HIGH
    return Severity.LOW if len(full) == 1 and len(records) > _FEW else Severity.MEDIUM


def _partial(audit: AuditContext, code: str, records: list[EpisodeRecord]) -> list[Finding]:
    """Report a partial reward for nothing: normal for a dense score, so it is not grave."""
    some = [r for r in records if r.reward is not None and r.reward > TINY]
    if not some:
        return []
    mean = sum(r.reward or 0.0 for r in some) / len(some)
    severity = Severity.MEDIUM if mean >= audit.reference.full / 2 else Severity.LOW
    message = (
        f"{CODES[code].meaning} It earned {mean:.2f} on average on "
        f"{part_of(len(some), len(records), 'sample')}, the full reward being "
        f"{audit.reference.full:g}."
    )
    ids = [record.sample for record in some]
    return [finding(code, message, some[0], severity=severity, samples=ids)]


def _no_answers(audit: AuditContext) -> list[Finding]:
    """Report the honest policy without an answer, which is also a baseline."""
    records = [r for r in audit.reference.null.values() if r.reward is not None]
    full = [r for r in records if audit.reference.is_full(r.reward)]
    if not full or 2 * len(full) < len(records) or len(full) < min(2, len(audit.samples)):
        return []
    message = (
        f"'I do not know.' earns the full reward on {part_of(len(full), len(records), 'sample')} "
        f"(policy {NULL})."
    )
    ids = [record.sample for record in full][:50]
    return [finding("refusal", message, full[0], severity=Severity.HIGH, samples=ids)]


def _constants(audit: AuditContext) -> list[str]:
    """Return the most frequent targets, each letter of the choices, and a few plain words."""
    counts = Counter(target.strip() for s in audit.samples for target in targets(s)[:1])
    frequent = [t for t, n in counts.most_common(2) if len(t) <= 200 and (n > 1 or len(counts) < 9)]
    most = max((len(sample.choices or []) for sample in audit.samples), default=0)
    letters = [chr(ord("A") + position) for position in range(min(most, 6))]
    others = ["yes", "no", "0", "1"] if not letters else []
    return list(dict.fromkeys([*frequent, *letters, *others]))[: max(_MOST_CONSTANTS, len(letters))]


def _candidates(audit: AuditContext) -> int:
    choices = max((len(sample.choices or []) for sample in audit.samples), default=0)
    distinct = len({target for sample in audit.samples for target in targets(sample)[:1]})
    return max(2, choices or distinct)


def _luck(audit: AuditContext, answer: str, records: list[EpisodeRecord]) -> bool:
    """Tell whether a letter may be right this often by chance, as when choices are shuffled.

    It is not if the targets foretell which samples it is right for: then nothing is shuffled.
    Every letter is tried, so the best of them must be that much less probable.
    """
    choices = max((len(sample.choices or []) for sample in audit.samples), default=0)
    if choices < 2:
        return False
    p = 1 / choices
    right = [audit.reference.is_full(record.reward) for record in records]
    full, tries = sum(right), len(right)
    if right == _foretold(audit, answer, records):
        chance = p**full * (1 - p) ** (tries - full)
    else:
        chance = sum(comb(tries, k) * p**k * (1 - p) ** (tries - k) for k in range(full, tries + 1))
    return chance * choices > _CHANCE


def _foretold(audit: AuditContext, answer: str, records: list[EpisodeRecord]) -> list[bool]:
    """Return for which episodes the targets say that the answer is right."""
    right = {
        sample.id
        for sample in audit.samples
        if answer in (target.strip() for target in targets(sample))
    }
    return [record.sample in right for record in records]


def _base_rate(audit: AuditContext, answer: str, records: list[EpisodeRecord]) -> float:
    """Return the share of all samples with this target, or the observed one."""
    known = [targets(sample)[0].strip() for sample in audit.samples if targets(sample)]
    right = [audit.reference.is_full(record.reward) for record in records]
    seen = sum(right) / max(1, len(right))
    if answer not in known:
        return seen
    if right == _foretold(audit, answer, records):
        return known.count(answer) / len(known)  # those that were tried may not be typical
    if seen < 0.8:
        return min(seen, known.count(answer) / len(known))
    return seen
