"""Probes the samples: copies, leaks, unreachable targets, prompts that are too long."""

from __future__ import annotations

import json
import re
from collections import Counter, defaultdict
from collections.abc import Callable, Mapping, Sequence, Set
from statistics import median

from inspect_ai.dataset import Sample

from inspect_rl_audit.contract import AuditContext
from inspect_rl_audit.policies import holds, letters_of
from inspect_rl_audit.probes.baselines import chance_of
from inspect_rl_audit.probes.copies import (
    find_copies,
    find_near,
    find_overlap,
    one_line,
    question,
)
from inspect_rl_audit.records import (
    BySample,
    EpisodeRecord,
    Finding,
    Severity,
    finding,
    on_samples,
    per_sample,
)
from inspect_tinker_plugin.plugins import counted, part_of
from inspect_tinker_plugin.tasks import choice_texts, targets

_LABEL = r"(?:answer|solution|target|correct|gold|label|key|expected|hint|truth|result)\w*"

_QUESTION = 3
"""Minimum number of words of a question that can be recognised in a prompt."""

_FAR = 8
"""Times the usual length from which an input is far longer; at most one in as many is."""

_FAR_TOKENS = 250
"""Tokens that it is longer by, at least."""

_FAR_LEAST = 5
"""Samples from which there is a usual length."""

_LISTED = 50

_NEXT = 60
"""Characters after a question in which an example has its answer."""

_NO_LEAK = ("yes", "no", "true", "false", "a", "i", "none", "the", "c", "correct")
"""Targets that occur in prompts by chance."""


async def check_samples(audit: AuditContext) -> Sequence[Finding]:
    """Examine all samples, and what the model is shown of some."""
    if not audit.samples:
        return [finding("no-samples", "The task has no samples.")]
    boxed = {s.id for s in audit.wide if await audit.stage.sandbox_of(s) is not None}
    return [
        *_failures(audit, boxed),
        *find_copies(audit.samples),
        *find_near(audit.samples),
        *find_overlap(audit.samples, audit.options.test_samples),
        *_targets(audit),
        *_leaks(audit),
        *_prompts(audit),
        *_tools(audit),
        *_epochs(audit),
    ]


# failures


def _failures(audit: AuditContext, boxed: Set[int | str | None]) -> list[Finding]:
    """Report samples that fail whatever the answer is."""
    null = audit.reference.null
    failed = [
        record
        for record in null.values()
        if record.error is not None and record.cause in ("sandbox", "solver", "tool", "policy")
    ]
    found = []
    for code, before in (("setup-fails", True), ("episode-fails", False)):
        some = [record for record in failed if (record.turns == 0) == before]
        # if no sandbox starts, the fault is in this machine rather than in the samples
        unboxed = [record for record in some if record.cause == "sandbox"]
        if unboxed and len(unboxed) == sum(id in boxed for id in null):
            some = [record for record in some if record.cause != "sandbox"]
            message = f"No sample's sandbox starts here, so little was checked: {unboxed[0].error}"
            found.append(finding(code, message, unboxed[0], severity=Severity.MEDIUM))
        found += per_sample(
            code, {r.sample: (f"It failed ({r.cause}): {r.error}", r) for r in some}
        )
    silent = [r for r in null.values() if r.turns == 0 and r.error is None]
    if silent:
        message = f"The solver asked the model nothing on {on_samples(silent, null)}."
        severity = Severity.HIGH if len(silent) == len(null) else Severity.MEDIUM
        found.append(finding("no-model-call", message, silent, severity=severity))
    return found


# targets


def _targets(audit: AuditContext) -> list[Finding]:
    samples = audit.samples
    found = _report_each(samples, "target-unreachable", _unreachable)
    if any(map(targets, samples)):
        found += _report_each(samples, "empty-target", _empty)
    found += _report_each(samples, "duplicate-choices", _find_doubled_choice)
    return found + _imbalance(audit)


def _report_each(
    samples: Sequence[Sample], code: str, problem_of: Callable[[Sample], str | None]
) -> list[Finding]:
    seen: BySample = {
        sample.id: (message, {"target": sample.target, "choices": sample.choices})
        for sample in samples
        if sample.id is not None and (message := problem_of(sample)) is not None
    }
    return per_sample(code, seen)


def _unreachable(sample: Sample) -> str | None:
    if not sample.choices or not targets(sample) or choice_texts(sample) is not None:
        return None
    return f"The target {targets(sample)[0]!r:.60} is none of the {len(sample.choices)} choices."


def _empty(sample: Sample) -> str | None:
    return None if targets(sample) else f"The target is {sample.target!r}."


def _find_doubled_choice(sample: Sample) -> str | None:
    counts = Counter(choice.strip() for choice in sample.choices or [])
    text = next((text for text, n in counts.items() if n > 1), None)
    if text is None:
        return None
    right = " It is the right one." if text in (choice_texts(sample) or []) else ""
    return f"The choice {text!r:.60} occurs twice.{right}"


def _imbalance(audit: AuditContext) -> list[Finding]:
    """Report one right choice, or one of few targets, that is far more frequent than the others."""
    known = [targets(s)[0].strip() for s in audit.samples if targets(s)]
    if len(known) < 8:
        return []
    if all(sample.choices for sample in audit.samples):
        known = [",".join(letters) for s in audit.samples if (letters := letters_of(s))]
        fair = max(2, min(len(sample.choices or []) for sample in audit.samples))
    else:
        fair = len(set(known))
        # a rubric or a state to reach may be the same for all; an answer may not
        if fair > len(known) / 3 or not audit.reference.gold_works:
            return []
    if not known:
        return []
    text, often = Counter(known).most_common(1)[0]
    rate, luck = often / len(known), chance_of(often, len(known), 1 / max(fair, 2))
    if luck > 0.02 or (rate < 0.6 and (rate < 2 / fair or luck > 1e-4)):
        return []
    message = f"{text!r:.60} is right on {part_of(often, len(known), 'sample')} ({rate:.0%})."
    severity = Severity.HIGH if rate >= 0.95 else Severity.MEDIUM
    return [finding("target-imbalance", message, severity=severity, target=text)]


# what the model is shown


def _leaks(audit: AuditContext) -> list[Finding]:
    """Report targets in the prompt, except where the task is like that (reading, choosing)."""
    null = audit.reference.null
    prompts = {id: record.prompt for id, record in null.items() if record.turns}
    by_id = {sample.id: sample for sample in audit.wide}
    wanted = {
        id: targets(by_id[id])[0].strip()
        for id in prompts
        if not by_id[id].choices and targets(by_id[id])
    }
    wanted = {id: target for id, target in wanted.items() if target.lower() not in _NO_LEAK}
    seen: dict[Severity, dict[int | str, tuple[str, EpisodeRecord]]] = defaultdict(dict)
    for id, target in wanted.items():
        prompt, own = prompts[id], question(by_id[id])
        if not holds(prompt, target):
            continue
        elsewhere = _rate_elsewhere(id, target, prompts, wanted)
        asked_last = re.search(rf"(?<!\w){re.escape(target)}\W*$", own.strip()) is not None
        severity = Severity.HIGH
        if _is_answered(prompt, own, target):
            where = "the prompt, after the sample's own question as an example"
        elif not holds(own, target) and elsewhere < 0.5:
            where = "what the task adds to the input"
        elif _is_labelled(prompt, target) and elsewhere < 0.5:
            where = "the prompt, marked as the answer"
        elif elsewhere < 0.34 and (len(target) > 3 or asked_last):
            where, severity = "the input", Severity.MEDIUM
        else:
            continue
        seen[severity][id] = (f"The target {target!r:.80} is in {where}.", null[id])
    found = per_sample("target-in-prompt", seen[Severity.HIGH], severity=Severity.HIGH)
    inputs, count = seen[Severity.MEDIUM], sum(map(len, seen.values()))
    # reading, extracting, sorting, picking out: in such tasks most inputs contain the answer
    if inputs and count > 3 and 2 * count >= len(wanted):
        message = f"Targets are in the input of {on_samples(inputs, wanted)}, as in reading tasks."
        records = [record for _, record in inputs.values()]
        return [*found, finding("target-in-prompt", message, records, severity=Severity.LOW)]
    return found + per_sample("target-in-prompt", inputs, severity=Severity.MEDIUM)


def _is_answered(prompt: str, own: str, target: str) -> bool:
    """Whether a prompt has a sample's question a second time, with the answer soon behind it."""
    asked, text = one_line(own).lower(), one_line(prompt).lower()
    if len(asked.split()) < _QUESTION or holds(asked, target):
        return False
    parts = text.split(asked)
    return len(parts) > 2 and any(holds(part[:_NEXT], target) for part in parts[1:])


def _is_labelled(prompt: str, target: str) -> bool:
    pattern = rf"{_LABEL}\W{{0,4}}(?:is|are|was|=|:)?\W{{0,4}}{re.escape(target)}(?!\w)"
    return re.search(pattern, prompt, re.IGNORECASE) is not None


def _rate_elsewhere(
    id: int | str, target: str, prompts: Mapping[int | str, str], wanted: Mapping[int | str, str]
) -> float:
    """Return how often the target occurs in the prompts of samples with other targets."""
    others = [key for key in prompts if key != id and wanted.get(key) != target][:60]
    return sum(holds(prompts[key], target) for key in others) / max(1, len(others))


def _prompts(audit: AuditContext) -> list[Finding]:
    null = {id: record for id, record in audit.reference.null.items() if record.turns}
    by_id = {sample.id: sample for sample in audit.wide}
    bare = {
        id: ("The model is shown nothing to answer.", record)
        for id, record in null.items()
        if not re.search(r"\w", record.prompt)
    }
    found = per_sample("empty-prompt", bare)
    groups: dict[str, list[EpisodeRecord]] = defaultdict(list)
    for id, record in null.items():
        if id not in bare:
            groups[record.prompt].append(record)
    for group in groups.values():
        inputs = {one_line(question(by_id[record.sample])) for record in group}
        wanted = {str(by_id[record.sample].target) for record in group}
        if len(inputs) > 1 and len(wanted) > 1:
            message = f"{on_samples(group, null)} show the model the same prompt."
            found.append(finding("same-prompt", message, group))
    hidden: BySample = {
        id: (f"None of its {len(choices)} choices is in the prompt.", {})
        for id, record in null.items()
        if (choices := by_id[id].choices) and not _shows_a_choice(choices, record.prompt)
    }
    found += per_sample("choices-not-shown", hidden)
    found += _far_longer(audit.samples)
    if (most := audit.options.prompt_tokens) is None:
        return found

    def too_long(sample: Sample) -> str | None:
        record = audit.reference.null_of(sample)
        tokens = max(_tokens(question(sample)), _tokens("" if record is None else record.prompt))
        if tokens <= most:
            return None
        return f"The prompt has about {counted(tokens, 'token')}, over {most:,}."

    return found + _report_each(audit.samples, "prompt-too-long", too_long)


def _shows_a_choice(choices: Sequence[str], prompt: str) -> bool:
    text = one_line(prompt).lower()
    return any(one_line(choice).lower() in text for choice in choices)


def _tokens(text: str) -> int:
    """Estimate at four characters per token."""
    return len(text) // 4


def _far_longer(samples: Sequence[Sample]) -> list[Finding]:
    """Report a few inputs that are many times as long as most."""
    sizes = {sample.id: _tokens(question(sample)) for sample in samples}
    usual = median(sizes.values())
    far = [id for id, size in sizes.items() if size > max(_FAR * usual, usual + _FAR_TOKENS)]
    if not far or len(sizes) < _FAR_LEAST or len(far) > max(1, len(sizes) // _FAR):
        return []
    longest = max(far, key=lambda id: sizes[id])
    message = (
        f"The input of {on_samples(far, sizes)} is far longer than the others': "
        f"up to {counted(sizes[longest], 'token')}, where half have at most {usual:,.0f}."
    )
    return [finding("prompt-outlier", message, sample=longest, samples=far[:_LISTED])]


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
    return [finding("tools-differ", message, groups[0])]


def _epochs(audit: AuditContext) -> list[Finding]:
    if not audit.task.epochs or audit.task.epochs < 2:
        return []
    reducers = audit.task.epochs_reducer or []
    names = ", ".join(str(getattr(reducer, "__name__", "custom")) for reducer in reducers)
    epochs = counted(audit.task.epochs, "epoch")
    return [finding("epochs-reduced", f"The task runs {epochs}, reduced by {names or 'mean'}.")]
