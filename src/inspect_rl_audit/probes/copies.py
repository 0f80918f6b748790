"""Finds copies among samples: the same ones, nearly identical ones, and those of a test task.

Near-duplicates are found by MinHash, through `datasketch`.
"""

from __future__ import annotations

import json
from collections import Counter, defaultdict
from collections.abc import Mapping, Sequence
from typing import Any

from inspect_ai.dataset import Sample

from inspect_rl_audit.contract import AuditContext
from inspect_rl_audit.findings import Evidence, Finding, Severity, finding, per_sample
from inspect_rl_audit.policies import choice_texts, words
from inspect_tinker_plugin.plugins import counted, part_of
from inspect_tinker_plugin.tasks import content_hash, sample_content

_LISTED = 20

_NEAR_MOST = 20_000
"""Maximum number of samples for which near-duplicates are searched."""

_SIMILAR = 0.8
"""Share of word triples that near-duplicates have in common."""

_LEAST = 8
"""Minimum number of words of a text; shorter ones are similar by chance."""

_PERMUTATIONS = 64


def copies(samples: Sequence[Sample]) -> list[Finding]:
    """Report equal ids, equal samples, and equal questions with different targets."""
    found = []
    ids = Counter(str(sample.id) for sample in samples)
    twice: Evidence = {
        id: (f"{counted(n, 'sample')} have the id {id!r}.", {}) for id, n in ids.items() if n > 1
    }
    found += per_sample("duplicate-id", twice)
    by_content: dict[str, list[Sample]] = defaultdict(list)
    by_question: dict[str, list[Sample]] = defaultdict(list)
    by_folded: dict[str, list[Sample]] = defaultdict(list)
    for sample in samples:
        by_content[_digest(_content(sample))].append(sample)
        by_question[_digest({**_content(sample), "target": None})].append(sample)
        by_folded[_digest({**_content(sample), "target": None, "input": _folded(sample)})].append(
            sample
        )
    equal = [group for group in by_content.values() if len(group) > 1]
    if equal:
        extra = sum(len(group) - 1 for group in equal)
        shown = "; ".join(", ".join(repr(s.id) for s in group[:4]) for group in equal[:5])
        # samples that differ in metadata may differ in set-up or scoring
        same = any(len({_digest(s.metadata or {}) for s in g}) < len(g) for g in equal)
        found.append(
            finding(
                "duplicate-samples",
                f"{part_of(extra, len(samples), 'sample')} are copies of others: {shown}.",
                sample=equal[0][1].id,
                severity=None if same else Severity.LOW,
                groups=[[s.id for s in group] for group in equal[:_LISTED]],
            )
        )
    conflicts = [group for group in by_question.values() if _disagree(group)]
    found += [_conflict(group, "ask the same") for group in conflicts]
    known = {id(sample) for group in conflicts for sample in group}
    # case may be what is asked about
    found += [
        _conflict(group, "ask the same but for case or the last sign", Severity.LOW)
        for group in by_folded.values()
        if _disagree(group) and not all(id(sample) in known for sample in group)
    ]
    return found[: 2 * _LISTED]


def _disagree(group: Sequence[Sample]) -> bool:
    return len({json.dumps(sample.target) for sample in group}) > 1


def _conflict(group: Sequence[Sample], how: str, severity: Severity | None = None) -> Finding:
    wanted = sorted({json.dumps(sample.target) for sample in group})
    same = len({_digest(sample.metadata or {}) for sample in group}) == 1
    return finding(
        "conflicting-targets",
        f"The samples {', '.join(repr(s.id) for s in group[:5])} {how} and have the targets "
        f"{', '.join(wanted[:5])}.",
        sample=group[0].id,
        severity=severity if same else Severity.LOW,
        samples=[sample.id for sample in group[:50]],
    )


def _content(sample: Sample) -> dict[str, Any]:
    """Return what makes a sample the same as another: also with its choices in another order."""
    content = {**sample_content(sample), "sandbox": sample.sandbox}
    if sample.choices and (right := choice_texts(sample)):
        content |= {"choices": sorted(sample.choices), "target": sorted(right)}
    return content


def _folded(sample: Sample) -> object:
    """Return a text without regard to case and its last sign; messages as they are."""
    if not isinstance(sample.input, str):
        return sample.input
    return one_line(sample.input).lower().rstrip(" .?!:")


def _digest(content: Mapping[str, Any]) -> str:
    return content_hash(content, fold_spaces=True)


def question(sample: Sample) -> str:
    """Return what a sample asks, as text: input and choices."""
    given = sample.input
    text = given if isinstance(given, str) else "\n".join(message.text for message in given)
    return "\n".join([text, *(sample.choices or [])])


def near(audit: AuditContext) -> list[Finding]:
    """Report samples that are nearly identical."""
    samples = audit.samples[:_NEAR_MOST]
    texts = [question(sample) for sample in samples]
    try:
        pairs = _near_pairs(texts)
    except _NotInstalled:
        return [finding("near-duplicates-unchecked", "datasketch is not installed.")]
    pairs = [(a, b) for a, b in pairs if one_line(texts[a]) != one_line(texts[b])]
    if not pairs:
        return []
    ids = [[samples[a].id, samples[b].id] for a, b in pairs]
    touched = {position for pair in pairs for position in pair}
    message = (
        f"{part_of(len(touched), len(samples), 'sample')} have a near-duplicate, such as "
        f"{ids[0][0]!r} and {ids[0][1]!r}."
    )
    return [finding("near-duplicates", message, sample=ids[0][1], pairs=ids[:_LISTED])]


def one_line(text: str) -> str:
    """Return a text with single spaces."""
    return " ".join(text.split())


def overlap(audit: AuditContext) -> list[Finding]:
    """Report samples of the test task that are also trained on."""
    test: Sequence[Sample] | None = audit.options.test_samples
    if not test:
        return []
    ours = {one_line(question(sample)).lower(): sample.id for sample in audit.samples}
    same = [
        (ours[key], sample.id)
        for sample in test
        if (key := one_line(question(sample)).lower()) in ours
    ]
    found = []
    if same:
        message = (
            f"{len(same)} of {len(test)} test samples are trained on, such as {same[0][0]!r} "
            f"(test id {same[0][1]!r})."
        )
        pairs = [list(pair) for pair in same[:_LISTED]]
        found.append(finding("test-overlap", message, sample=same[0][0], pairs=pairs))
    try:
        near = _near_pairs([question(s) for s in audit.samples], [question(s) for s in test])
    except _NotInstalled:
        return found
    ids = [(audit.samples[a].id, test[b].id) for a, b in near]
    close = [pair for pair in ids if pair not in same]
    if close:
        message = (
            f"{len({b for _, b in close})} of {len(test)} test samples are nearly identical to "
            f"samples that are trained on, such as {close[0][0]!r} and {close[0][1]!r}."
        )
        pairs = [list(pair) for pair in close[:_LISTED]]
        found.append(finding("test-near-overlap", message, sample=close[0][0], pairs=pairs))
    return found


# near-duplicates among texts


class _NotInstalled(Exception):
    """The extra ``audit`` is missing."""


def _near_pairs(texts: Sequence[str], others: Sequence[str] | None = None) -> list[tuple[int, int]]:
    """Return pairs of positions whose texts are nearly identical.

    Args:
        texts: The texts.
        others: Compare with these instead of among themselves.

    Returns:
        Pairs, each once; identical texts are included.

    Raises:
        _NotInstalled: `datasketch` is not installed.
    """
    try:
        from datasketch import MinHash, MinHashLSH
    except ImportError as error:
        raise _NotInstalled from error

    def sketch(grams: set[bytes]) -> MinHash:
        made = MinHash(num_perm=_PERMUTATIONS)
        made.update_batch(list(grams))
        return made

    grams = [_grams(text) for text in texts]
    index = MinHashLSH(threshold=_SIMILAR - 0.1, num_perm=_PERMUTATIONS)
    sketches = [sketch(each) if each else None for each in grams]
    pairs: list[tuple[int, int]] = []
    if others is None:
        for position, made in enumerate(sketches):
            if made is not None:
                near = index.query(made)
                pairs += [
                    (int(o), position) for o in near if _alike(grams[int(o)], grams[position])
                ]
                index.insert(str(position), made)
        return sorted(pairs)
    for position, made in enumerate(sketches):
        if made is not None:
            index.insert(str(position), made)
    for other, text in enumerate(others):
        theirs = _grams(text)
        if theirs:
            near = index.query(sketch(theirs))
            pairs += [(int(p), other) for p in near if _alike(grams[int(p)], theirs)]
    return sorted(pairs)


def _grams(text: str) -> set[bytes]:
    """Return runs of three words; none for a text that is too short to compare."""
    found = words(text)
    if len(found) < _LEAST:
        return set()
    return {" ".join(found[at : at + 3]).encode() for at in range(len(found) - 2)}


def _alike(one: set[bytes], other: set[bytes]) -> bool:
    """Count the exact overlap, which the sketches only estimate."""
    return len(one & other) >= _SIMILAR * len(one | other)
