"""Places for sandboxes: limits how many of one provider are alive at once in this process."""

from __future__ import annotations

import threading
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

from inspect_tinker_plugin.turnstile import Admission, Turnstile


class Places:
    """Counts the sandboxes of one provider that are alive, for the whole process.

    There is one count per provider, shared by all datasets. Each caller brings the bound of its
    dataset and gets a place when fewer than that are alive, first come first served: a
    training set with eight places and a test set with four have at most eight between them,
    and an episode of the test set starts when fewer than four are alive.

    Inspect's ``concurrency()`` is reset whenever an eval starts, which would lift the bound.

    Args:
        count: The bound for callers that bring none; without it such callers never wait.
    """

    def __init__(self, count: int | None = None) -> None:
        self._count = count
        self._turnstile = Turnstile()

    @property
    def alive(self) -> int:
        """Places held now."""
        return self._turnstile.inside

    @asynccontextmanager
    async def place(self, bound: int | None = None) -> AsyncIterator[None]:
        """Hold a place, among fewer than ``bound`` others if that is given."""
        bound = self._count if bound is None else bound
        if bound is None:
            self._turnstile.pass_by()
        else:
            await self._turnstile.enter(_fewer_than(bound))
        try:
            yield
        finally:
            self._turnstile.leave()


def _fewer_than(bound: int) -> Admission:
    return lambda inside: inside < bound


_places: dict[str, Places] = {}
_lock = threading.Lock()


def sandbox_places(provider: str) -> Places:
    """Return this process's places for a provider."""
    with _lock:
        return _places.setdefault(provider, Places())
