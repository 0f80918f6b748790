"""What Inspect finds out about the functions of tools: kept no longer than they, found out once."""

from __future__ import annotations

import ast
import builtins
import sys
import weakref
from collections.abc import Callable
from enum import Enum
from functools import lru_cache
from types import CodeType, EllipsisType, FunctionType, ModuleType, NoneType
from typing import (
    Annotated,
    Any,
    Generic,
    Literal,
    Optional,
    TypeVar,
    Union,
    get_args,
    get_origin,
)

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
    object, with the same code. What counts beside the code are names, documentation, defaults,
    annotations and what these refer to; they have to be the same objects, or types that are
    written out each time.

    Nothing is remembered that an episode may have made, since it would be kept alive: only plain
    defaults, and types that can be imported.

    Args:
        find_out: Finds it out.
        wanted: Whether to remember anything here.
        known: What is known about a function itself, which takes precedence.
        copied: Copies a result for another function; without it nobody may change results.
    """

    def __init__(
        self,
        find_out: Callable[[Any], T],
        wanted: Callable[[], bool],
        known: Callable[[], dict[int, Any] | None] = lambda: None,
        copied: Callable[[T], T] = lambda found: found,
    ) -> None:
        self.find_out = find_out
        self._wanted = wanted
        self._known_itself = known
        self._copied = copied
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
        known_itself = self._known_itself()
        if known_itself is not None and known_itself.get(id(function), _NOBODY)[0] is function:
            # it may have another documentation by now, so this says nothing about others
            return self.find_out(function)
        made_of = _made_of(function)
        known = self._known.get(function.__code__)
        if known is not None and _same(known[0], made_of):
            found = self._copied(known[1])
            if known_itself is not None:
                known_itself[id(function)] = function, found
            return found
        found = self.find_out(function)
        hints = found.values() if isinstance(found, dict) else ()
        if all(map(_lasts, made_of)) and all(map(_lasts, hints)):
            self._known[function.__code__] = made_of, self._copied(found)
        return found


_HARMLESS = {"__registry_info__", "__registry_params__"}
"""Attributes that say nothing of parameters and documentation, as others (signatures) may do."""

_NOBODY = (None, None)


def _made_of(function: FunctionType) -> tuple[Any, ...]:
    defaults, by_name = function.__defaults__ or (), function.__kwdefaults__ or {}
    types = function.__annotations__
    return (
        function.__name__,
        function.__doc__,
        len(defaults),
        *defaults,
        len(by_name),
        *by_name,
        *by_name.values(),
        *types,
        *types.values(),
        *getattr(function, "__type_params__", ()),
        *(
            _find(name, function.__globals__)
            for each in types.values()
            if isinstance(each, str)
            for name in _names_in(each)
        ),
    )


@lru_cache(maxsize=4096)
def _names_in(annotation: str) -> tuple[str, ...]:
    """Return the names in an annotation that is text, with attributes (``typing.Any``)."""
    try:
        parts = list(ast.walk(ast.parse(annotation.strip(), mode="eval")))
    except (SyntaxError, ValueError):
        return ()
    names = [ast.unparse(part) for part in parts if isinstance(part, ast.Name | ast.Attribute)]
    texts = [part.value for part in parts if isinstance(part, ast.Constant)]
    return (
        *names,
        *(name for text in texts if isinstance(text, str) for name in _names_in(text)),
    )


def _find(name: str, namespace: dict[str, Any]) -> Any:
    """Return what a name refers to, in modules and classes; ``None`` if it is nothing."""
    first, *attributes = name.split(".")
    found = namespace.get(first, getattr(builtins, first, None))
    for attribute in attributes:
        if not isinstance(found, ModuleType) and not issubclass(type(found), type):
            return _Unknown()
        found = getattr(found, attribute, None)
    return found


class _Unknown:
    """What an attribute of some object is: to find out could have effects."""


def _lasts(part: Any) -> bool:
    """Whether something is there for good: a plain value, or a type that can be imported."""
    kind = type(part)
    if kind in _PLAIN or any(part is form for form in _FORMS):
        return True
    if issubclass(kind, ModuleType):
        return sys.modules.get(part.__name__) is part
    if issubclass(kind, Enum):
        return _lasts(kind)
    origin = get_origin(part)
    if origin is not None:
        texts = origin is not Literal and any(isinstance(each, str) for each in get_args(part))
        return _lasts(origin) and not texts and all(map(_lasts, get_args(part)))
    if not issubclass(kind, type):
        return False
    module = sys.modules.get(part.__module__)
    return isinstance(module, ModuleType) and _find(part.__qualname__, vars(module)) is part


_PLAIN = {NoneType, EllipsisType, bool, int, float, complex, str, bytes}
_FORMS: tuple[Any, ...] = (Annotated, Any, Literal, Union, Optional, NoneType)


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
    descriptions = sys.modules["inspect_ai.tool._tool_info"]
    find_out = names._parse_tool_info_shared

    def known() -> dict[int, Any] | None:
        return getattr(descriptions, "_tool_info_cache", None)

    described = _OfFunctions[Any](
        find_out, wanted, known, copied=lambda info: info.model_copy(deep=True)
    )
    looked_at = _OfFunctions[Any](find_out, wanted, known)
    for name in ("tool._tool_info", "tool._tool_def"):
        module: Any = sys.modules[f"inspect_ai.{name}"]
        module._parse_tool_info_shared = described
    react: Any = sys.modules["inspect_ai.agent._react"]
    copied = react.parse_tool_info
    react.parse_tool_info = lambda function: (looked_at if wanted() else copied)(function)
    calls: Any = sys.modules["inspect_ai.model._call_tools"]
    calls.get_type_hints = _OfFunctions(names.get_type_hints, wanted)
