"""The built-in executors, and how they are chosen."""

from __future__ import annotations

import asyncio
import pickle
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from typing import Any

import pytest
from inspect_ai.model import ChatMessageAssistant
from inspect_ai.tool import ToolCall, ToolResult
from inspect_ai.util import sandbox
from tests.functions import make_tool
from tests.tools.runs import add, fail, looping, ran, run, scope, tool_texts

from inspect_tinker_plugin.contracts.errors import ConfigError
from inspect_tinker_plugin.testing import Script, call, say
from inspect_tinker_plugin.tools import (
    CachedExecutor,
    InspectExecutor,
    LimitedExecutor,
    ScriptedExecutor,
    ToolExecutorError,
    ToolInvocation,
    resolve_tool_executor,
)


@pytest.fixture(autouse=True)
def _nothing_ran() -> None:
    ran.clear()


@make_tool
async def whoami() -> str:
    """Say which user the sandbox has."""
    ran.append(("whoami",))
    return (await sandbox().exec(["echo", "me"])).stdout


@make_tool
async def hang() -> str:
    """Never come back."""
    await asyncio.Event().wait()
    return ""


def adding(*pairs: tuple[int, int]) -> list[Any]:
    return [*(say("", call("add", x=x, y=y)) for x, y in pairs), "done"]


async def test_cached_shares_results_within_a_group() -> None:
    group: dict[Any, Any] = {}
    for _ in range(3):
        result = await run(
            looping(add()), adding((1, 2), (1, 2), (2, 2)), CachedExecutor(), scope(group=group)
        )
        assert tool_texts(result) == ["3", "3", "4"]
    assert ran == [("add", 1, 2), ("add", 2, 2)]
    await run(looping(add()), adding((1, 2)), CachedExecutor(), scope(group={}))
    assert len(ran) == 3


@pytest.mark.parametrize("span", ["episode", "dataset"])
async def test_cached_shares_results_as_far_as_it_is_told(span: str) -> None:
    dataset: dict[Any, Any] = {}
    executor = resolve_tool_executor(f"cached(scope='{span}')")
    for _ in range(2):
        await run(looping(add()), adding((1, 2), (1, 2)), executor, scope(dataset=dataset))
    assert len(ran) == (1 if span == "dataset" else 2)


def test_calls_of_several_loops_at_once_run_the_tool_once() -> None:
    @make_tool
    async def ponder() -> str:
        """Think for a moment."""
        ran.append(("ponder",))
        await asyncio.sleep(0.3)
        return "well"

    executor, dataset = CachedExecutor(scope="dataset"), dict[Any, Any]()

    async def both() -> list[str]:
        script: Script = [say("", call("ponder"), call("ponder")), "done"]
        result = await run(looping(ponder()), script, executor, scope(dataset=dataset))
        return tool_texts(result)

    with ThreadPoolExecutor(3) as threads:
        done = [threads.submit(asyncio.run, both()) for _ in range(3)]
        assert [each.result(timeout=60) for each in done] == [["well", "well"]] * 3
    assert ran == [("ponder",)]


async def test_a_call_that_is_cancelled_while_it_waits_for_another_leaves_it_alone() -> None:
    gate, memory = asyncio.Event(), dict[Any, Any]()

    async def slow(**arguments: Any) -> str:
        await gate.wait()
        return "3"

    def ask() -> asyncio.Task[ToolResult]:
        invocation = ToolInvocation(
            call=ToolCall(id="1", function="slow", arguments={}),
            arguments={},
            scope=scope(group=memory),
            inspect=slow,
        )
        return asyncio.ensure_future(CachedExecutor()(invocation))

    first, second, third = ask(), ask(), ask()
    await asyncio.sleep(0)
    second.cancel()
    await asyncio.wait([second])
    gate.set()
    assert [await first, await third] == ["3", "3"]


async def test_a_tool_that_asks_for_the_sandbox_is_not_cached() -> None:
    script: Script = [say("", call("whoami")), say("", call("whoami")), "done"]
    result = await run(looping(whoami(), sandbox="local"), script, CachedExecutor())
    assert tool_texts(result) == ["me\n", "me\n"]
    assert len(ran) == 2


async def test_a_failed_call_is_not_cached() -> None:
    script: Script = [say("", call("fail", text="no")), say("", call("fail", text="no")), "done"]
    result = await run(looping(fail()), script, CachedExecutor())
    assert tool_texts(result) == ["unknown: no"] * 2
    assert len(ran) == 2


async def test_limited_bounds_the_time_of_a_call() -> None:
    executor = resolve_tool_executor("limited(timeout=0.01)")
    result = await run(looping(hang()), [say("", call("hang")), "done"], executor)
    assert tool_texts(result) == ["timeout: Command timed out before completing."]


async def test_limited_bounds_the_size_of_a_result() -> None:
    async def large(invocation: ToolInvocation) -> ToolResult:
        return "x" * 1000

    class Large:
        async def __call__(self, invocation: ToolInvocation, /) -> ToolResult:
            return await large(invocation)

    executor = LimitedExecutor(output=10, inner=Large())
    result = await run(looping(add()), adding((1, 2)), executor)
    assert tool_texts(result) == ["limit: The tool exceeded its output limit of 10 bytes."]
    assert "xxxxxxxxxx" in result.state.messages[-2].text
    assert "x" * 11 not in result.state.messages[-2].text


async def test_limited_bounds_the_number_of_calls_in_each_episode() -> None:
    executor = resolve_tool_executor("limited(calls=1)")
    for _ in range(2):
        result = await run(looping(add()), adding((1, 2), (3, 4)), executor)
        assert tool_texts(result) == ["3", "unknown: The limit of 1 call to add is reached."]


@pytest.mark.parametrize(
    "spec",
    [
        {"ad*": "scripted(add='fake')", "*": "inspect"},
        'route("ad*"=scripted(add="fake"))',
        {"add": ScriptedExecutor({"add": "fake"})},
    ],
    ids=["mapping", "expression", "object"],
)
async def test_executors_are_chosen_by_the_tools_name(spec: Any) -> None:
    script = [*adding((1, 2))[:-1], say("", call("fail", text="real")), "done"]
    result = await run(looping(add(), fail()), script, resolve_tool_executor(spec))
    assert tool_texts(result) == ["fake", "unknown: real"]


async def test_executors_nest() -> None:
    executor = resolve_tool_executor("limited(calls=3, inner=cached)")
    result = await run(looping(add()), adding((1, 2), (1, 2), (1, 2), (1, 2)), executor)
    assert tool_texts(result)[:3] == ["3", "3", "3"]
    assert "limit of 3" in tool_texts(result)[3]
    assert ran == [("add", 1, 2)]


@pytest.mark.parametrize("spec", [None, "inspect", "inspect()", InspectExecutor()], ids=str)
def test_the_default_puts_nothing_in_between(spec: Any) -> None:
    assert resolve_tool_executor(spec) is None


def plain(invocation: ToolInvocation) -> str:
    return "not async"


@pytest.mark.parametrize(
    ("spec", "problem"),
    [
        ("cashed", "Did you mean cached"),
        ("cached(scope='week')", "scope is"),
        ("limited", "at least one"),
        ("limited(timeout=-1)", "above 0"),
        ("limited(calls='many')", "above 0"),
        ("route(bash=3)", "a tool executor was expected"),
        ("cached(0.5=inspect)", "stands before '='"),
        ("score:accuracy", "no meaning"),
        ({"bash": "limted(timeout=3)"}, "limited"),
        (3, "neither"),
        (CachedExecutor, "neither"),
        (plain, "neither"),
    ],
)
def test_what_is_no_executor_is_refused(spec: Any, problem: str) -> None:
    with pytest.raises(ConfigError, match=problem):
        resolve_tool_executor(spec)


@pytest.mark.parametrize("spec", ["cached", {"a*": "limited(calls=3)"}, CachedExecutor()], ids=str)
async def test_executors_travel_to_worker_processes(spec: Any) -> None:
    executor = pickle.loads(pickle.dumps(resolve_tool_executor(spec)))
    result = await run(looping(add()), adding((1, 2)), executor)
    assert tool_texts(result) == ["3"]


async def test_an_executor_that_exits_is_named() -> None:
    async def leaves(invocation: ToolInvocation) -> ToolResult:
        raise SystemExit(2)

    script: Script = [say("", call("add", x=1, y=2)), say("3")]
    with pytest.raises(ToolExecutorError, match=r"leaves' raised SystemExit\(2\) for a call of"):
        await run(looping(add()), script, executor=leaves)


class Remote:
    async def carry_out(self, invocation: ToolInvocation) -> ToolResult:
        return await invocation.run()


async def forward(invocation: ToolInvocation, *, to: str) -> ToolResult:
    return await invocation.run()


@pytest.mark.parametrize(
    "executor", [Remote().carry_out, partial(forward, to="there")], ids=["method", "partial"]
)
async def test_a_method_or_a_partial_is_an_executor(executor: Any) -> None:
    result = await run(looping(add()), adding((1, 2)), resolve_tool_executor(executor))
    assert tool_texts(result) == ["3"]


async def test_an_executor_cannot_change_what_the_policy_said() -> None:
    async def rewrites(invocation: ToolInvocation) -> ToolResult:
        invocation.call.arguments["x"] = 99
        return await invocation.run()

    result = await run(looping(add()), adding((1, 2)), rewrites)
    said = [
        each.arguments
        for message in result.state.messages
        if isinstance(message, ChatMessageAssistant)
        for each in message.tool_calls or ()
    ]
    assert said == [{"x": 1, "y": 2}]
