"""Probes the samples: copies, leaks, unreachable targets, prompts that are too long."""

from __future__ import annotations

import json
import re
from collections import Counter, defaultdict
from collections.abc import Mapping, Sequence, Set
from dataclasses import dataclass

from inspect_ai.dataset import Sample

from inspect_rl_audit.contract import AuditContext
from inspect_rl_audit.findings import Evidence, Finding, Severity, finding, per_sample
from inspect_rl_audit.policies import choice_texts, holds, targets
from inspect_rl_audit.probes.copies import copies, near, one_line, overlap, question
from inspect_rl_audit.records import EpisodeRecord
from inspect_tinker_plugin.plugins import counted, part_of

_LABEL = r"(?:answer|solution|target|correct|gold|label|key|expected|hint|truth|result)\w*"

_QUESTION = 3
"""Minimum number of words of a question that can be recognised in a prompt."""

_NEXT = 60
"""Characters after a question in which an example has its answer."""


@dataclass(frozen=True)
class SampleChecks:
    """Examines all samples, and what the model is shown of some."""

    async def __call__(self, audit: AuditContext) -> Sequence[Finding]:
        if not audit.samples:
            return [finding("no-samples", "The task has no samples.")]
        boxed = {s.id for s in audit.wide if await audit.stage.sandbox_of(s) is not None}
        found = _failures(audit, boxed)
        found += copies(audit.samples)
        found += near(audit)
        found += overlap(audit)
        found += _targets(audit)
        found += _leaks(audit)
        found += _prompts(audit)
        found += _tools(audit)
        found += _epochs(audit)
        return found


# failures


def _failures(audit: AuditContext, boxed: Set[int | str | None]) -> list[Finding]:
    """Report samples that fail whatever the answer is."""
    null = audit.reference.null
    failed = {
        id: record
        for id, record in null.items()
        if record.error is not None and record.cause in ("sandbox", "solver", "tool", "policy")
    }
    found = []
    for code, before in (("setup-fails", True), ("episode-fails", False)):
        some = {id: record for id, record in failed.items() if (record.turns == 0) == before}
        # if no sandbox starts, the fault is in this machine rather than in the samples
        unboxed = {id: record for id, record in some.items() if record.cause == "sandbox"}
        if unboxed and len(unboxed) == sum(id in boxed for id in null):
            some = {id: record for id, record in some.items() if id not in unboxed}
            record = next(iter(unboxed.values()))
            message = f"No sample's sandbox starts here, so little was checked: {record.error}"
            found.append(finding(code, message, record, severity=Severity.MEDIUM))
        found += per_sample(
            code,
            {
                id: (f"It failed ({record.cause}): {record.error}", record.evidence())
                for id, record in some.items()
            },
        )
    silent = [r for r in null.values() if r.turns == 0 and r.error is None]
    if silent:
        on = part_of(len(silent), len(null), "sample")
        message = f"The solver asked the model nothing on {on}."
        found.append(
            finding(
                "no-model-call",
                message,
                silent[0],
                sample=silent[0].sample if len(silent) == 1 else None,
                severity=Severity.HIGH if len(silent) == len(null) else Severity.MEDIUM,
                samples=[r.sample for r in silent][:50],
            )
        )
    return found


# targets


def _targets(audit: AuditContext) -> list[Finding]:
    found = []
    unreachable: Evidence = {}
    empty: Evidence = {}
    doubled: Evidence = {}
    some = sum(bool(targets(sample)) for sample in audit.samples)
    for sample in audit.samples:
        assert sample.id is not None
        texts = [choice.strip() for choice in sample.choices or []]
        if texts and targets(sample) and choice_texts(sample) is None:
            message = f"The target {targets(sample)[0]!r:.60} is none of the {len(texts)} choices."
            unreachable[sample.id] = (message, {"target": sample.target, "choices": texts})
        if not targets(sample) and some:
            empty[sample.id] = (f"The target is {sample.target!r}.", {})
        repeated = [text for text, n in Counter(texts).items() if n > 1]
        if repeated:
            right = repeated[0] in (choice_texts(sample) or [])
            message = f"The choice {repeated[0]!r:.60} occurs twice."
            doubled[sample.id] = (message + (" It is the right one." if right else ""), {})
    found += per_sample("target-unreachable", unreachable)
    found += per_sample("empty-target", empty)
    found += per_sample("duplicate-choices", doubled)
    return found + _imbalance(audit)


def _imbalance(audit: AuditContext) -> list[Finding]:
    """Report one right choice, or one of few targets, that is far more frequent than the others."""
    known = [targets(s)[0].strip() for s in audit.samples if targets(s)]
    if len(known) < 8:
        return []
    if all(sample.choices for sample in audit.samples):
        positions = [_position(sample) for sample in audit.samples]
        known = [position for position in positions if position]
        fair = max(2, min(len(sample.choices or []) for sample in audit.samples))
    else:
        fair = len(set(known))
        # a rubric or a state to reach may be the same for all; an answer may not
        if fair > len(known) / 3 or not audit.reference.gold_works:
            return []
    if not known:
        return []
    text, often = Counter(known).most_common(1)[0]
    expected = len(known) / max(fair, 1)
    spread = (expected * (1 - 1 / max(fair, 2))) ** 0.5
    rate = often / len(known)
    if often <= expected + 2 * spread:
        return []  # as may happen by chance
    if rate < 0.6 and not (rate >= 2 / max(fair, 2) and often > expected + 4 * spread):
        return []
    message = f"{text!r:.60} is right on {part_of(often, len(known), 'sample')} ({rate:.0%})."
    severity = Severity.HIGH if rate >= 0.95 else Severity.MEDIUM
    return [finding("target-imbalance", message, severity=severity, target=text)]


def _position(sample: Sample) -> str:
    texts = choice_texts(sample) or []
    choices = sample.choices or []
    return ",".join(chr(ord("A") + choices.index(text)) for text in texts if text in choices)


# what the model is shown


def _leaks(audit: AuditContext) -> list[Finding]:
    """Report targets in the prompt, except where the task is like that (reading, choosing)."""
    prompts = {
        id: str(record.notes.get("prompt", ""))
        for id, record in audit.reference.null.items()
        if record.turns
    }
    by_id = {sample.id: sample for sample in audit.wide}
    wanted = {
        id: target
        for id in prompts
        if not by_id[id].choices and (target := _leakable(by_id[id])) is not None
    }
    seen: dict[int | str, tuple[str, Severity]] = {}
    for id, target in wanted.items():
        prompt, own = prompts[id], question(by_id[id])
        if not holds(prompt, target):
            continue
        if _answered(prompt, own, target):
            seen[id] = ("the prompt, after the sample's own question as an example", Severity.HIGH)
            continue
        labelled = _labelled(prompt, target)
        elsewhere = _rate_elsewhere(id, target, prompts, wanted)
        if not holds(own, target) and elsewhere < 0.5:
            seen[id] = ("what the task adds to the input", Severity.HIGH)
        elif labelled and elsewhere < 0.5:
            seen[id] = ("the prompt, marked as the answer", Severity.HIGH)
        elif elsewhere < 0.34 and (len(target) > 3 or _asked_once(own, target)):
            seen[id] = ("the input", Severity.MEDIUM)
    # reading, extracting, sorting, picking out: in such tasks most inputs contain the answer
    by_nature = len(seen) > 3 and 2 * len(seen) >= len(wanted)
    found = []
    for severity in Severity:
        some = {
            id: (
                f"The target {wanted[id]!r:.80} is in {where}.",
                audit.reference.null[id].evidence(),
            )
            for id, (where, worst) in seen.items()
            if worst is severity
        }
        if not some:
            continue
        if by_nature and severity is not Severity.HIGH:
            id = next(iter(some))
            message = (
                f"Targets are in the input of {part_of(len(some), len(wanted), 'sample')}, as in "
                "reading tasks."
            )
            found.append(
                finding(
                    "target-in-prompt",
                    message,
                    severity=Severity.LOW,
                    evidence=some[id][1],
                    samples=list(some)[:50],
                )
            )
        else:
            found += per_sample("target-in-prompt", some, severity=severity)
    return found


def _leakable(sample: Sample) -> str | None:
    """Return a target that is meaningful enough to be recognised as a leak."""
    wanted = targets(sample)
    if not wanted:
        return None
    target = wanted[0].strip()
    if target.lower() in ("yes", "no", "true", "false", "a", "i", "none", "the", "c", "correct"):
        return None
    return target


def _answered(prompt: str, own: str, target: str) -> bool:
    """Whether a prompt has a sample's question a second time, with the answer behind it."""
    asked, text = one_line(own).lower(), one_line(prompt).lower()
    if len(asked.split()) < _QUESTION or holds(asked, target):
        return False
    parts = text.split(asked)
    return len(parts) > 2 and any(holds(part[:_NEXT], target) for part in parts[1:])


def _labelled(prompt: str, target: str) -> bool:
    pattern = rf"{_LABEL}\W{{0,4}}(?:is|are|was|=|:)?\W{{0,4}}{re.escape(target)}(?!\w)"
    return re.search(pattern, prompt, re.IGNORECASE) is not None


def _rate_elsewhere(
    id: int | str, target: str, prompts: Mapping[int | str, str], wanted: Mapping[int | str, str]
) -> float:
    """Return how often the target occurs in the prompts of samples with other targets."""
    others = [key for key in prompts if key != id and wanted.get(key) != target][:60]
    if not others:
        return 0.0
    return sum(holds(prompts[key], target) for key in others) / len(others)


def _asked_once(text: str, target: str) -> bool:
    """Whether a short target (a number, say) ends the input, which makes it a leak."""
    return re.search(rf"(?<!\w){re.escape(target)}\W*$", text.strip()) is not None


def _prompts(audit: AuditContext) -> list[Finding]:
    null = {id: record for id, record in audit.reference.null.items() if record.turns}
    by_id = {sample.id: sample for sample in audit.wide}
    found = []
    bare = {
        id: ("The model is shown nothing to answer.", record.evidence())
        for id, record in null.items()
        if not re.search(r"\w", str(record.notes.get("prompt", "")))
    }
    found += per_sample("empty-prompt", bare)
    groups: dict[str, list[EpisodeRecord]] = defaultdict(list)
    for record in null.values():
        if record.sample not in bare:
            groups[str(record.notes.get("prompt", ""))].append(record)
    for group in groups.values():
        inputs = {one_line(question(by_id[r.sample])) for r in group}
        if (
            len(group) > 1
            and len(inputs) > 1
            and len({str(by_id[r.sample].target) for r in group}) > 1
        ):
            message = f"{part_of(len(group), len(null), 'sample')} show the model the same prompt."
            ids = [record.sample for record in group]
            found.append(finding("same-prompt", message, group[0], samples=ids[:50]))
    hidden: Evidence = {
        id: (f"None of its {len(by_id[id].choices or [])} choices is in the prompt.", {})
        for id, record in null.items()
        if by_id[id].choices and not _shows_a_choice(by_id[id], record)
    }
    found += per_sample("choices-not-shown", hidden)
    most = audit.options.prompt_tokens
    if most is not None:
        long: Evidence = {
            s.id: (f"The prompt has about {counted(tokens, 'token')}, over {most:,}.", {})
            for s in audit.samples
            if s.id is not None and (tokens := _tokens(s, null.get(s.id))) > most
        }
        found += per_sample("prompt-too-long", long)
    return found


def _shows_a_choice(sample: Sample, record: EpisodeRecord) -> bool:
    prompt = one_line(str(record.notes.get("prompt", ""))).lower()
    return any(one_line(choice).lower() in prompt for choice in sample.choices or [])


def _tokens(sample: Sample, record: EpisodeRecord | None) -> int:
    """Estimate four characters per token, from the prompt if it is known."""
    shown = str(record.notes.get("prompt", "")) if record is not None else ""
    return max(len(shown), len(question(sample))) // 4


def _tools(audit: AuditContext) -> list[Finding]:
    seen: dict[str, list[EpisodeRecord]] = defaultdict(list)
    for record in audit.reference.null.values():
        if record.turns:
            seen[json.dumps(record.notes.get("tools"), sort_keys=True)].append(record)
    if len(seen) < 2:
        return []
    groups = sorted(seen.values(), key=len)
    names = [", ".join(group[0].tools) or "none" for group in groups]
    message = f"Samples offer {len(seen)} sets of tools: {' | '.join(names[:4])}."
    return [
        finding(
            "tools-differ",
            message,
            groups[0][0],
            sample=groups[0][0].sample if len(groups[0]) == 1 else None,
            samples=[r.sample for r in groups[0]][:50],
        )
    ]


def _epochs(audit: AuditContext) -> list[Finding]:
    reducers = audit.task.epochs_reducer or []
    names = [str(getattr(reducer, "__name__", "custom")) for reducer in reducers]
    if not audit.task.epochs or audit.task.epochs < 2:
        return []
    epochs = counted(audit.task.epochs or 1, "epoch")
    message = f"The task runs {epochs}, reduced by {', '.join(names) or 'mean'}."
    return [finding("epochs-reduced", message)]
