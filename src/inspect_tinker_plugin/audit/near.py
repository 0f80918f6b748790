"""Finds near-duplicates among texts: MinHash, through `datasketch`."""

from __future__ import annotations

from collections.abc import Sequence

from inspect_tinker_plugin.audit.answers import words

SIMILAR = 0.8
"""Share of word triples that near-duplicates have in common."""

_LEAST = 8
"""Minimum number of words of a text; shorter ones are similar by chance."""

_PERMUTATIONS = 64


class NotInstalled(Exception):
    """The extra ``audit`` is missing."""


def near_pairs(texts: Sequence[str], others: Sequence[str] | None = None) -> list[tuple[int, int]]:
    """Return pairs of positions whose texts are nearly identical.

    Args:
        texts: The texts.
        others: Compare with these instead of among themselves.

    Returns:
        Pairs, each once; identical texts are included.

    Raises:
        NotInstalled: `datasketch` is not installed.
    """
    try:
        from datasketch import MinHash, MinHashLSH
    except ImportError as error:
        raise NotInstalled from error

    def sketch(grams: set[bytes]) -> MinHash:
        made = MinHash(num_perm=_PERMUTATIONS)
        made.update_batch(list(grams))
        return made

    grams = [_grams(text) for text in texts]
    index = MinHashLSH(threshold=SIMILAR - 0.1, num_perm=_PERMUTATIONS)
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
    return len(one & other) >= SIMILAR * len(one | other)
