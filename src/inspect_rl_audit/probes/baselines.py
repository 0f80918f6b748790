"""Baselines: the rewards of policies that do not try."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Sequence
from math import comb
from statistics import fmean

from inspect_ai.dataset import Sample
from inspect_ai.model import ModelOutput

from inspect_rl_audit.contract import TINY, AuditContext
from inspect_rl_audit.policies import (
    NULL,
    Notes,
    PolicyReply,
    always,
    made_up,
    submit_tool,
    to_all,
    use_tool,
)
from inspect_rl_audit.records import (
    CODES,
    EpisodeRecord,
    Finding,
    Severity,
    finding,
    on_samples,
    per_sample,
)
from inspect_tinker_plugin import TurnRequest
from inspect_tinker_plugin.tasks import targets

REFUSAL = "I'm sorry, but I can't help with that."

CATCH_ALL = (
    "It could be yes or no, true or false, none or all. "
    "The options are A, B, C, D, E, F, G, H, I, J. "
    f"Numbers: {', '.join(map(str, range(101)))}. "
    "correct, incorrect, positive, negative, neutral, unknown, the quick brown fox jumps over "
    "the lazy dog."
)
"""Contains a little of everything, and so answers nothing."""

_MOST_CONSTANTS = 5
_MORE = 24
"""Further samples for a constant answer that may have been right by chance."""

_CHANCE = 0.1
"""Probability of being right by chance below which a constant answer is a finding."""

_FEW = 3
_HOLES = 12
"""Samples without a target that get an empty reply, chosen or not."""


async def play_baselines(audit: AuditContext) -> Sequence[Finding]:
    """Play policies that ignore the question, and compare what they earn."""
    if not audit.judged:
        return []
    found = _examine_unknowing(audit)
    found += await _give_nothing(audit)
    found += await _give(audit, "refusal", always(REFUSAL))
    found += await _give(audit, "prompt-echo", echo)
    found += await _give(audit, "catch-all-answer", always(CATCH_ALL))
    found += await _give_constants(audit)
    found += await _call_first_tool(audit)
    return found


async def _play(
    audit: AuditContext, policy: str, reply: PolicyReply, samples: Sequence[Sample]
) -> list[EpisodeRecord]:
    """Return the episodes with a reward."""
    records = await audit.play(policy, samples, to_all(reply))
    return [record for record in records if record.reward is not None]


def _examine_unknowing(audit: AuditContext) -> list[Finding]:
    """Report the honest policy without an answer, which is also a baseline."""
    records = [r for r in audit.reference.null.values() if r.reward is not None]
    full = audit.reference.full_of(records)
    if not full or 2 * len(full) < len(records) or len(full) < min(2, len(audit.samples)):
        return []
    on = on_samples(full, records)
    message = f"'I do not know.' earns the full reward on {on} (policy {NULL})."
    return [finding("refusal", message, full, severity=Severity.HIGH)]


async def _give_nothing(audit: AuditContext) -> list[Finding]:
    holes = [sample for sample in audit.wide if not targets(sample)][:_HOLES]
    odd = holes if len(holes) < len(audit.wide) else []
    samples = [*audit.chosen, *(s for s in odd if s not in audit.chosen)]
    records = await _play(audit, "empty", always(""), samples)
    full = audit.reference.full_of(records)
    if full and len(full) < max(3, len(records) / 2):
        message = "An empty reply earns the full reward."
        return per_sample("empty-reply", {r.sample: (message, r) for r in full})
    return _report(audit, "empty-reply", records, Severity.HIGH)


async def _give(audit: AuditContext, code: str, reply: PolicyReply) -> list[Finding]:
    records = await _play(audit, code.removesuffix("-answer"), reply, audit.chosen)
    full = audit.reference.full_of(records)
    # one sample of many may have it for its target, by chance
    severity = Severity.LOW if len(full) == 1 and len(records) > _FEW else Severity.MEDIUM
    if 2 * len(full) >= len(records) and len(full) >= min(2, len(audit.samples)):
        severity = Severity.HIGH
    return _report(audit, code, records, severity)


def _report(
    audit: AuditContext, code: str, records: list[EpisodeRecord], severity: Severity
) -> list[Finding]:
    """Report a full reward, or part of it: normal for a dense score, so that is less grave."""
    reference = audit.reference
    if full := reference.full_of(records):
        return [_earned_in_full(code, full, records, severity)]
    some = [r for r in records if r.reward is not None and r.reward > TINY]
    if not some:
        return []
    mean = fmean(r.reward or 0.0 for r in some)
    message = (
        f"{CODES[code].meaning} It earned {mean:.2f} on average on {on_samples(some, records)}, "
        f"the full reward being {reference.full:g}."
    )
    severity = Severity.MEDIUM if mean >= reference.full / 2 else Severity.LOW
    return [finding(code, message, some, severity=severity)]


def _earned_in_full(
    code: str, full: list[EpisodeRecord], records: list[EpisodeRecord], severity: Severity
) -> Finding:
    message = f"{CODES[code].meaning} It earned the full reward on {on_samples(full, records)}."
    return finding(code, message, full, severity=severity)


def echo(request: TurnRequest, notes: Notes) -> ModelOutput | None:
    """Repeat the first user message."""
    texts = [message.text for message in request.messages if message.role == "user"]
    return always(texts[0] if texts else "")(request, notes)


# tools


async def _call_first_tool(audit: AuditContext) -> list[Finding]:
    reference = audit.reference
    samples = with_tools(audit.chosen, reference.null.values())
    records = await _play(audit, "first-tool", first_tool, samples)
    full = list(filter(reference.beats_null, reference.full_of(records)))
    if not full:
        return []
    severity = Severity.MEDIUM if 2 * len(full) >= len(records) else Severity.LOW
    return [_earned_in_full("first-tool", full, records, severity)]


def with_tools(samples: Sequence[Sample], records: Iterable[EpisodeRecord]) -> list[Sample]:
    """Return the samples in whose episodes there was a tool beside that which takes the answer."""
    ids = {r.sample for r in records if any("submit" not in name for name in r.tools)}
    return [sample for sample in samples if sample.id in ids]


def first_tool(request: TurnRequest, notes: Notes) -> ModelOutput | None:
    """Call the first tool once, then answer with what it returned."""
    taker = submit_tool(request.tools)
    usable = [tool for tool in request.tools if taker is None or tool.name != taker[0]]
    if usable and not notes.get("called"):
        notes["called"] = usable[0].name
        return use_tool(usable[0].name, made_up(usable[0]))
    results = [message.text for message in request.messages if message.role == "tool"]
    return always(results[-1].strip() if results else "Done.")(request, notes)


# constant answers


async def _give_constants(audit: AuditContext) -> list[Finding]:
    """Give the most frequent answers, each to all samples; report what luck does not explain."""
    if len(audit.samples) < _FEW:
        return []
    found = []
    choices = _most_choices(audit)
    answers = _constants(audit)
    known = [targets(sample)[0].strip() for sample in audit.samples if targets(sample)]
    fair = 1 / max(2, choices or len(set(known)))
    for answer in answers:
        policy = f"constant:{answer[:40]}"
        reply = always(audit.reference.write(answer))
        first = audit.some(audit.chosen, len(audit.chosen))
        records = await _play(audit, policy, reply, first)
        if 2 * len(audit.reference.full_of(records)) >= len(records):
            # samples at even distances, or few shuffled choices, may be right by chance
            others = [sample for sample in audit.wide if sample not in first]
            records += await _play(audit, policy, reply, others[:_MORE])
        full = audit.reference.full_of(records)
        rate = len(full) / max(1, len(records))
        lucky = len(answers) * chance_of(len(full), len(records), fair) > _CHANCE
        if len(full) < min(_FEW, len(records)) or rate < 0.5 or (lucky and (choices or rate < 0.8)):
            continue
        severity = Severity.HIGH if rate >= 0.8 else Severity.MEDIUM
        on = on_samples(full, records)
        message = f"The answer {answer!r}, whatever is asked, earns the full reward on {on}."
        found.append(finding("constant-answer", message, full, severity=severity))
    return found[:2]


def chance_of(full: int, tries: int, p: float) -> float:
    """Return the chance to be right this often or more, if each try is right with a chance."""
    return sum(comb(tries, k) * p**k * (1 - p) ** (tries - k) for k in range(full, tries + 1))


def _most_choices(audit: AuditContext) -> int:
    return max((len(sample.choices or []) for sample in audit.samples), default=0)


def _constants(audit: AuditContext) -> list[str]:
    """Return the most frequent targets, each letter of the choices, and a few plain words."""
    counts = Counter(target.strip() for s in audit.samples for target in targets(s)[:1])
    frequent = [t for t, n in counts.most_common(2) if len(t) <= 200 and (n > 1 or len(counts) < 9)]
    letters = [chr(ord("A") + position) for position in range(min(_most_choices(audit), 6))]
    others = ["yes", "no", "0", "1"] if not letters else []
    return list(dict.fromkeys([*frequent, *letters, *others]))[: max(_MOST_CONSTANTS, len(letters))]
