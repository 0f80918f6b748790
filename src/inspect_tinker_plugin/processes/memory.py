"""Prevents long garbage collections in processes that run episodes."""

from __future__ import annotations

import atexit
import gc
from functools import cache

THRESHOLDS = (100_000, 50, 100)
"""New objects before a collection, and how many collections come before a more thorough one."""


def freeze_memory() -> None:
    """Exclude everything that is loaded from later garbage collections, and make those rare.

    A process with PyTorch and a large dataset holds millions of objects, and a full collection
    visits each of them: a third of a second in which no episode runs. Thousands of waiting
    episodes add as much. Call this once, when model and datasets are loaded and before the first
    rollout. The commands of ``inspect rl`` and rollout workers call it themselves; your own
    trainer has to.

    Memory is still freed as soon as nothing refers to it, which is how episodes free theirs. Only
    reference cycles wait for the collector: those among the loaded objects are never freed, later
    ones after 100,000 new objects instead of 700 (``gc.set_threshold``).
    """
    gc.collect()
    gc.freeze()
    gc.set_threshold(*THRESHOLDS)
    _thaw_at_exit()


@cache
def _thaw_at_exit() -> None:
    """Let the end of the process free what is loaded: libraries report it as lost otherwise."""
    atexit.register(gc.unfreeze)


@cache
def freeze_memory_once() -> None:
    """Do as :func:`freeze_memory` the first time: for commands and workers."""
    freeze_memory()
