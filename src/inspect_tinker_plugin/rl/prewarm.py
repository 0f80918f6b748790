"""Prepares the sandboxes of the next batches while the trainer works on the current one."""

from __future__ import annotations

import asyncio
import threading
import weakref
from collections import deque
from collections.abc import Callable, Sequence
from concurrent.futures import Future
from dataclasses import dataclass
from logging import getLogger
from queue import SimpleQueue
from typing import Any

from inspect_ai.dataset import Sample

from inspect_tinker_plugin import inspect_internals as internals
from inspect_tinker_plugin.contracts.sandboxes import SandboxAhead
from inspect_tinker_plugin.episode.task import PreparedTask

logger = getLogger(__name__)

MOST = 32
"""Maximum number of containers started ahead; a pool starts more on demand."""

IMAGES_AHEAD = 64
"""Number of samples whose images are made ahead; at least one whole batch."""

AT_ONCE = 3
"""Images made ahead at the same time: fewer than the threads that an engine builds with."""


@dataclass(frozen=True)
class Batches:
    """The samples of each batch of a dataset."""

    samples_of: Callable[[int], Sequence[Sample]]
    count: int
    size: int
    """Groups per batch."""
    group_size: int


@dataclass(frozen=True)
class _Made:
    """An image that was made ahead, or failed to be made."""

    ahead: SandboxAhead
    image: Future[Any]


class Ahead:
    """Builds and pulls the images of coming batches, and starts the first one's containers.

    One thread serves a dataset and ends with it, or immediately when its samples need no such
    sandbox. Failures are only logged: the episode that needs the sandbox meets the same fault and
    reports it.

    Args:
        owner: The dataset; the thread ends when it is gone.
        prepared: The task.
        batches: Its batches; they must not refer to the dataset.
    """

    def __init__(self, owner: object, prepared: PreparedTask, batches: Batches) -> None:
        self._messages: SimpleQueue[int | _Made | None] = SimpleQueue()
        self._messages.put(-1)
        # A finaliser may run anywhere, under any lock; this queue's put is made for that.
        weakref.finalize(owner, self._messages.put, None)
        threading.Thread(
            target=_Worker(prepared, batches, self._messages).run,
            name="prewarm sandboxes",
            daemon=True,
        ).start()

    def asked(self, batch: int) -> None:
        """Prepare the batches after one that was asked for; returns immediately."""
        self._messages.put(batch)

    def __reduce__(self) -> tuple[Any, ...]:
        """Pickle as a copy that prepares nothing, in this process or another."""
        return type(None), ()


class _Worker:
    def __init__(
        self,
        prepared: PreparedTask,
        batches: Batches,
        messages: SimpleQueue[int | _Made | None],
    ) -> None:
        self._prepared = prepared
        self._batches = batches
        self._messages = messages
        self._coming: deque[tuple[int, SandboxAhead]] = deque()
        """Batch and what it takes, in the order in which they will be needed."""
        self._reached = 0
        """The first batch whose samples were not examined yet."""
        self._making = 0
        self._warm: dict[SandboxAhead, int] = {}
        self._warmed: list[SandboxAhead] = []
        self._used = False

    def run(self) -> None:
        try:
            while (message := self._messages.get()) is not None:
                if isinstance(message, _Made):
                    self._expect(message)
                else:
                    self._look(message)
                if not self._used:
                    return  # none of the coming samples has a sandbox that can be made ahead
                self._make()
        except Exception as error:
            logger.warning("task %r: sandboxes are not made ahead: %s", self._prepared.name, error)
        for ahead in self._warmed:
            ahead.expect(0)

    def _look(self, asked: int) -> None:
        """Find out what the batches after the given one need."""
        if not asked < self._reached <= asked + 1 + self._depth:  # a jump in the data
            self._coming.clear()
            self._reached = asked + 1
        if asked > 0:
            self._warm.clear()
            while self._coming and self._coming[0][0] <= asked:
                self._coming.popleft()  # its episodes ask for it themselves
        for batch in range(self._reached, min(asked + 1 + self._depth, self._batches.count)):
            for ahead, shared in asyncio.run(self._needs(self._batches.samples_of(batch))):
                if asked < 0 and batch == 0:
                    self._count(ahead, shared=shared)
                if not self._coming or self._coming[-1][1] != ahead:
                    self._coming.append((batch, ahead))
            self._reached = batch + 1

    @property
    def _depth(self) -> int:
        return max(1, IMAGES_AHEAD // self._batches.size)

    async def _needs(self, samples: Sequence[Sample]) -> list[tuple[SandboxAhead, bool]]:
        """Return what the sandboxes of samples take, and whether a group shares its set-up."""
        found = []
        for sample in samples:
            try:
                spec = await self._prepared.sandbox_of(sample)
                if spec is None:
                    continue
                provider = internals.registry_find_sandboxenv(spec.type)
                if look_ahead := getattr(provider, "look_ahead", None):
                    self._used = True
                    set_up = {"files": bool(sample.files), "script": sample.setup is not None}
                    found.append(look_ahead(spec.config, sample.metadata or {}, **set_up))
            except Exception as error:
                self._complain(error)
        return found

    def _count(self, ahead: SandboxAhead, *, shared: bool) -> None:
        """Count the sandboxes that a group of the first batch is going to use."""
        room = MOST - sum(self._warm.values())
        wanted = 1 if shared else self._batches.group_size
        self._warm[ahead] = self._warm.get(ahead, 0) + min(room, wanted)

    def _make(self) -> None:
        while self._coming and self._making < AT_ONCE:
            _, ahead = self._coming[0]
            image = ahead.make()
            if image is None:
                return  # until a batch is asked for
            self._coming.popleft()
            self._making += 1
            image.add_done_callback(self._note(ahead))

    def _note(self, ahead: SandboxAhead) -> Callable[[Future[Any]], None]:
        return lambda image: self._messages.put(_Made(ahead, image))

    def _expect(self, made: _Made) -> None:
        """Have the first batch's sandboxes started, now that their image is there."""
        self._making -= 1
        if made.image.cancelled():  # the provider was closed
            self._coming.clear()
        elif error := made.image.exception():
            self._complain(error)
        elif count := self._warm.pop(made.ahead, 0):
            self._warmed.append(made.ahead)
            made.ahead.expect(count)

    def _complain(self, error: BaseException) -> None:
        logger.warning("task %r: a sandbox could not be made ahead: %s", self._prepared.name, error)
