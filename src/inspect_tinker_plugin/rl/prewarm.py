"""Prepares the sandboxes of the next batches while the trainer works on the current one."""

from __future__ import annotations

import asyncio
import threading
import weakref
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import FIRST_COMPLETED, Future, wait
from dataclasses import dataclass, field
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


@dataclass(kw_only=True)
class Ahead:
    """Builds and pulls the images of coming batches, and starts the first one's containers.

    One thread serves a dataset and ends with it, or immediately when its samples need no such
    sandbox. Failures are only logged: the episode that needs the sandbox meets the same fault and
    reports it.
    """

    prepared: PreparedTask
    """The task."""
    samples_of: Callable[[int], Sequence[Sample]]
    """Returns the samples of a batch; it must not refer to the dataset."""
    batches: int
    batch_size: int
    group_size: int

    # A finaliser may run anywhere, under any lock; this queue's put is made for that.
    _asked: SimpleQueue[int | None] = field(default_factory=SimpleQueue)
    _made: set[int] = field(default_factory=set)
    """Batches whose images were made."""
    _warmed: list[SandboxAhead] = field(default_factory=list)

    def start(self, owner: object) -> None:
        """Begin with the first batches; the thread ends when the owner, the dataset, is gone."""
        self.prepare_after(-1)
        weakref.finalize(owner, self._asked.put, None)
        threading.Thread(target=self._run, name="prewarm sandboxes", daemon=True).start()

    def prepare_after(self, batch: int) -> None:
        """Prepare the batches after one that is asked for now; returns immediately."""
        self._asked.put(batch)

    def __reduce__(self) -> tuple[Any, ...]:
        """Pickle as a copy that prepares nothing, in this process or another."""
        return type(None), ()

    def _run(self) -> None:
        useful = False
        try:
            while (asked := self._asked.get()) is not None:
                useful = self._prepare_after(asked) or useful
                if not useful and self._asked.empty():
                    break
        except Exception as error:
            logger.warning("task %r: sandboxes are not made ahead: %s", self.prepared.name, error)
        for ahead in self._warmed:
            ahead.expect(0)

    def _prepare_after(self, asked: int) -> bool:
        """Prepare the batches after the given one; return whether any needed that."""
        depth, useful = max(1, IMAGES_AHEAD // self.batch_size), False
        for batch in range(asked + 1, min(asked + 1 + depth, self.batches)):
            if batch in self._made:
                continue
            if not self._asked.empty():  # another batch was asked for meanwhile
                break
            needs = asyncio.run(self._find_needs(self.samples_of(batch)))
            useful = useful or bool(needs)
            # Each sandbox of the first batch is started once its image is there.
            counts = self._count(needs) if asked < 0 and batch == 0 else {}
            making: dict[Future[Any], SandboxAhead] = {}
            for ahead in dict.fromkeys(ahead for ahead, _ in needs):
                making[ahead.make()] = ahead
                if len(making) == AT_ONCE:
                    self._await_image(making, counts)
            while making:
                self._await_image(making, counts)
            self._made.add(batch)
        return useful

    async def _find_needs(self, samples: Sequence[Sample]) -> list[tuple[SandboxAhead, bool]]:
        """Return what the sandboxes of samples take, and whether a group shares its set-up."""
        found = []
        for sample in samples:
            try:
                spec = await self.prepared.sandbox_of(sample)
                if spec is None:
                    continue
                provider = internals.registry_find_sandboxenv(spec.type)
                if look_ahead := getattr(provider, "look_ahead", None):
                    set_up = {"files": bool(sample.files), "script": sample.setup is not None}
                    found.append(look_ahead(spec.config, sample.metadata or {}, **set_up))
            except Exception as error:
                self._complain(error)
        return found

    def _count(self, needs: Sequence[tuple[SandboxAhead, bool]]) -> dict[SandboxAhead, int]:
        """Count the sandboxes that the groups of a batch are going to use."""
        counts: dict[SandboxAhead, int] = {}
        for ahead, shared in needs:
            room = MOST - sum(counts.values())
            wanted = 1 if shared else self.group_size
            counts[ahead] = counts.get(ahead, 0) + min(room, wanted)
        return counts

    def _await_image(
        self, making: dict[Future[Any], SandboxAhead], counts: Mapping[SandboxAhead, int]
    ) -> None:
        done, _ = wait(making, return_when=FIRST_COMPLETED)
        for image in done:
            ahead = making.pop(image)
            if image.cancelled():  # the provider was closed
                continue
            if error := image.exception():
                self._complain(error)
            elif (count := counts.get(ahead, 0)) and self._asked.empty():
                self._warmed.append(ahead)  # its episodes have yet to come
                ahead.expect(count)

    def _complain(self, error: BaseException) -> None:
        logger.warning("task %r: a sandbox could not be made ahead: %s", self.prepared.name, error)
