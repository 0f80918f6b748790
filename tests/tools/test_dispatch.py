"""An executor carries out the tool calls of every kind of solver, after Inspect's own checks."""

from __future__ import annotations

import asyncio
import sys
from pathlib import Path
from typing import Any

import pytest
from inspect_ai import Task, eval_async
from inspect_ai.agent import as_tool, handoff, react
from inspect_ai.approval import Approval, ApprovalPolicy, Approver, approver
from inspect_ai.dataset import Sample
from inspect_ai.scorer import includes
from inspect_ai.solver import basic_agent, generate, use_tools
from inspect_ai.tool import ToolCall, ToolError, ToolResult, mcp_server_stdio, mcp_tools
from tests.tools.runs import add, fail, looping, ran, run, tool_events, tool_texts

from inspect_tinker_plugin.testing import Script, call, say, scripted_model, submit, unparsed_call
from inspect_tinker_plugin.tools import ToolFunction, ToolInvocation

MCP_SERVER = Path(__file__).resolve().parents[1] / "parity" / "mcp_server.py"


class Spy:
    """Notes every call, and answers add() itself."""

    def __init__(self) -> None:
        self.calls: list[tuple[str, dict[str, Any]]] = []

    async def __call__(self, invocation: ToolInvocation) -> ToolResult:
        self.calls.append((invocation.tool, dict(invocation.arguments)))
        if invocation.tool == "add":
            return "simulated"
        return await invocation.run()


@pytest.fixture(autouse=True)
def _nothing_ran() -> None:
    ran.clear()


def agent_task(solver: Any) -> Task:
    return Task(
        name="tools",
        dataset=[Sample(id=1, input="Do it.", target="done")],
        solver=solver,
        scorer=includes(),
    )


ADD = say("", call("add", x=1, y=2))


def solvers() -> dict[str, tuple[Task, Script]]:
    expert = react(name="expert", description="Adds.", tools=[add()])
    return {
        "generate": (looping(add()), [ADD, "done"]),
        "react": (agent_task(react(tools=[add()])), [ADD, submit("done")]),
        "basic_agent": (agent_task(basic_agent(tools=[add()])), [ADD, submit("done")]),
        "handoff": (
            agent_task(react(tools=[handoff(expert)])),
            [say("", call("transfer_to_expert")), ADD, submit("three"), submit("done")],
        ),
        "as_tool": (
            agent_task(react(tools=[as_tool(expert)])),
            [say("", call("expert", input="1 + 2")), ADD, submit("three"), submit("done")],
        ),
    }


@pytest.mark.parametrize("kind", list(solvers()))
async def test_it_works_under(kind: str) -> None:
    task, script = solvers()[kind]
    spy = Spy()
    result = await run(task, script, spy)
    assert ("add", {"x": 1, "y": 2}) in spy.calls
    assert not ran, "the tool itself was run"
    added = [event for event in tool_events(result) if event.function == "add"]
    assert [event.result for event in added] == ["simulated"]
    assert result.scores["includes"].score.value == "C"


async def test_parallel_calls_are_each_carried_out() -> None:
    spy = Spy()
    both = say("", call("add", x=1, y=2), call("add", x=3, y=4))
    result = await run(looping(add()), [both, "done"], spy)
    assert sorted(arguments["x"] for _, arguments in spy.calls) == [1, 3]
    assert tool_texts(result) == ["simulated", "simulated"]


async def test_tools_of_an_mcp_server_are_carried_out() -> None:
    server = mcp_server_stdio(name="corpus", command=sys.executable, args=[str(MCP_SERVER)])
    task = agent_task([use_tools(mcp_tools(server)), generate()])
    calls: list[str] = []

    async def replaced(invocation: ToolInvocation) -> ToolResult:
        calls.append(invocation.tool)
        return "from the executor, not the server"

    def script(request: Any) -> Any:
        if request.index > 0:
            return "done"
        [offered] = request.tools[:1]
        arguments = {name: "x" for name in offered.parameters.required}
        return say("", call(offered.name, **arguments))

    result = await run(task, script, replaced)
    assert len(calls) == 1
    assert tool_texts(result) == ["from the executor, not the server"]


async def test_executors_may_let_inspect_run_the_tool() -> None:
    async def doubled(invocation: ToolInvocation) -> ToolResult:
        return f"{await invocation.run()} and {await invocation.run()}"

    result = await run(looping(add()), [ADD, "done"], doubled)
    assert tool_texts(result) == ["3 and 3"]
    assert ran == [("add", 1, 2)] * 2


@approver
def no_twos() -> Approver:
    async def approve(message: str, call: ToolCall, view: Any, history: Any) -> Approval:
        if call.arguments.get("x") == 2:
            return Approval(decision="reject", explanation="no twos")
        if call.arguments.get("x") == 9:
            changed = ToolCall(id=call.id, function=call.function, arguments={"x": 8, "y": 8})
            return Approval(decision="modify", modified=changed)
        return Approval(decision="approve")

    return approve


async def test_approval_comes_first() -> None:
    spy = Spy()
    calls = [say("", call("add", x=x, y=1)) for x in (1, 2, 9)]
    task = looping(add(), approval=[ApprovalPolicy(no_twos(), "*")])
    result = await run(task, [*calls, "done"], spy)
    assert [arguments for _, arguments in spy.calls] == [{"x": 1, "y": 1}, {"x": 8, "y": 8}]
    assert tool_texts(result) == ["simulated", "approval: no twos", "simulated"]


async def test_a_call_that_inspect_refuses_reaches_no_executor() -> None:
    spy = Spy()
    script: Script = [
        say("", call("nonesuch")),
        say("", call("add", x="one", y=2)),
        say("", unparsed_call("add", "{", "not JSON")),
        "done",
    ]
    result = await run(looping(add()), script, spy)
    assert spy.calls == []
    assert len(tool_texts(result)) == 3


async def test_errors_of_the_tool_pass_through() -> None:
    result = await run(looping(fail()), [say("", call("fail", text="oh no")), "done"], Spy())
    assert tool_texts(result) == ["unknown: oh no"]


@pytest.mark.parametrize(
    ("error", "told"),
    [
        (ToolError("busy"), "unknown: busy"),
        (TimeoutError(), "timeout: Command timed out before completing."),
    ],
    ids=["ToolError", "TimeoutError"],
)
async def test_errors_of_an_executor_are_reported_like_the_tools(
    error: Exception, told: str
) -> None:
    async def raises(invocation: ToolInvocation) -> ToolResult:
        raise error

    result = await run(looping(add()), [ADD, "done"], raises)
    assert tool_texts(result) == [told]


async def test_another_error_of_an_executor_ends_the_episode() -> None:
    async def raises(invocation: ToolInvocation) -> ToolResult:
        raise OSError("the executor's machine is gone")

    with pytest.raises(OSError, match="machine is gone"):
        await run(looping(add()), [ADD, "done"], raises)


async def test_an_eval_in_the_same_process_is_not_touched(tmp_path: Path) -> None:
    spy = Spy()
    await run(looping(add()), [ADD, "done"], spy)
    [log] = await eval_async(
        looping(add()), model=scripted_model([ADD, "done"]), log_dir=str(tmp_path)
    )
    assert log.status == "success"
    assert len(spy.calls) == 1
    assert ran == [("add", 1, 2)]


async def test_episodes_and_evals_at_once_keep_to_their_own_executors(tmp_path: Path) -> None:
    parked = [asyncio.Event(), asyncio.Event()]
    release = asyncio.Event()

    def answering(text: str, entered: asyncio.Event) -> ToolFunction:
        async def answer(invocation: ToolInvocation) -> ToolResult:
            entered.set()
            await release.wait()
            return text

        return answer

    episodes = [
        asyncio.create_task(run(looping(add()), [ADD, "done"], answering(text, entered)))
        for text, entered in zip(("one", "two"), parked, strict=True)
    ]
    for entered in parked:
        await entered.wait()
    [log] = await eval_async(
        looping(add()), model=scripted_model([ADD, "done"]), log_dir=str(tmp_path)
    )
    assert log.status == "success"
    assert ran == [("add", 1, 2)]
    release.set()
    assert [tool_texts(await episode) for episode in episodes] == [["one"], ["two"]]
