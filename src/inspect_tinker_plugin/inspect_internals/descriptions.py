"""What Inspect finds out about the functions of tools: kept no longer than they, found out once."""

from __future__ import annotations

import sys
import weakref
from collections.abc import Callable
from types import CodeType
from typing import Any

from inspect_tinker_plugin.inspect_internals.names import optional_names

__all__ = ["describe_react_once", "hold_tools_weakly"]


class _Descriptions(dict[int, Any]):
    """Descriptions of tools by the ``id()`` of their functions, which they do not keep alive."""

    def get(self, key: int, default: Any = None) -> Any:
        """Return a function with its description, while the function lives."""
        held, description = super().get(key, (_nothing, None))
        function = held()
        return default if function is None else (function, description)

    def __setitem__(self, key: int, value: tuple[Any, Any]) -> None:
        function, description = value
        try:
            held: Callable[[], Any] = weakref.ref(function, lambda _: self.pop(key, None))
        except TypeError:  # an object of a class without weak references

            def held() -> Any:
                return function

        super().__setitem__(key, (held, description))


def _nothing() -> None:
    """Stand for a function that is not known."""


def hold_tools_weakly() -> None:
    """Let Inspect's descriptions of tools go together with the tools.

    Inspect keeps each function that it has ever described, for the whole process: one per turn
    of ``react()``, and those of every tool that a solver makes for its sample.
    """
    names = optional_names("_tool_info_cache")
    if names is None or names._tool_info_cache is None:
        return
    module = sys.modules["inspect_ai.tool._tool_info"]
    known = module._tool_info_cache
    if not isinstance(known, _Descriptions):
        module._tool_info_cache = weakly = _Descriptions()  # type: ignore[attr-defined]
        for key, value in list(known.items()):
            weakly[key] = value


def describe_react_once(wanted: Callable[[], bool]) -> None:
    """Have the function that ``react()`` makes per turn described once, not each time.

    ``react()`` looks up whether what calls the model takes tools. Its own functions for that all
    have the same code and the same description; agents that are given to it are asked each time.

    Args:
        wanted: Whether to do so in the running context.
    """
    names = optional_names("parse_tool_info")
    if names is None:
        return
    react, describe = sys.modules["inspect_ai.agent._react"], names.parse_tool_info
    known: dict[CodeType, Any] = {}

    def described(function: Any) -> Any:
        of_react = getattr(function, "__globals__", None) is vars(react) and not vars(function)
        if not of_react or not wanted():
            return describe(function)
        found = known.get(function.__code__)
        if found is None:
            known[function.__code__] = found = describe(function)
        return found

    react.parse_tool_info = described  # type: ignore[attr-defined]
