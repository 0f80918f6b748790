"""Exempts long-lived objects of a process from garbage collection."""

from __future__ import annotations

import gc
from functools import cache


def freeze_memory() -> None:
    """Exempt everything loaded so far from all later garbage collections.

    A process with PyTorch and a large dataset holds millions of objects, and a full collection
    looks at each of them: a third of a second in which no episode runs. Call this once, when model
    and datasets are loaded and before the first rollout. The commands of ``inspect rl`` and rollout
    workers do so themselves; your own trainer has to. Memory is still freed as soon as
    nothing refers to it; only cycles among the existing objects are never collected.
    """
    gc.collect()
    gc.freeze()


@cache
def freeze_memory_once() -> None:
    """Call :func:`freeze_memory` the first time only: for commands and workers."""
    freeze_memory()
