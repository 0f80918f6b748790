"""Finds copies among samples: the same ones, nearly identical ones, and those of a test task.

Near-duplicates are found by MinHash, through `datasketch`.
"""

from __future__ import annotations

import json
import re
from collections import Counter, defaultdict
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

from inspect_ai.dataset import Sample

from inspect_rl_audit.records import Finding, Severity, finding, on_samples, per_sample
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

_SIGN = re.compile(r"\w+|[^\w\s.,;:!?'\"()]")
"""A word, or a sign that may change a question's meaning."""


def find_copies(samples: Sequence[Sample]) -> list[Finding]:
    """Report equal ids, equal samples, and equal questions with different targets."""
    ids = Counter(str(sample.id) for sample in samples)
    found = per_sample(
        "duplicate-id",
        {id: (f"{counted(n, 'sample')} have the id {id!r}.", {}) for id, n in ids.items() if n > 1},
    )
    equal = [group for group in _groups(samples, _content) if len(group) > 1]
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
    conflicts = list(filter(_disagree, _groups(samples, lambda s: {**_content(s), "target": None})))
    found += [_conflict(group, "ask the same") for group in conflicts]
    known = {id(sample) for group in conflicts for sample in group}
    # case may be what is asked about
    found += [
        _conflict(group, "ask the same but for case or the last sign", Severity.LOW)
        for group in _groups(samples, _fold_question)
        if _disagree(group) and not all(id(sample) in known for sample in group)
    ]
    return found[: 2 * _LISTED]


def _groups(
    samples: Sequence[Sample], content_of: Callable[[Sample], Mapping[str, Any]]
) -> Iterable[list[Sample]]:
    """Return samples by what counts of their content."""
    groups: dict[str, list[Sample]] = defaultdict(list)
    for sample in samples:
        groups[_digest(content_of(sample))].append(sample)
    return groups.values()


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
    """Return what makes a sample the same as another."""
    return {**sample_content(sample), "sandbox": sample.sandbox}


def _fold_question(sample: Sample) -> dict[str, Any]:
    """Return a question without regard to case and its last sign; messages as they are."""
    given: Any = sample.input
    if isinstance(given, str):
        given = one_line(given).lower().rstrip(" .?!:")
    return {**_content(sample), "target": None, "input": given}


def _digest(content: Mapping[str, Any]) -> str:
    return content_hash(content, fold_spaces=True)


def question(sample: Sample) -> str:
    """Return what a sample asks, as text: input and choices."""
    given = sample.input
    text = given if isinstance(given, str) else "\n".join(message.text for message in given)
    return "\n".join([text, *(sample.choices or [])])


def one_line(text: str) -> str:
    """Return a text with single spaces."""
    return " ".join(text.split())


def find_near(samples: Sequence[Sample]) -> list[Finding]:
    """Report samples that are nearly identical, or equal but for case or the order of words."""
    samples = samples[:_NEAR_MOST]
    texts = [one_line(question(sample)) for sample in samples]
    by_words: dict[str, list[int]] = defaultdict(list)
    for position, (text, sample) in enumerate(zip(texts, samples, strict=True)):
        words_and_target = json.dumps([sorted(_signs(text)), sample.target])
        by_words[words_and_target.lower()].append(position)
    pairs = [(same[0], other) for same in by_words.values() for other in same[1:]]
    cased = any(texts[a] != texts[b] and texts[a].lower() == texts[b].lower() for a, b in pairs)
    found = []
    try:
        pairs += [(a, b) for a, b in _near_pairs(texts, texts) if a < b]
    except ImportError:
        found = [finding("near-duplicates-unchecked", "datasketch is not installed.")]
    pairs = sorted({(a, b) for a, b in pairs if texts[a] != texts[b]})
    if not pairs:
        return found
    ids = [[samples[a].id, samples[b].id] for a, b in pairs]
    touched = {position for pair in pairs for position in pair}
    one, other = ids[0]
    message = f"{on_samples(touched, samples)} have a near-duplicate, such as "
    message += f"{one!r} and {other!r}."
    severity = Severity.MEDIUM if cased else None
    listed = ids[:_LISTED]
    found.append(finding("near-duplicates", message, sample=other, severity=severity, pairs=listed))
    return found


def find_overlap(samples: Sequence[Sample], test: Sequence[Sample]) -> list[Finding]:
    """Report samples of the test task that are also trained on."""
    if not test:
        return []
    ours, theirs = [question(s) for s in samples], [question(s) for s in test]
    by_text = {one_line(text).lower(): s.id for text, s in zip(ours, samples, strict=True)}
    texts = [one_line(text).lower() for text in theirs]
    same = [(by_text[t], s.id) for t, s in zip(texts, test, strict=True) if t in by_text]
    try:
        near = [(samples[a].id, test[b].id) for a, b in _near_pairs(ours, theirs)]
    except ImportError:
        near = []
    close = [pair for pair in near if pair not in same]
    found = []
    for code, pairs, how in (
        ("test-overlap", same, "trained on"),
        ("test-near-overlap", close, "nearly identical to samples that are trained on"),
    ):
        if pairs:
            ids = {b for _, b in pairs}
            message = f"{len(ids)} of {len(test)} test samples are {how}, such as {pairs[0][0]!r} "
            message += f"(test id {pairs[0][1]!r})."
            listed = [list(pair) for pair in pairs[:_LISTED]]
            found.append(finding(code, message, sample=pairs[0][0], pairs=listed))
    return found


# near-duplicates among texts


def _near_pairs(texts: Sequence[str], others: Sequence[str]) -> list[tuple[int, int]]:
    """Return pairs of positions whose texts are nearly identical, or identical.

    Raises:
        ImportError: `datasketch`, of the extra ``audit``, is not installed.
    """
    from datasketch import MinHash, MinHashLSH

    def sketch(grams: set[bytes]) -> MinHash:
        made = MinHash(num_perm=_PERMUTATIONS)
        made.update_batch(list(grams))
        return made

    grams = [_grams(text) for text in texts]
    index = MinHashLSH(threshold=_SIMILAR - 0.1, num_perm=_PERMUTATIONS)
    for position, own in enumerate(grams):
        if own:
            index.insert(str(position), sketch(own))
    return sorted(
        (int(position), other)
        for other, theirs in enumerate(map(_grams, others))
        if theirs
        for position in index.query(sketch(theirs))
        if _alike(grams[int(position)], theirs)
    )


def _signs(text: str) -> list[str]:
    """Return the words, numbers and signs of a text, in lower case, without its punctuation."""
    return _SIGN.findall(text.lower())


def _grams(text: str) -> set[bytes]:
    """Return runs of three words; none for a text that is too short to compare."""
    found = _signs(text)
    if len(found) < _LEAST:
        return set()
    return {" ".join(found[at : at + 3]).encode() for at in range(len(found) - 2)}


def _alike(one: set[bytes], other: set[bytes]) -> bool:
    """Count the exact overlap, which the sketches only estimate."""
    return len(one & other) >= _SIMILAR * len(one | other)
