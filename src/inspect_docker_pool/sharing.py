"""Tells a sandbox provider about an episode's set-up, so that a group can share it.

The episode runner wraps Inspect's own initialisation of a sample's sandboxes: a provider
that can start from a snapshot finds the files and the set-up script here when it is asked
for a sandbox, and is told when they have been applied. Other providers are not affected.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from contextvars import ContextVar
from typing import Protocol


class Sharer(Protocol):
    """A provider's part in one set-up."""

    async def finish(self) -> None:
        """Set-up is done and nothing else has run. Raises nothing but a cancellation."""

    def fail(self) -> None:
        """Set-up failed or was cancelled."""


class SampleSetup:
    """Files and set-up script of one sample, about to be applied."""

    def __init__(self, files: Mapping[str, bytes], setup: bytes | None) -> None:
        self.files = files
        self.setup = setup
        self._sharer: Sharer | None = None
        self._failed = False

    @property
    def digest(self) -> str:
        """Return a key of everything that is applied, to the byte."""
        digest = hashlib.sha256()
        for part in (b"" if self.setup is None else b"setup", self.setup or b""):
            digest.update(len(part).to_bytes(8, "big") + part)
        for path, contents in self.files.items():
            for part in (path.encode(), contents):
                digest.update(len(part).to_bytes(8, "big") + part)
        return digest.hexdigest()

    def join(self, sharer: Sharer) -> None:
        """Add a provider's part; the episode may already be gone."""
        self._sharer = sharer
        if self._failed:
            sharer.fail()

    async def finish(self) -> None:
        """Tell the provider that files and script have been applied, before the solver runs."""
        if self._sharer is not None:
            await self._sharer.finish()

    def fail(self) -> None:
        """Tell the provider that nothing more will be applied."""
        self._failed = True
        if self._sharer is not None:
            self._sharer.fail()


_current: ContextVar[SampleSetup | None] = ContextVar("sample_setup", default=None)


@contextmanager
def sample_setup(files: Mapping[str, bytes], setup: bytes | None) -> Iterator[SampleSetup]:
    """Announce a set-up around Inspect's initialisation of a sample's sandboxes.

    Afterwards, and before anything else runs in them, await :meth:`SampleSetup.finish`.
    """
    announced = SampleSetup(files, setup)
    token = _current.set(announced)
    try:
        yield announced
    except BaseException:
        announced.fail()
        raise
    finally:
        _current.reset(token)


def current_setup() -> SampleSetup | None:
    """Return the set-up for which a sandbox is being acquired; ``None`` outside of episodes."""
    return _current.get()
