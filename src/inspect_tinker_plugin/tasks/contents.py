"""Samples by their content: its hash, and which are held out by it."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping
from typing import Any

from inspect_ai.dataset import Sample
from inspect_ai.log import EvalSample
from pydantic import BaseModel

from inspect_tinker_plugin.contracts.errors import ConfigError
from inspect_tinker_plugin.contracts.wording import counted


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
