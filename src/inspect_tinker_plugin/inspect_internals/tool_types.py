"""What Inspect finds out about the functions of tools: kept no longer than they, found out once."""

from __future__ import annotations

import sys
import weakref
from collections.abc import Callable
from types import CodeType, FunctionType
from typing import Any, Generic, TypeVar, get_args, get_origin

from inspect_tinker_plugin.inspect_internals.names import optional_names

__all__ = ["hold_tools_weakly", "remember_tools"]

T = TypeVar("T")


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


class _OfFunctions(Generic[T]):
    """Remembers what was found out about functions, for others that are made in the same way.

    Solvers make tools for each sample, and ``react()`` makes a function per turn: each is another
    object, with the same code. What counts beside the code are names, documentation, defaults and
    annotations; they have to be the very same objects, or types that are written out each time.

    Args:
        find_out: Finds it out. Its results are shared, and nobody changes them.
        wanted: Whether to remember anything here.
    """

    def __init__(self, find_out: Callable[[Any], T], wanted: Callable[[], bool]) -> None:
        self.find_out = find_out
        self._wanted = wanted
        self._known: weakref.WeakKeyDictionary[CodeType, tuple[tuple[Any, ...], T]] = (
            weakref.WeakKeyDictionary()
        )

    def __call__(self, function: Any) -> T:
        """Return what there is to know about a function."""
        if (
            type(function) is not FunctionType
            or not function.__dict__.keys() <= _HARMLESS
            or not self._wanted()
        ):
            return self.find_out(function)
        made_of = _made_of(function)
        known = self._known.get(function.__code__)
        if known is not None and _same(known[0], made_of):
            return known[1]
        found = self.find_out(function)
        self._known[function.__code__] = made_of, found
        return found


_HARMLESS = {"__registry_info__", "__registry_params__"}
"""Attributes that say nothing of parameters and documentation, as others (signatures) may do."""


def _made_of(function: FunctionType) -> tuple[Any, ...]:
    by_name, types = function.__kwdefaults__ or {}, function.__annotations__
    return (
        function.__globals__,
        function.__name__,
        function.__doc__,
        *(function.__defaults__ or ()),
        *by_name,
        *by_name.values(),
        *types,
        *types.values(),
    )


def _same(some: tuple[Any, ...], others: tuple[Any, ...]) -> bool:
    return len(some) == len(others) and all(map(_is_same, some, others))


def _is_same(one: Any, other: Any) -> bool:
    """Whether two are one object, or one type that was written out twice (``list[str]``)."""
    if one is other:
        return True
    origin = get_origin(one)
    return (
        origin is not None
        and origin is get_origin(other)
        and type(one) is type(other)
        and _same(get_args(one), get_args(other))
    )


def remember_tools(wanted: Callable[[], bool]) -> None:
    """Have what Inspect finds out about a tool's function remembered for those of the same code.

    These are its description and the types of its parameters, which Inspect looks for at each
    call. ``react()`` only looks at the description of its function, so it is given no copy.

    Args:
        wanted: Whether to remember anything in the running context.
    """
    names = optional_names("_parse_tool_info_shared", "get_type_hints")
    if names is None or names._parse_tool_info_shared is None:
        return
    described = _OfFunctions[Any](names._parse_tool_info_shared, wanted)
    for name in ("tool._tool_info", "tool._tool_def"):
        module: Any = sys.modules[f"inspect_ai.{name}"]
        module._parse_tool_info_shared = described
    react: Any = sys.modules["inspect_ai.agent._react"]
    copied = react.parse_tool_info
    react.parse_tool_info = lambda function: (described if wanted() else copied)(function)
    calls: Any = sys.modules["inspect_ai.model._call_tools"]
    calls.get_type_hints = _OfFunctions(names.get_type_hints, wanted)
