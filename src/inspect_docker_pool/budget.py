"""Keeps the images made by this process within a disk budget: removes the least recently used."""

from __future__ import annotations

import threading
from collections import OrderedDict
from collections.abc import Callable
from dataclasses import dataclass
from logging import getLogger

from inspect_docker_pool.config import GIB
from inspect_docker_pool.engine import Engine, quietly

logger = getLogger(__name__)

DEFAULT_BYTES = 50 * GIB


@dataclass(frozen=True)
class _Made:
    id: str
    layers: tuple[tuple[str, int], ...]
    """The layers of the image, each identified with all layers beneath it, and their bytes."""


class ImageBudget:
    """The images that this process built or pulled, in the order of their last use.

    Images that were there before are not counted and never removed. Layers that several
    images share count once. Thread-safe.

    Args:
        engine: where the images are.
        evicted: called with the id of an image that was removed.
    """

    def __init__(self, engine: Engine, evicted: Callable[[str], None]) -> None:
        self._engine = engine
        self._evicted = evicted
        self._made: OrderedDict[str, _Made] = OrderedDict()
        self._awaited: set[str] = set()
        """Images made ahead of need, and not used yet."""
        self._stated: int | None = None
        self._lock = threading.Lock()

    def used(self, reference: str, stated: int | None) -> None:
        """Record that a configuration uses an image, and its budget, if it has one."""
        with self._lock:
            if reference in self._made:
                self._made.move_to_end(reference)
            self._awaited.discard(reference)
        self.state(stated)

    def state(self, budget: int | None) -> None:
        """Record the budget of a configuration, if it has one; the largest one counts."""
        with self._lock:
            if budget is not None:
                self._stated = max(self._stated or 0, budget)

    def await_use(self, reference: str) -> None:
        """Record that an image was made ahead of need: it is removed after the used ones."""
        with self._lock:
            self._awaited.add(reference)

    def has_room_ahead(self, reference: str) -> bool:
        """Tell whether one more image may be made before it is needed.

        Images made ahead and not used yet take at most half of the budget, so that they
        displace neither each other nor the images of running episodes.
        """
        with self._lock:
            parts = {p for name in self._awaited & set(self._made) for p in self._made[name].layers}
            return reference in self._made or sum(size for _, size in parts) <= self._budget // 2

    @property
    def _budget(self) -> int:
        return DEFAULT_BYTES if self._stated is None else self._stated

    def counts(self, reference: str) -> bool:
        """Tell whether an image was made by this process."""
        with self._lock:
            return reference in self._made

    def made(self, reference: str, image: str, before: str | None = None) -> None:
        """Count an image that was built or pulled just now, and make room, in this thread.

        Args:
            reference: its name.
            image: its id.
            before: what had that name until now; it is removed, or counted while it is in use.
        """
        made = self._measured(image)
        if before is not None and before != image:
            self._replaced(before)
        with self._lock:
            self._made[reference] = made
            self._made.move_to_end(reference)
            older = sorted(list(self._made)[:-1], key=self._awaited.__contains__)
            budget = self._budget
        for name in older:
            if self._total() <= budget:
                return
            self._remove(name, budget)

    def _replaced(self, image: str) -> None:
        # An image without its name cannot be found again. The engine keeps one that has another
        # name, or a container; the last of those may end before this process does.
        if quietly(self._engine.api.remove_image, image):
            self._evicted(image)
            return
        held = self._measured(image)
        with self._lock:
            self._made[image] = held
            self._made.move_to_end(image, last=False)  # the first to go

    def _measured(self, image: str) -> _Made:
        parts, beneath = [], ""
        history = self._engine.api.history(image)  # type: ignore[no-untyped-call]  # the stubs miss it
        for entry in reversed(history):
            beneath = f"{hash((beneath, entry['Created'], entry['CreatedBy'], entry['Size']))}"
            parts.append((beneath, int(entry["Size"])))
        return _Made(image, tuple(parts))

    def _total(self) -> int:
        with self._lock:
            parts = {part for made in self._made.values() for part in made.layers}
        return sum(size for _, size in parts)

    def _remove(self, name: str, budget: int) -> None:
        before = self._total()
        # Not by force: the engine refuses while a container runs from it.
        if not quietly(self._engine.api.remove_image, name):
            return
        with self._lock:
            gone = self._made.pop(name)
            self._awaited.discard(name)
        self._evicted(gone.id)
        logger.warning(
            "docker_pool: removed image %s, the least recently used one (%.1f MB), to keep images "
            "within %.1f GB; it is made again when it is needed. More room: x-docker-pool: "
            "{images: 200g}",
            name,
            (before - self._total()) / 1e6,
            budget / 1e9,
        )
