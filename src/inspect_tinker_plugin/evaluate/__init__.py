"""Evaluation of what was trained: the provider `tinker`, and what a run was trained on."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from inspect_tinker_plugin.evaluate.source import connect, find_source

__all__ = ["connect", "find_source"]


def __getattr__(name: str) -> Any:
    if name not in __all__:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    from inspect_tinker_plugin.evaluate import source

    return getattr(source, name)
