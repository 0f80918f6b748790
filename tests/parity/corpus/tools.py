"""Tools: schemas, loops, parallel calls, and everything that can go wrong with a call."""

from __future__ import annotations

import sys
from collections.abc import Callable
from pathlib import Path
from typing import Literal

import anyio
import anyio.lowlevel
from inspect_ai import Task
from inspect_ai.agent import react
from inspect_ai.dataset import Sample
from inspect_ai.scorer import includes
from inspect_ai.solver import Generate, TaskState, generate, use_tools
from inspect_ai.tool import (
    Tool,
    ToolCall,
    ToolDef,
    ToolError,
    ToolFunction,
    ToolSource,
    mcp_server_stdio,
    mcp_tools,
    memory,
    think,
    tool,
    tool_with,
    update_plan,
)
from inspect_ai.util import store
from pydantic import BaseModel
from tests.functions import make_solver, make_tool
from tests.parity.cases import Expect, case

from inspect_tinker_plugin.testing.replies import call, say, submit, unparsed_call

MCP_SERVER = Path(__file__).resolve().parents[1] / "mcp_server.py"
# Inspect converts these arguments itself, and it is what the renderer cannot know about.


def ask() -> list[Sample]:
    return [Sample(input="Add 2 and 3.", target="5")]


def using(*tools: Tool | ToolSource) -> Task:
    return Task(dataset=ask(), solver=[use_tools(*tools), generate()], scorer=includes())


@make_tool
async def add(x: int, y: int) -> int:
    """Add two numbers.

    Args:
        x: First number.
        y: Second number.
    """
    return x + y


class Item(BaseModel):
    name: str
    price: float | None = None


@make_tool
async def shop(
    items: list[Item],
    currency: Literal["eur", "nok"] = "eur",
    discount: dict[str, float] | None = None,
) -> str:
    """Buy things.

    Args:
        items: What to buy.
        currency: Which money.
        discount: Discount by name.
    """
    names = ", ".join(f"{item.name}={item.price}" for item in items)
    return f"{names} in {currency} with {discount}"


@tool
def broken(kind: str = "tool") -> Tool:
    async def execute(text: str) -> str:
        """Fail.

        Args:
            text: Why.
        """
        match kind:
            case "tool":
                raise ToolError(f"cannot do {text}")
            case "timeout":
                raise TimeoutError(f"slow {text}")
            case "file":
                raise FileNotFoundError(2, "No such file", text)
            case "permission":
                raise PermissionError(13, "Denied", text)
            case "unicode":
                return b"\xff\xfe".decode("utf-8")
            case _:
                raise RuntimeError(f"bug in {text}")

    return execute


@tool
def slow(order: list[str]) -> Tool:
    async def execute(name: str, wait: float) -> str:
        """Wait.

        Args:
            name: Who waits.
            wait: Seconds.
        """
        await anyio.sleep(wait)
        order.append(name)
        store().set(f"waited {name}", wait)
        return f"{name} waited"

    return execute


@case(
    script=[say("Let me add.", call("add", x=2, y=3)), "The sum is 5."],
    expect=Expect(turns=2, scores={"includes": "C"}, tools=["add"]),
)
def use_tools_and_generate_loop() -> Task:
    return using(add())


@case(
    script=[
        say("", call("shop", items=[{"name": "tea", "price": 2.5}, {"name": "milk"}])),
        say("", call("shop", items=[], currency="nok", discount={"all": 0.5})),
        "5",
    ],
    expect=Expect(
        turns=3,
        scores={"includes": "C"},
        tools=["shop"],
        says=["tea=2.5, milk=None in eur with None", "in nok with {'all': 0.5}"],
    ),
)
def tool_with_structured_parameters() -> Task:
    return using(shop())


@case(
    script=[say("", call("plus", first=2, y=3)), "5"],
    expect=Expect(turns=2, scores={"includes": "C"}, tools=["plus", "sum_up"]),
)
def renamed_tools_and_tool_definitions() -> Task:
    async def total(numbers: list[float]) -> float:
        """Sum a list."""
        return sum(numbers)

    async def plus(first: int, y: int = 0) -> int:
        """Plus."""
        return first + y

    described = {"numbers": "The numbers."}
    summing = ToolDef(total, name="sum_up", description="Sum it all up.", parameters=described)
    adding = ToolDef(plus, name="plus", parameters={"first": "The first.", "y": "The second."})
    return using(summing.as_tool(), adding.as_tool())


@case(
    script=[say("", call("add", x=1, y=1)), "5"],
    expect=Expect(turns=2, scores={"includes": "C"}, says=["Adds, carefully."]),
)
def tool_with_another_description() -> Task:
    described = tool_with(add(), description="Adds, carefully.", parameters={"x": "one"})
    return using(described)


@case(
    script=[
        say(
            "Both.",
            call("slow", name="late", wait=0.05),
            call("slow", name="early", wait=0.0),
            call("add", x=2, y=3),
        ),
        "5",
    ],
    expect=Expect(
        turns=2,
        scores={"includes": "C"},
        says=["late waited", "early waited"],
        store={"waited late": 0.05, "waited early": 0.0},
    ),
)
def parallel_tool_calls() -> Task:
    return using(slow([]), add())


@tool(parallel=False)
def one_at_a_time() -> Tool:
    async def execute(text: str) -> str:
        """Append.

        Args:
            text: What.
        """
        log: list[str] = [*store().get("log", []), text]
        await anyio.lowlevel.checkpoint()
        store().set("log", log)
        return str(len(log))

    return execute


@case(
    script=[say("", *[call("one_at_a_time", text=text) for text in "abc"]), "5"],
    expect=Expect(turns=2, scores={"includes": "C"}, store={"log": ["a", "b", "c"]}),
)
def calls_of_a_serial_tool() -> Task:
    return using(one_at_a_time())


def using_broken(kind: str) -> Callable[[], Task]:
    return lambda: using(broken(kind))


for kind, said in {
    "tool": "cannot do x.txt",
    "timeout": "timeout",
    "file": "file_not_found",
    "permission": "permission",
    "unicode": "unicode_decode",
}.items():
    case(
        id=f"tool-that-raises-a-{kind}-error",
        script=[say("", call("broken", text="x.txt")), "5"],
        expect=Expect(turns=2, scores={"includes": "C"}, says=[said]),
    )(using_broken(kind))


@case(
    script=[say("", call("broken", text="this"))],
    expect=Expect(turns=1, error="RuntimeError"),
)
def tool_with_a_bug() -> Task:
    return using(broken("bug"))


@case(
    script=[say("", call("add", x="two", y=3)), say("", call("add", z=1)), "5"],
    expect=Expect(turns=3, scores={"includes": "C"}, says=["parsing", "x"]),
)
def malformed_tool_arguments() -> Task:
    return using(add())


@case(
    script=[
        say("", unparsed_call("add", "{x: 2,", "Error parsing the following tool call arguments")),
        "5",
    ],
    expect=Expect(
        turns=2, scores={"includes": "C"}, says=["Error parsing the following tool call arguments"]
    ),
    tokens="the message of a call that does not parse is the renderer's own",
)
def tool_arguments_that_are_not_json() -> Task:
    return using(add())


@case(
    script=[say("", call("multiply", x=2, y=3)), "5"],
    expect=Expect(turns=2, scores={"includes": "C"}, says=["multiply not found"]),
)
def unknown_tool() -> Task:
    return using(add())


@case(
    script=[say("", call("add", x="2", y=3.0)), "5"],
    expect=Expect(turns=2, scores={"includes": "C"}),
)
def tool_arguments_of_nearly_the_right_type() -> Task:
    return using(add())


@make_tool
async def lengthy() -> str:
    """Say very much."""
    return "word " * 10_000


@case(
    script=[say("", call("lengthy")), "5"],
    expect=Expect(turns=2, scores={"includes": "C"}, says=["truncated"]),
)
def tool_output_that_is_cut() -> Task:
    return using(lengthy())


@case(
    script=[say("", call("add", x=2, y=3))],
    expect=Expect(turns=1, scores={"includes": "I"}),
)
def forced_tool_choice_single_call() -> Task:
    return Task(
        dataset=ask(),
        solver=[
            use_tools(add(), tool_choice=ToolFunction(name="add")),
            generate(tool_calls="single"),
        ],
        scorer=includes(),
    )


@case(
    script=[say("I would add.", call("add", x=2, y=3))],
    expect=Expect(turns=1, scores={"includes": "I"}),
)
def tool_calls_that_are_not_run() -> Task:
    return Task(
        dataset=ask(), solver=[use_tools(add()), generate(tool_calls="none")], scorer=includes()
    )


@make_solver
async def changes_tools(state: TaskState, generate: Generate) -> TaskState:
    """Offers a tool, then another one."""
    state.tools = [add()]
    state = await generate(state)
    state.tools = [shop()]
    return await generate(state)


@case(
    script=[say("", call("add", x=2, y=3)), "It is 5.", say("", call("shop", items=[])), "5"],
    expect=Expect(
        turns=4,
        scores={"includes": "C"},
        tools=["add"],
        holds=lambda trace: [t["name"] for t in trace.requests[3]["tools"]] == ["shop"],
    ),
)
def tools_that_change_between_calls() -> Task:
    return Task(dataset=ask(), solver=changes_tools(), scorer=includes())


@case(
    script=[
        say("", call("think", thought="Two and three make five.")),
        say("", call("update_plan", plan=[{"step": "add", "status": "completed"}])),
        "5",
    ],
    expect=Expect(turns=3, scores={"includes": "C"}, tools=["think", "update_plan"]),
)
def think_and_plan_tools() -> Task:
    return using(think(), update_plan())


@case(
    script=[
        say("", call("shout", text="five", times=2)),
        say("", call("fail", reason="not today")),
        "FIVE is 5",
    ],
    expect=Expect(
        turns=3,
        scores={"includes": "C"},
        tools=["shout", "fail"],
        says=["FIVE FIVE", "not today"],
    ),
)
def mcp_stdio_server() -> Task:
    server = mcp_server_stdio(name="corpus", command=sys.executable, args=[str(MCP_SERVER)])
    return using(mcp_tools(server))


@case(
    script=[
        say("", call("shout", text="five")),
        say("", call("fail", reason="death")),
        say("", call("shout", text="more"), call("add", x=2, y=3)),
        submit("5"),
    ],
    expect=Expect(turns=4, scores={"includes": "C"}, says=["FIVE", "Connection closed"]),
)
def mcp_server_that_dies() -> Task:
    server = mcp_server_stdio(name="corpus", command=sys.executable, args=[str(MCP_SERVER)])
    return Task(dataset=ask(), solver=react(tools=[mcp_tools(server), add()]), scorer=includes())


@case(
    script=[
        say("", call("memory", command="view", path="/memories")),
        say("", call("memory", command="create", path="/memories/sum", file_text="five")),
        say("", call("memory", command="view", path="/memories/sum")),
        say("", call("memory", command="view", path="/etc/passwd")),
        "5",
    ],
    expect=Expect(turns=5, scores={"includes": "C"}, says=["/memories/hint", "five"]),
)
def memory_of_the_episode() -> Task:
    tool = memory(initial_data={"/memories/hint": "add them"})
    return using(tool)


@case(
    script=[say("", ToolCall(id="mine", function="add", arguments={"x": 2, "y": 3})), "5"],
    expect=Expect(turns=2, scores={"includes": "C"}),
)
def tool_call_id_of_the_model() -> Task:
    return using(add())
