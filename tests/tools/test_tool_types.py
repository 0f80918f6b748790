"""What Inspect finds out about the functions of tools is found out once for those of one code."""

from __future__ import annotations

import functools
import gc
import inspect
import sys
import weakref
from collections.abc import Callable
from contextvars import copy_context
from enum import Enum
from typing import Any, Literal, get_type_hints

import pytest
from inspect_ai.tool import ToolDef, ToolInfo
from inspect_ai.tool._tool_info import _parse_tool_info_shared as now  # private: what is remembered

from inspect_tinker_plugin.episode.fast_paths import describe_tools_once
from inspect_tinker_plugin.inspect_internals.tool_types import _OfFunctions


def of_default(default: Any) -> Callable[..., Any]:
    async def execute(number=default) -> str:  # type: ignore[no-untyped-def]
        """Return a number.

        Args:
            number: Any number.
        """
        return str(number)

    return execute


def of_keyword(default: Any) -> Callable[..., Any]:
    async def execute(*, number: int = default) -> str:
        """Return a number."""
        return str(number)

    return execute


def of_type(kind: Any) -> Callable[..., Any]:
    async def execute(number: Any) -> str:
        """Return a number."""
        return str(number)

    execute.__annotations__["number"] = kind
    return execute


def of_text(text: str) -> Callable[..., Any]:
    async def execute(number: int) -> str:
        return str(number)

    execute.__doc__ = text
    return execute


def of_name(name: str) -> Callable[..., Any]:
    async def execute(number: int) -> str:
        """Return a number."""
        return str(number)

    execute.__name__ = name
    return execute


def of_wrapped(inner: Callable[..., Any]) -> Callable[..., Any]:
    @functools.wraps(inner)
    async def execute(*args: Any, **kwargs: Any) -> Any:
        return await inner(*args, **kwargs)

    return execute


def of_signature(signature: Any) -> Callable[..., Any]:
    async def execute(number: int) -> str:
        """Return a number."""
        return str(number)

    execute.__signature__ = signature  # type: ignore[attr-defined]
    return execute


async def one(number: int) -> str:
    """Return one number."""
    return str(number)


async def two(first: int, second: str) -> str:
    """Return two."""
    return f"{first}{second}"


describe = now.find_out if isinstance(now, _OfFunctions) else now
"""Inspect's own."""


@pytest.fixture
def asked() -> tuple[Callable[[Any], ToolInfo], list[Any]]:
    """Return what looks functions up, and the functions that it had to look at itself."""
    looked: list[Any] = []

    def find(function: Any) -> ToolInfo:
        looked.append(function)
        return describe(function)

    return _OfFunctions(find, lambda: True), looked


@pytest.mark.parametrize(
    ("make", "value"),
    [
        (of_default, 7),
        (of_keyword, 7),
        (of_type, int),
        (of_type, "str | None"),
        (of_text, "Return it."),
    ],
)
def test_a_function_made_in_the_same_way_is_not_looked_at_again(
    asked: tuple[Callable[[Any], ToolInfo], list[Any]], make: Any, value: Any
) -> None:
    look_up, looked = asked
    first, second = make(value), make(value)
    assert look_up(first) is look_up(second)
    assert looked == [first]


def test_nor_one_whose_types_are_written_out_each_time(
    asked: tuple[Callable[[Any], ToolInfo], list[Any]],
) -> None:
    look_up, looked = asked
    for _ in range(3):
        look_up(of_type(dict[str, list[int]]))
        look_up(of_type(dict[str, list[int]]))
    assert len(looked) == 1
    look_up(of_type(dict[str, list[bool]]))
    assert len(looked) == 2


@pytest.mark.parametrize(
    ("make", "values"),
    [
        (of_default, [1, True, 1.0, "1"]),
        (of_keyword, [1, True, 2]),
        (of_type, [int, str, list[int], list[str], "int", "str"]),
        (of_text, ["Return it.", "Return that."]),
        (of_name, ["some", "other"]),
        (of_wrapped, [one, two]),
        (of_signature, [inspect.signature(one), inspect.signature(two)]),
    ],
)
def test_another_function_of_the_same_code_is_described_as_it_is(
    asked: tuple[Callable[[Any], ToolInfo], list[Any]], make: Any, values: list[Any]
) -> None:
    look_up, _ = asked
    for _ in range(2):
        for value in values:
            made = make(value)
            assert repr(look_up(made)) == repr(describe(made)), value


def test_nothing_is_remembered_where_it_is_not_wanted() -> None:
    looked: list[Any] = []
    look_up = _OfFunctions(looked.append, lambda: False)
    for _ in range(2):
        look_up(of_name("some"))
    assert len(looked) == 2


def test_a_description_of_its_own_counts(
    asked: tuple[Callable[[Any], ToolInfo], list[Any]],
) -> None:
    """``tool_with()`` and ``ToolDef`` describe a function by an attribute."""
    look_up, _ = asked
    plain = look_up(of_text("Return it."))
    tool = ToolDef(
        of_text("Return it."),
        name="other",
        description="Something else.",
        parameters={"number": "A number."},
    ).as_tool()
    assert look_up(tool) != plain


def like_inspect() -> tuple[Callable[[Any], Any], dict[int, Any]]:
    """Return what remembers texts as Inspect remembers descriptions, and the texts by function."""
    texts: dict[int, Any] = {}

    def find(function: Any) -> Any:
        return texts.setdefault(id(function), (function, function.__doc__))[1]

    return _OfFunctions(find, lambda: True, known=lambda: texts), texts


def test_a_function_that_was_described_keeps_its_description() -> None:
    """Inspect looks at a function once: what is changed about it later has no effect."""
    for seen_before in (False, True):
        look_up, _ = like_inspect()
        if seen_before:
            look_up(of_text("Return it."))
        tool = of_text("Return it.")
        assert look_up(tool) == "Return it."
        tool.__doc__ = "Return that."
        assert look_up(tool) == "Return it."


def test_a_function_that_was_changed_says_nothing_about_others() -> None:
    look_up, _ = like_inspect()
    tool = of_text("Return it.")
    look_up(tool)
    tool.__doc__ = "Return that."
    look_up(tool)
    assert look_up(of_text("Return that.")) == "Return that."


def in_namespace(source: str, **names: Any) -> Callable[..., Any]:
    namespace: dict[str, Any] = {"Literal": Literal, **names}
    exec(source, namespace)
    made: Callable[..., Any] = namespace["execute"]
    return made


CHOOSING = compile(
    """
async def execute(choice: 'list[Choice] | None', kind='kind'):
    'Choose.'
""",
    "choosing",
    "exec",
)


@pytest.mark.parametrize("find", [get_type_hints, describe])
def test_a_type_given_by_name_is_what_the_name_stands_for_now(find: Callable[[Any], Any]) -> None:
    look_up = _OfFunctions(find, lambda: True)
    namespace: dict[str, Any] = {}
    for choice in (Literal["a"], Literal["b"], int, Literal["a", "b"]):
        namespace["Choice"] = choice
        exec(CHOOSING, namespace)
        first = namespace["execute"]
        exec(CHOOSING, namespace)
        for each in (first, namespace["execute"]):
            assert repr(look_up(each)) == repr(find(each)), choice


def test_a_description_that_somebody_changes_says_nothing_about_others() -> None:
    """Those in the event of a model call are not copied, so a scorer can change them."""

    def change() -> None:
        describe_tools_once()
        for _ in range(3):
            found = sys.modules["inspect_ai.tool._tool_def"]._parse_tool_info_shared(one_more())
            assert list(found.parameters.properties) == ["number"]
            found.parameters.properties.clear()

    def one_more() -> Callable[..., Any]:
        return of_text("Return one more.")

    copy_context().run(change)


class Strange:
    """Its attribute is not there to be looked at."""

    @property
    def color(self) -> str:
        raise RuntimeError


@pytest.mark.parametrize("kind", ["Literal['things.color', '(']", "Literal['things', 'no.such']"])
def test_texts_in_annotations_are_not_evaluated(kind: str) -> None:
    look_up = _OfFunctions(get_type_hints, lambda: True)
    for _ in range(2):
        made = in_namespace(f"async def execute(kind: {kind!r}): ...", things=Strange())
        assert look_up(made) == get_type_hints(made)


def test_a_type_of_a_module_that_is_not_there_is_found_out(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "strange", None)
    kind = type("Kind", (), {"__module__": "strange"})
    look_up = _OfFunctions(get_type_hints, lambda: True)
    assert look_up(of_type(kind))["number"] is kind


def test_defaults_are_not_taken_for_those_of_keywords(
    asked: tuple[Callable[[Any], ToolInfo], list[Any]],
) -> None:
    look_up, _ = asked
    for positional, by_name in [(("c", 1), {}), ((), {"c": 1})]:

        async def execute(a=None, b=None, *, c=None) -> str:  # type: ignore[no-untyped-def]
            """Return it."""
            return f"{a}{b}{c}"

        execute.__defaults__ = positional
        execute.__kwdefaults__ = by_name
        assert repr(look_up(execute)) == repr(describe(execute))


class Held:
    """Something of an episode."""


def of_local_type(held: Held) -> Callable[..., Any]:
    class Color(Enum):
        RED = "red"

        def hold(self) -> Held:
            return held

    return of_type(Color)


def of_source(held: Held) -> Callable[..., Any]:
    return in_namespace("async def execute(number: int) -> str: 'Return it.'", held=held)


def of_source_with_types(held: Held) -> Callable[..., Any]:
    return in_namespace(
        "class Own:\n    def own(self): ...\nasync def execute(number: 'Own') -> str: 'Return it.'",
        held=held,
    )


@pytest.mark.parametrize("make", [of_default, of_local_type, of_source, of_source_with_types])
@pytest.mark.parametrize("find", [get_type_hints, describe])
def test_nothing_is_kept_of_an_episode(find: Callable[[Any], Any], make: Any) -> None:
    look_up = _OfFunctions(find, lambda: True)
    held = Held()
    gone = weakref.ref(held)
    look_up(make(held))
    del held
    known = getattr(sys.modules["inspect_ai.tool._tool_info"], "_tool_info_cache", None)
    if find is describe and known is not None:
        known.clear()
    gc.collect()
    assert gone() is None
