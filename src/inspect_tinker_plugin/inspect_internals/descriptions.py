"""What Inspect finds out about the functions of tools: kept no longer than they, found out once."""

from __future__ import annotations

import inspect
import re
import sys
import weakref
from collections.abc import Callable
from copy import deepcopy
from functools import cache
from operator import is_
from types import CodeType, FunctionType
from typing import Any, Literal, NamedTuple, get_args, get_origin, get_type_hints

from inspect_ai.tool import ToolDef, ToolParams, ToolSource
from inspect_ai.util import JSONSchema
from pydantic import BaseModel

from inspect_tinker_plugin.inspect_internals.names import optional_names

__all__ = ["PLAIN_TYPES", "hold_tools_weakly", "remember_tools"]

PLAIN_TYPES = frozenset({str, int, float, bool, type(None)})
"""Types of values that hold nothing else and never change."""


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


def remember_tools(wanted: Callable[[], bool]) -> None:
    """Have what Inspect finds out about tools at every call found out once.

    That is the signature of a tool's function, and what ``react()`` makes per turn to call the
    model. Whether a tool is a ``ToolSource``, copies of a tool's parameters, and the check of a
    call's arguments, take less time.

    Args:
        wanted: Whether to do so in the running context.
    """
    _describe_react_once(wanted)
    _look_at_functions_once(wanted)
    _tell_sources_quickly(wanted)
    _copy_parameters_quickly(wanted)
    _check_arguments_quickly(wanted)


def _describe_react_once(wanted: Callable[[], bool]) -> None:
    """Describe the function that ``react()`` makes per turn once.

    ``react()`` looks up whether what calls the model takes tools. Its own functions for that all
    have the same code and the same description; agents that are given to it are asked each time.
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


_TOOL_CALLS = "inspect_ai.model._call_tools"
_DEFINITIONS = "inspect_ai.tool._tool_def"
_REACT = "inspect_ai.agent._react"


class _Function(NamedTuple):
    """What is found out about a function."""

    state: list[Any]
    """What it depends on."""
    signature: inspect.Signature
    hints: dict[str, Any]
    doc: str | None


_STANDS_FOR_ANOTHER = {"__wrapped__", "__signature__"}
"""Attributes of a function that ``inspect`` describes by something else."""


class _Functions:
    """Takes the place of the module ``inspect``, and remembers what it said about functions.

    It does so for plain functions with plain defaults and parameters of lasting types, while nobody
    changes them, nor what the names in their annotations stand for.
    """

    def __init__(self, wanted: Callable[[], bool]) -> None:
        self._wanted = wanted
        self._known: weakref.WeakKeyDictionary[Any, _Function] = weakref.WeakKeyDictionary()
        self._passing: weakref.WeakSet[Any] = weakref.WeakSet()
        """Functions with parameters of types that may not last, which are not looked at again."""

    def __getattr__(self, name: str) -> Any:
        return getattr(inspect, name)

    def signature(self, function: Any, **options: Any) -> inspect.Signature:
        known = None if options else self._find(function)
        return inspect.signature(function, **options) if known is None else known.signature

    def getdoc(self, function: Any) -> str | None:
        known = self._find(function)
        return inspect.getdoc(function) if known is None else known.doc

    def get_type_hints(self, function: Any, *others: Any, **options: Any) -> dict[str, Any]:
        known = None if others or options else self._find(function)
        return get_type_hints(function, *others, **options) if known is None else dict(known.hints)

    def _find(self, function: Any) -> _Function | None:
        if type(function) is not FunctionType or not self._wanted():
            return None
        if not _STANDS_FOR_ANOTHER.isdisjoint(vars(function)):
            return None
        known, state = self._known.get(function), _state(function)
        if known is not None and _same(known.state, state):
            return known
        if not _keeps_nothing(function) or function in self._passing:
            return None
        hints = get_type_hints(function)
        if not all(map(_lasts, hints.values())):
            self._passing.add(function)
            return None
        known = self._known[function] = _Function(
            state, inspect.signature(function), hints, inspect.getdoc(function)
        )
        return known


def _look_at_functions_once(wanted: Callable[[], bool]) -> None:
    """Look at the function of a tool once, not at each call of it."""
    module = sys.modules[_TOOL_CALLS]
    own = vars(module)
    if own.get("inspect") is inspect and own.get("get_type_hints") is get_type_hints:
        functions = _Functions(wanted)
        module.inspect = functions  # type: ignore[attr-defined]
        module.get_type_hints = functions.get_type_hints  # type: ignore[attr-defined]


def _state(function: FunctionType) -> list[Any]:
    """Return everything that a function's signature, hints and documentation depend on."""
    annotations, keyword_only = function.__annotations__, function.__kwdefaults__ or {}
    seen = function.__globals__
    named = [n for text in annotations.values() if type(text) is str for n in _names_in(text)]
    return [
        function.__code__,
        function.__defaults__,
        function.__doc__,
        *annotations,
        *annotations.values(),
        _Function,  # ends the annotations
        *keyword_only,
        *keyword_only.values(),
        *(seen.get(name) for name in named),
    ]


@cache
def _names_in(annotation: str) -> list[str]:
    """Return the names that an annotation is made of, also those in quotes."""
    return re.findall(r"[^\W\d]\w*", annotation)


def _lasts(hint: object) -> bool:
    """Whether a type is one of Python's or Inspect's own, which keep no tool alive."""
    parts = get_args(hint)
    if parts:
        return get_origin(hint) is Literal or all(part is ... or _lasts(part) for part in parts)
    module = getattr(hint, "__module__", "")
    return hint in (None, Any) or module == "builtins" or module.startswith("inspect_ai.")


def _same(before: list[Any], now: list[Any]) -> bool:
    return len(before) == len(now) and all(map(is_, before, now))


def _keeps_nothing(function: FunctionType) -> bool:
    """Whether the defaults of a function keep nothing alive, such as the function itself."""
    defaults = [*(function.__defaults__ or ()), *(function.__kwdefaults__ or {}).values()]
    return PLAIN_TYPES.issuperset(map(type, defaults))


def _tell_sources_quickly(wanted: Callable[[], bool]) -> None:
    """Tell lists, functions and definitions from a ``ToolSource`` without a look at its protocol.

    Before Python 3.12, that look takes as long as all else that is done with the tool.
    """

    class Quick(type):
        def __instancecheck__(cls, thing: object) -> bool:
            plain = type(thing) in (list, FunctionType, ToolDef) and not hasattr(thing, "tools")
            return not (plain and wanted()) and isinstance(thing, ToolSource)

    quick = Quick("ToolSource", (), {})
    for name in (_TOOL_CALLS, _DEFINITIONS, _REACT):
        module = sys.modules.get(name)
        if module is not None and vars(module).get("ToolSource") is ToolSource:
            module.ToolSource = quick  # type: ignore[attr-defined]


def _copy_parameters_quickly(wanted: Callable[[], bool]) -> None:
    """Make deep copies of a tool's parameters without a look-up for each plain value."""

    def copied(self: Any, memo: dict[int, Any] | None = None) -> Any:
        if not wanted() or getattr(self, "__pydantic_private__", None) is not None:
            return BaseModel.__deepcopy__(self, memo)
        made, memo = object.__new__(type(self)), {} if memo is None else memo
        memo[id(self)] = made
        fields = dict(vars(self))
        if not PLAIN_TYPES.issuperset(map(type, fields.values())):
            for name, value in fields.items():
                if type(value) not in PLAIN_TYPES:
                    fields[name] = _deep_copy(value, memo)
        _set(made, "__dict__", fields)
        extra = self.__pydantic_extra__
        _set(made, "__pydantic_extra__", extra if extra is None else deepcopy(extra, memo))
        _set(made, "__pydantic_fields_set__", {*self.__pydantic_fields_set__})
        _set(made, "__pydantic_private__", None)
        return made

    for model in (ToolParams, JSONSchema):
        if "__deepcopy__" not in vars(model):
            model.__deepcopy__ = copied  # type: ignore[method-assign]


def _deep_copy(value: Any, memo: dict[int, Any]) -> Any:
    """Return ``deepcopy(value, memo)``, which takes longer for lists and dictionaries."""
    kind = type(value)
    if (kind is not dict and kind is not list) or id(value) in memo:
        return deepcopy(value, memo)
    if kind is list:
        memo[id(value)] = many = []
        many += [each if type(each) in PLAIN_TYPES else _deep_copy(each, memo) for each in value]
        return many
    if not {str}.issuperset(map(type, value)):
        return deepcopy(value, memo)
    memo[id(value)] = named = {}
    for name, each in value.items():
        named[name] = each if type(each) in PLAIN_TYPES else _deep_copy(each, memo)
    return named


_set = object.__setattr__


_TAKEN: dict[Any, frozenset[type]] = {
    "string": frozenset({str}),
    "integer": frozenset({int}),
    "number": frozenset({int, float}),
    "boolean": frozenset({bool}),
}
"""Types of values that certainly are what a schema's type asks for."""

_PARAMETERS = {"type", "properties", "required", "additionalProperties"}
"""All that the parameters of a tool say."""

_SAYS_NOTHING = frozenset({"type", "description", "default"})
"""Fields of a schema that rule nothing out, apart from its type."""


def _check_arguments_quickly(wanted: Callable[[], bool]) -> None:
    """Let plain arguments of calls pass without a validator of their tool's schema."""
    names = optional_names("validate_tool_input")
    if names is None:
        return
    module, validate = sys.modules[_TOOL_CALLS], names.validate_tool_input

    def validated(input: dict[str, Any], parameters: ToolParams) -> str | None:
        if wanted() and _is_asked_for(input, parameters):
            return None
        said: str | None = validate(input, parameters)
        return said

    module.validate_tool_input = validated  # type: ignore[attr-defined]


def _is_asked_for(given: Any, parameters: ToolParams) -> bool:
    """Whether arguments are certainly what a schema asks for; if not, a validator decides."""
    if type(given) is not dict or type(parameters) is not ToolParams or parameters.model_extra:
        return False
    if vars(parameters).keys() != _PARAMETERS or parameters.additionalProperties is not False:
        return False
    schemas, required = parameters.properties, parameters.required
    if parameters.type != "object" or type(schemas) is not dict or type(required) is not list:
        return False
    if not given.keys() >= set(required):
        return False
    for name, value in given.items():
        schema = schemas.get(name)
        if type(schema) is not JSONSchema or type(value) not in _taken_by(schema):
            return False
    return True


def _taken_by(schema: JSONSchema) -> frozenset[type]:
    fields = vars(schema)
    if schema.model_extra or any(
        value is not None and name not in _SAYS_NOTHING for name, value in fields.items()
    ):
        return frozenset()
    wanted = fields["type"]
    return _TAKEN.get(wanted, frozenset()) if type(wanted) is str else frozenset()
