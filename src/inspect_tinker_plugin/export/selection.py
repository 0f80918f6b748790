"""Which samples of a task are taken and in what order, as ``inspect eval`` chooses them."""

from __future__ import annotations

import random
from collections.abc import Sequence
from dataclasses import dataclass
from fnmatch import fnmatch

from inspect_ai.dataset import Dataset, Sample

from inspect_tinker_plugin.errors import ConfigError


@dataclass(frozen=True)
class Selection:
    """What ``--limit``, ``--sample-id`` and ``--sample-shuffle`` say."""

    limit: int | tuple[int, int] | None = None
    """The first samples, or those from (0-based, included) to (excluded)."""

    sample_ids: Sequence[str] | None = None
    """Ids or patterns (``easy-*``); not together with the other two."""

    shuffle: bool = False
    """Shuffle before the limit is applied."""

    seed: int | None = None
    """Makes the order repeatable; the same order as ``--sample-shuffle SEED`` in an eval."""

    def __post_init__(self) -> None:
        if self.sample_ids is not None and (self.limit is not None or self.shuffle):
            raise ConfigError("sample ids go neither with a limit nor with shuffling.")


class SelectedSamples(Sequence[Sample]):
    """The chosen samples of a dataset, which is left as it is; each has an id.

    A sample without id gets its 1-based position in the dataset, shuffled or not.
    """

    def __init__(self, dataset: Dataset, selection: Selection) -> None:
        self._dataset = dataset
        order = list(range(len(dataset)))
        if selection.shuffle and not dataset.shuffled:
            random.Random(selection.seed).shuffle(order)
        if isinstance(selection.limit, tuple):
            order = order[slice(*selection.limit)]
        elif selection.limit is not None:
            order = order[: selection.limit]
        if selection.sample_ids is not None:
            order = self._matching(order, selection.sample_ids)
        self._order = order

    def _matching(self, order: list[int], patterns: Sequence[str]) -> list[int]:
        wanted = [_normal(pattern) for pattern in patterns]
        found: set[str] = set()
        chosen = []
        for index in order:
            name = _normal(self._id(index))
            hits = [pattern for pattern in wanted if fnmatch(name, pattern)]
            found.update(hits)
            if hits:
                chosen.append(index)
        missing = [
            raw for raw, pattern in zip(patterns, wanted, strict=True) if pattern not in found
        ]
        if missing:
            known = ", ".join(str(self._id(index)) for index in order[:8])
            raise ConfigError(
                f"no sample has the id {', '.join(missing)} (the first ids are {known or 'none'})."
            )
        return chosen

    def _id(self, index: int) -> str | int:
        id = self._dataset[index].id
        return index + 1 if id is None else id

    def __getitem__(self, index: int) -> Sample:  # type: ignore[override]  # no slices needed
        position = self._order[index]
        sample = self._dataset[position]
        return sample if sample.id is not None else sample.model_copy(update={"id": position + 1})

    def __len__(self) -> int:
        return len(self._order)


def _normal(id: str | int) -> str:
    """Compare ``7`` and ``"007"`` as equal, as Inspect does."""
    text = str(id)
    return text.zfill(20) if text.isdigit() else text
