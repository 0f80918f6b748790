"""What is found out about tools once is what would be found out each time."""

from __future__ import annotations

import gc
import inspect
import sys
import weakref
from collections.abc import Callable
from contextvars import copy_context
from copy import deepcopy
from itertools import product
from typing import Any, cast

import pytest
from inspect_ai.model import ChatMessageUser, ModelUsage
from inspect_ai.tool import Tool, ToolDef, ToolParams, ToolSource, tool
from inspect_ai.util import JSONSchema
from pydantic import BaseModel, PrivateAttr
from tests.tools.runs import add

from inspect_tinker_plugin.episode.fast_paths import (
    FastPath,
    take_inside,
    taken,
    without,
)

CALLS: Any = sys.modules["inspect_ai.model._call_tools"]


def in_episode(work: Callable[[], Any]) -> Any:
    """Do something where an episode would."""

    def inside() -> Any:
        take_inside()
        return work()

    return copy_context().run(inside)


def params(function: Any, **given: Any) -> Any:
    """Return what a tool is called with, or why it cannot be."""
    try:
        return repr(CALLS.tool_params(given, function))
    except Exception as error:
        return repr(error)


def fresh() -> Any:
    async def read(page: int, book: str = "first", *, aloud: bool = False) -> str:
        """Read a page.

        Args:
            page: Its number.
            book: Where it is.
            aloud: How.
            missing (int): Of no parameter.
        """
        return book * page

    return read


def described(**changes: Any) -> Callable[[Any], None]:
    def change(function: Any) -> None:
        for name, value in changes.items():
            setattr(function, name, value)

    return change


def other_annotation(function: Any) -> None:
    function.__annotations__["page"] = str


def no_annotation(function: Any) -> None:
    del function.__annotations__["book"]


def other_keyword(function: Any) -> None:
    function.__kwdefaults__["aloud"] = True


async def another(page: str, line: int = 3) -> str:
    return page


CHANGES: dict[str, Callable[[Any], None]] = {
    "nothing": lambda _: None,
    "an annotation": other_annotation,
    "one annotation less": no_annotation,
    "all annotations": described(__annotations__={"page": float}),
    "unknown annotations": described(__annotations__={"page": "Unknown"}),
    "defaults": described(__defaults__=("second",)),
    "defaults that hold something": described(__defaults__=([1],)),
    "a default of a keyword": other_keyword,
    "the documentation": described(__doc__="Read.\n\nArgs:\n    book (int): Where."),
    "the code": described(__code__=another.__code__),
    "a signature": described(__signature__=inspect.signature(another)),
    "what it wraps": described(__wrapped__=another),
}


@pytest.mark.parametrize("change", CHANGES.values(), ids=CHANGES.keys())
def test_a_function_that_is_changed_is_looked_at_again(change: Callable[[Any], None]) -> None:
    def told() -> list[Any]:
        function = fresh()
        before = params(function, page="2")
        change(function)
        after = [params(function, page="2"), params(function), params(function, page=1, book="x")]
        return [before, *after, params(function, line=1)]

    with without(FastPath.TOOL_DESCRIPTIONS):
        slow = in_episode(told)
    assert in_episode(told) == slow


def moved_to_keywords(function: Any) -> None:
    """Have the same values in the same order, in other places."""
    function.__kwdefaults__ = dict(function.__annotations__)
    function.__annotations__ = {}


def test_what_moves_to_another_place_is_a_change() -> None:
    def told() -> list[Any]:
        function = fresh()
        function.__kwdefaults__ = None
        before = params(function, page="2", aloud=True)
        moved_to_keywords(function)
        return [before, params(function, page="2", aloud=True)]

    with without(FastPath.TOOL_DESCRIPTIONS):
        slow = in_episode(told)
    assert slow[0] != slow[1]
    assert in_episode(told) == slow


@pytest.mark.parametrize("now", [float, None])
def test_what_a_name_in_an_annotation_stands_for_may_change(now: type | None) -> None:
    def told() -> list[Any]:
        names: dict[str, Any] = {"Number": int}
        exec("async def count(upto: 'Number') -> str:\n    'Count.'\n    return ''", names)
        before = params(names["count"], upto="2")
        names["Number"] = now
        if now is None:
            del names["Number"]
        return [before, params(names["count"], upto="2")]

    with without(FastPath.TOOL_DESCRIPTIONS):
        slow = in_episode(told)
    assert slow[0] != slow[1]
    assert in_episode(told) == slow


def test_what_is_not_a_plain_function_is_looked_at_each_time() -> None:
    class Reader:
        async def __call__(self, page: int) -> str:
            return str(page)

        async def method(self, page: int) -> str:
            return str(page)

    reader = Reader()

    def told() -> list[Any]:
        return [params(reader, page="3"), params(reader.method, page="3"), params(len, obj=1)]

    with without(FastPath.TOOL_DESCRIPTIONS):
        slow = in_episode(told)
    assert in_episode(told) == slow
    assert slow[1] == repr({"page": 3})


def test_a_function_is_looked_at_once_in_episodes_only(monkeypatch: pytest.MonkeyPatch) -> None:
    in_episode(lambda: None)  # has Inspect remember
    looked: list[str] = []
    module = sys.modules["inspect_tinker_plugin.inspect_internals.descriptions"]
    find = module.get_type_hints

    def counted(function: Any) -> Any:
        looked.append(function.__name__)
        return find(function)

    monkeypatch.setattr(module, "get_type_hints", counted)
    function = fresh()
    for _ in range(3):
        in_episode(lambda: params(function, page=1))
    assert looked == ["read"]
    for _ in range(2):
        params(function, page=1)
    assert looked == ["read"] * 3


def test_what_is_remembered_does_not_keep_a_tool() -> None:
    def of_an_episode() -> weakref.ref[Any]:
        held: list[Any] = []

        async def read(page: int, shelf: list[Any] = held) -> str:
            """Read."""
            return str(page)

        held.append(read)
        in_episode(lambda: params(read, page=1))
        return weakref.ref(read)

    def with_a_class() -> weakref.ref[Any]:
        class Page(BaseModel):
            number: int

        async def read(page: Page, others: list[Page]) -> str:
            """Read."""
            return str(page.number)

        Page.__doc__, Page.reader = "A page.", read  # type: ignore[attr-defined]
        in_episode(lambda: params(read, page={"number": 1}, others=[]))
        return weakref.ref(read)

    functions = [made() for made in (of_an_episode, with_a_class) for _ in range(3)]
    gc.collect()
    assert [function() for function in functions] == [None] * 6


# tools or sources of tools


class Source:
    async def tools(self) -> list[Tool]:
        return [add()]


class NoSource:
    tools = None


def with_tools() -> Any:
    function = fresh()
    function.tools = Source().tools
    return function


class Several(list[Tool]):
    async def tools(self) -> list[Tool]:
        return list(self)


@pytest.mark.parametrize(
    "thing",
    [Source(), NoSource(), with_tools(), Several(), [], [add()], add(), fresh(), ToolDef(add())],
    ids=lambda thing: type(thing).__name__,
)
def test_sources_of_tools_are_told_as_by_their_protocol(thing: object) -> None:
    expected = isinstance(thing, ToolSource)
    told = in_episode(lambda: [isinstance(thing, m.ToolSource) for m in USERS])
    assert told == [expected] * len(USERS)
    assert [isinstance(thing, m.ToolSource) for m in USERS] == told


USERS: list[Any] = [
    sys.modules[name]
    for name in (
        "inspect_ai.model._call_tools",
        "inspect_ai.tool._tool_def",
        "inspect_ai.agent._react",
    )
]


# copies of parameters


def parameters() -> ToolParams:
    word = JSONSchema(type="string", enum=["a", "b"], description="A word.")
    nested = JSONSchema(type="object", properties={"one": word, "two": word}, required=["one"])
    made = ToolParams(
        properties={
            "word": word,
            "list": JSONSchema(type="array", items=nested, default=[1, {"x": [2]}]),
            "either": JSONSchema(anyOf=[word, JSONSchema(type="null")], minimum=0.5),
        },
        required=["word"],
        additionalProperties=nested,
    )
    made.properties["again"] = made.properties["either"]  # one object in two places
    return made


def test_a_copy_of_parameters_is_the_usual_deep_copy() -> None:
    original = parameters()
    before = original.model_dump_json()
    copied = cast(ToolParams, in_episode(lambda: original.model_copy(deep=True)))
    usual = BaseModel.__deepcopy__(original)

    def shape(made: Any) -> Any:
        seen: dict[int, int] = {}

        def of(value: Any) -> Any:
            number = seen.setdefault(id(value), len(seen)) if type(value) is not str else 0
            if isinstance(value, BaseModel):
                inside = {name: of(each) for name, each in vars(value).items()}
                return type(value), number, inside, sorted(value.model_fields_set)
            if isinstance(value, dict):
                return number, {name: of(each) for name, each in value.items()}
            return (number, [of(each) for each in value]) if isinstance(value, list) else value

        return of(made)

    assert copied == original
    assert shape(copied) == shape(usual)
    assert in_episode(lambda: deepcopy(original)) == original
    copied.properties["list"].default.append(3)
    copied.properties["either"].anyOf = None
    copied.required.append("list")
    assert original.model_dump_json() == before


def test_parameters_with_more_than_fields_are_copied_whole() -> None:
    class Annotated(JSONSchema, extra="allow"):
        more: dict[str, list[int]]
        _hidden: dict[str, int] = PrivateAttr(default_factory=dict)

    original = Annotated.model_validate({"type": "string", "more": {"so": [1]}, "extra": [2]})
    copied = in_episode(lambda: original.model_copy(deep=True))
    assert copied == original
    assert copied.more == {"so": [1]}
    assert copied.more is not original.more
    assert copied._hidden is not original._hidden
    assert copied.model_extra == {"extra": [2]}
    assert copied.model_extra["extra"] is not original.model_extra["extra"]  # type: ignore[index]  # is set


# ids


def test_messages_take_their_ids_from_inspect_outside_of_episodes(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    in_episode(lambda: None)  # has Inspect ask
    samples = sys.modules["inspect_tinker_plugin.inspect_internals.samples"]
    monkeypatch.setattr(samples, "_ids", ["drawn"])
    assert len(str(ChatMessageUser(content="?").id)) == 22
    assert in_episode(lambda: ChatMessageUser(content="?").id) == "drawn"
    assert in_episode(lambda: ChatMessageUser(content="?", id="mine").id) == "mine"
    with without(FastPath.IDS):
        assert not taken(FastPath.IDS)
        assert len(in_episode(lambda: ChatMessageUser(content="?").id)) == 22


# sums of usage


class OwnUsage(ModelUsage):
    """Another class, whose sums are Inspect's."""


_COUNTED: Any = dict(input_tokens=3, output_tokens=2, total_tokens=5)
USAGES = [
    ModelUsage(),
    ModelUsage(**_COUNTED),
    ModelUsage.model_construct(**_COUNTED),
    ModelUsage(**_COUNTED, reasoning_tokens=1, input_tokens_cache_read=4),
    ModelUsage(**_COUNTED, input_tokens_cache_write=0, total_cost=0.5),
    ModelUsage.model_construct(input_tokens=True, output_tokens=1.0, total_tokens="1"),
    ModelUsage.model_construct(input_tokens=None),
    OwnUsage(**_COUNTED),
]


def test_sums_of_usage_are_inspects() -> None:
    def sums() -> list[Any]:
        found: list[Any] = []
        for one, other in product(USAGES, USAGES):
            before = one.model_dump(warnings=False), other.model_dump(warnings=False)
            try:
                both = one + other
                kinds = [*map(type, both.__dict__.values())]
                found.append([both, both.__dict__, kinds, sorted(both.model_fields_set)])
            except (TypeError, ValueError) as error:
                found.append(type(error))
            assert before == (one.model_dump(warnings=False), other.model_dump(warnings=False))
        return found

    with without(FastPath.USAGE):
        expected = in_episode(sums)
    assert repr(in_episode(sums)) == repr(expected)
    assert TypeError in expected


def test_sums_of_counts_are_not_checked_in_episodes(monkeypatch: pytest.MonkeyPatch) -> None:
    one = in_episode(lambda: USAGES[1] + USAGES[1])
    monkeypatch.setattr(ModelUsage, "__init__", None)
    assert in_episode(lambda: USAGES[1] + USAGES[1]) == one
    with pytest.raises(TypeError):
        _ = USAGES[1] + USAGES[1]


@tool
def documented() -> Tool:
    async def execute(count: "int | None" = None) -> str:  # noqa: UP037 - resolved by name
        """Count.

        Args:
            count: How far.
        """
        return str(count)

    return execute


def test_names_in_annotations_are_resolved() -> None:
    function = documented()
    assert in_episode(lambda: [params(function, count="4"), params(function)]) == [
        repr({"count": 4}),
        repr({"count": None}),
    ]


VALUES: list[Any] = ["", "x", 0, 1, -1.5, 1.0, True, None, [], ["x"], {}, {"a": 1}]
SCHEMAS = [
    *[
        JSONSchema(type=kind, description="d")
        for kind in ("string", "integer", "number", "boolean")
    ],
    JSONSchema(type="string", enum=["x"]),
    JSONSchema(type="string", minLength=1, default=""),
    JSONSchema(type="number", minimum=0),
    JSONSchema(type="array", items=JSONSchema(type="string")),
    JSONSchema(type="object", properties={"a": JSONSchema(type="string")}),
    JSONSchema(anyOf=[JSONSchema(type="integer"), JSONSchema(type="null")]),
    JSONSchema(type=["string", "null"]),
    JSONSchema(type="null"),
    JSONSchema(),
]


@pytest.mark.parametrize("schema", SCHEMAS, ids=lambda schema: schema.model_dump_json()[:60])
def test_arguments_are_refused_as_by_the_validator(schema: JSONSchema) -> None:
    given: list[dict[str, Any]] = [{}, {"b": 1}, {"a": "x", "c": 1}]
    given += [{"a": value} for value in VALUES] + [{"a": "x", "b": value} for value in VALUES]

    def said() -> list[Any]:
        parameters = ToolParams(
            properties={"a": schema, "b": JSONSchema(type="integer")}, required=["a"]
        )
        found = [CALLS.validate_tool_input(each, parameters) for each in given]
        for more in (JSONSchema(type="string"), True):
            parameters.additionalProperties = more
            found += [CALLS.validate_tool_input(each, parameters) for each in given]
        return found

    with without(FastPath.TOOL_DESCRIPTIONS):
        expected = in_episode(said)
    assert in_episode(said) == expected
    assert any(expected)
    assert None in expected


def test_plain_arguments_need_no_validator(monkeypatch: pytest.MonkeyPatch) -> None:
    parameters = ToolParams(properties={"a": JSONSchema(type="string")}, required=["a"])
    assert in_episode(lambda: CALLS.validate_tool_input({"a": "x"}, parameters)) is None
    monkeypatch.setattr("jsonschema.Draft7Validator", None)
    assert in_episode(lambda: CALLS.validate_tool_input({"a": "x"}, parameters)) is None
    with pytest.raises(TypeError):
        in_episode(lambda: CALLS.validate_tool_input({"a": 1}, parameters))
