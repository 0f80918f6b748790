"""Which samples: chosen in the words of ``inspect eval``, or held out by their content."""

from __future__ import annotations

import hashlib
import json
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from inspect_ai.dataset import Sample
from inspect_ai.log import EvalSample
from pydantic import BaseModel

from inspect_tinker_plugin.contracts.errors import ConfigError
from inspect_tinker_plugin.contracts.wording import counted


@dataclass(frozen=True, kw_only=True)
class Selection:
    """Selects samples, with the words and the meaning of ``inspect eval``.

    Raises:
        ConfigError: Two of the choices exclude each other, or one of them chooses nothing.
    """

    limit: int | tuple[int, int] | None = None
    """The first samples, or those from a position (from 0, included) to another (excluded)."""

    sample_id: str | int | Sequence[str | int] | None = None
    """Ids or patterns (``easy-*``), as ``inspect eval --sample-id``; keeps the dataset's order."""

    sample_ids: Sequence[str | int] | None = None
    """Exact ids, in the desired order."""

    sample_shuffle: bool | int | None = None
    """Shuffle before the limit is applied: ``True``, or a seed that makes the order repeatable."""

    def __post_init__(self) -> None:
        _check_limit(self.limit)
        _check_ids(self.sample_ids)
        if self.sample_id is not None and not self.patterns:
            raise ConfigError("sample_id is empty, so there is no sample; None takes all of them")
        if self.sample_ids is not None and self.sample_id is not None:
            raise ConfigError("sample_id and sample_ids exclude each other; give one of them")
        if self.sample_id is None and self.sample_ids is None:
            return
        for name in ("limit", "sample_shuffle"):
            if getattr(self, name) not in (None, False):
                by_id = "sample_id" if self.sample_ids is None else "sample_ids"
                raise ConfigError(
                    f"{name} and {by_id} exclude each other: sample ids go neither with a limit "
                    "nor with shuffling"
                )

    @property
    def patterns(self) -> list[str | int]:
        """The patterns of ``sample_id`` as a list."""
        wanted = self.sample_id
        return [wanted] if isinstance(wanted, str | int) else list(wanted or ())


def _check_limit(limit: object) -> None:
    if limit is None:
        return
    whole = [limit] if not isinstance(limit, tuple) else [limit[0] + 1, limit[1]]
    if any(isinstance(each, bool) or not isinstance(each, int) or each < 1 for each in whole):
        raise ConfigError(f"limit must be a whole number of at least 1, or a range, got {limit!r}")
    if isinstance(limit, tuple) and (len(limit) != 2 or limit[0] >= limit[1]):
        raise ConfigError(f"limit {limit!r} leaves no sample; a range is (from, to), from 0")


def _check_ids(ids: object) -> None:
    if ids is None:
        return
    if isinstance(ids, str) or not isinstance(ids, Sequence):
        raise ConfigError(f"sample_ids is a list of ids, such as [{ids!r}], not {ids!r:.80}")
    if not ids:
        raise ConfigError("sample_ids is empty, so there is no sample; None takes all of them")


_SHOWN = 3


def sample_hash(sample: Sample | EvalSample) -> str:
    """Hash the content of a sample: input, choices, target, files and setup script.

    Ids and metadata do not count: the same question under another id is the same question. A
    logged sample has the hash of the sample that it is of, unless that has files: a log holds
    their names only.
    """
    return content_hash(sample_content(sample))


def sample_content(sample: Sample | EvalSample) -> dict[str, Any]:
    """Return the parts of a sample that make it the question that it is."""
    return {
        "input": sample.input,
        "choices": sample.choices,
        "target": sample.target,
        "files": sample.files,
        "setup": sample.setup,
    }


def content_hash(content: object, *, fold_spaces: bool = False) -> str:
    """Hash content, the same in every process.

    Args:
        content: Values of samples, such as texts, messages and mappings of them.
        fold_spaces: Whether texts that differ only in white space are the same.
    """
    plain = _plain(content, fold_spaces)
    text = json.dumps(plain, sort_keys=True, ensure_ascii=False, default=str)
    return hashlib.sha256(text.encode()).hexdigest()


def _plain(value: Any, fold_spaces: bool) -> Any:
    if isinstance(value, BaseModel):
        # The ids of messages differ from process to process.
        return value.model_dump(mode="json", exclude={"id"}, exclude_none=True)
    if isinstance(value, Mapping):
        return {str(key): _plain(entry, fold_spaces) for key, entry in value.items()}
    if isinstance(value, list | tuple):
        return [_plain(entry, fold_spaces) for entry in value]
    return " ".join(value.split()) if fold_spaces and isinstance(value, str) else value


@dataclass(frozen=True)
class Split:
    """Indices of the samples on each side, in the order in which they were given."""

    train: list[int]
    test: list[int]


def split_samples(samples: Sequence[Sample], share: str, *, seed: int = 0) -> Split:
    """Hold out a part of a dataset.

    Which samples are held out depends on their content and the seed only, so it is the same
    in every process and after a resume. Samples of the same content go to the same side.

    Args:
        samples: All samples.
        share: A fraction below 1 (``"0.1"``), a percentage (``"10%"``), or a number of
            samples (``"50"``).
        seed: Another seed holds out other samples.

    Raises:
        ConfigError: The share is none of these, or leaves a side empty.
    """
    hashes = [sample_hash(sample) for sample in samples]
    held = held_out_hashes(Counter(hashes), share, seed=seed)
    return Split(
        train=[index for index, each in enumerate(hashes) if each not in held],
        test=[index for index, each in enumerate(hashes) if each in held],
    )


def held_out_hashes(counts: Mapping[str, int], share: str, *, seed: int = 0) -> frozenset[str]:
    """Return the hashes of the samples that a split holds out.

    Args:
        counts: By :func:`sample_hash`, how many samples have that hash.
        share: As in :func:`split_samples`.
        seed: Another seed holds out other samples.

    Raises:
        ConfigError: The share is none, or leaves a side empty.
    """
    size = sum(counts.values())
    wanted = held_out(share, size)
    order = sorted(counts, key=lambda each: hashlib.sha256(f"{seed}:{each}".encode()).digest())
    held: set[str] = set()
    taken = 0
    for each in order:
        if taken >= wanted:
            break
        held.add(each)
        taken += counts[each]
    if taken == size:
        raise ConfigError(
            f"a test split of {share} holds out all of {counted(size, 'sample')}: many have "
            "the same content; give a smaller share, or a --test-task"
        )
    return frozenset(held)


def held_out(share: str, size: int) -> int:
    """Return how many of ``size`` samples a share is, at least one.

    Raises:
        ConfigError: It is no share, or leaves nothing to train on.
    """
    text = share.strip()
    try:
        if text.endswith("%"):
            count = round(size * float(text[:-1]) / 100)
        elif "." in text:
            fraction = float(text)
            if not 0 < fraction < 1:
                raise ValueError
            count = round(size * fraction)
        else:
            count = int(text)
            if count < 1:
                raise ValueError
    except ValueError:
        raise ConfigError(
            f"a test split is a fraction (0.1), a percentage (10%) or a number of samples (50), "
            f"not {share!r}"
        ) from None
    count = max(1, count)
    if count >= size:
        raise ConfigError(
            f"a test split of {share} leaves none of {counted(size, 'sample')} to train on"
        )
    return count


def check_overlap(train: Iterable[Sample], test: Iterable[Sample]) -> None:
    """Refuse test samples that are also trained on.

    Raises:
        ConfigError: Some are, by :func:`sample_hash`; the message names a few.
    """
    held = {sample_hash(sample): sample.id for sample in test}
    shared = {held[each]: sample.id for sample in train if (each := sample_hash(sample)) in held}
    if shared:
        shown = ", ".join(f"{test!r} = {train!r}" for test, train in list(shared.items())[:_SHOWN])
        more = ", …" if len(shared) > _SHOWN else ""
        raise ConfigError(
            f"{len(shared)} of {len(held)} test samples are also trained on (test id = train "
            f"id: {shown}{more}); hold some out with --test-split, or say --allow-overlap"
        )
