"""Keeps the garbage collector away from what stays for the whole life of a process."""

from __future__ import annotations

import gc
from functools import cache


def freeze_memory() -> None:
    """Spare what is loaded by now from all later garbage collections.

    A process with PyTorch and a large dataset holds millions of objects, and a full collection
    looks at each of them: a third of a second in which no episode runs. Call it once, when model
    and datasets are there and before the first rollout. The commands of ``inspect rl`` and rollout
    workers do so by themselves; a trainer of your own has to. Memory is still freed as soon as
    nothing refers to it; only cycles among what is there now are never looked for again.
    """
    gc.collect()
    gc.freeze()


@cache
def freeze_memory_once() -> None:
    """Do as :func:`freeze_memory` the first time: for commands and workers."""
    freeze_memory()
