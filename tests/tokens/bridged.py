"""Programs that speak a model API, run as solvers through Inspect's own agent bridge.

A program keeps its conversation in the words of its API, sends all of it with every call and
appends what comes back, as command-line agents do. The client libraries and the bridge are
the real ones.
"""

from __future__ import annotations

import copy
from abc import ABC, abstractmethod
from collections.abc import Awaitable, Callable
from contextlib import nullcontext
from dataclasses import dataclass, field
from typing import Any, NamedTuple, cast

from inspect_ai.agent import agent_bridge
from inspect_ai.model import CompactionStrategy
from inspect_ai.solver import Generate, TaskState
from tests.functions import make_solver
from tests.packages import require_agent_clients

from inspect_tinker_plugin.inspect_internals import in_dialect

require_agent_clients()

PARAMETERS = {
    "type": "object",
    "properties": {"cmd": {"type": "string", "description": "The command."}},
    "required": ["cmd"],
}
DESCRIPTION = "Run a command."
NOWHERE = {"api_key": "none", "base_url": "http://nowhere.invalid"}
Item = dict[str, Any]


class Call(NamedTuple):
    """A tool call of a reply."""

    id: str
    name: str
    arguments: Any


def unchanged(item: Item) -> Item:
    return item


@dataclass
class Program(ABC):
    """A program's conversation in one API; items are what it sends."""

    items: list[Item] = field(default_factory=list)
    keeps: Callable[[Item], Item] = unchanged
    """What the program makes of an item of a reply before it stores it."""

    with_tools: bool = True
    in_sandbox: bool = True
    """Whether its dialect is known, as that of a program in a sandbox is."""

    async def call(self) -> list[Call]:
        """Ask the model, store its reply, and return its tool calls."""
        dialect = next(name for name, kind in DIALECTS.items() if isinstance(self, kind))
        with in_dialect(dialect) if self.in_sandbox else nullcontext():
            reply = await self.ask(copy.deepcopy(self.items))
        stored, calls = self.read(reply)
        self.items += [self.keeps(item) for item in stored]
        return calls

    def user(self, text: str) -> None:
        """Append a message of the user."""
        self.items.append({"role": "user", "content": text})

    @abstractmethod
    async def ask(self, items: list[Item]) -> Any:
        """Ask with the client library."""

    @abstractmethod
    def read(self, reply: Any) -> tuple[list[Item], list[Call]]:
        """Return what to store of a reply, and its calls."""

    @abstractmethod
    def result(self, call_id: str, text: str) -> None:
        """Append the result of a tool call."""


class Chat(Program):
    """OpenAI's Chat Completions."""

    async def ask(self, items: list[Item]) -> Any:
        from openai import AsyncOpenAI

        function = {"name": "bash", "description": DESCRIPTION, "parameters": PARAMETERS}
        tools = {"tools": [{"type": "function", "function": function}]} if self.with_tools else {}
        async with AsyncOpenAI(**cast(Any, NOWHERE)) as client:
            create = cast(Any, client.chat.completions.create)
            reply = await create(model="inspect", messages=items, **tools)
        return reply.model_dump(mode="json", exclude_none=True)

    def read(self, reply: Any) -> tuple[list[Item], list[Call]]:
        message = {k: v for k, v in reply["choices"][0]["message"].items() if v is not None}
        calls = [
            Call(call["id"], call["function"]["name"], call["function"]["arguments"])
            for call in message.get("tool_calls", [])
        ]
        return [message], calls

    def result(self, call_id: str, text: str) -> None:
        self.items.append({"role": "tool", "tool_call_id": call_id, "content": text})


class Responses(Program):
    """OpenAI's Responses."""

    async def ask(self, items: list[Item]) -> Any:
        from openai import AsyncOpenAI

        tool = {"type": "function", "name": "bash", "description": DESCRIPTION, "strict": False}
        tools = {"tools": [{**tool, "parameters": PARAMETERS}]} if self.with_tools else {}
        async with AsyncOpenAI(**cast(Any, NOWHERE)) as client:
            create = cast(Any, client.responses.create)
            reply = await create(model="inspect", input=items, **tools)
        return reply.model_dump(mode="json", exclude_none=True)

    def read(self, reply: Any) -> tuple[list[Item], list[Call]]:
        items = [{k: v for k, v in item.items() if v is not None} for item in reply["output"]]
        calls = [
            Call(item["call_id"], item["name"], item["arguments"])
            for item in items
            if item["type"] == "function_call"
        ]
        return items, calls

    def result(self, call_id: str, text: str) -> None:
        item = {"type": "function_call_output", "call_id": call_id, "output": text}
        self.items.append(item)


class Anthropic(Program):
    """Anthropic's Messages."""

    async def ask(self, items: list[Item]) -> Any:
        from anthropic import AsyncAnthropic

        tool = {"name": "bash", "description": DESCRIPTION, "input_schema": PARAMETERS}
        tools = {"tools": [tool]} if self.with_tools else {}
        async with AsyncAnthropic(**cast(Any, NOWHERE)) as client:
            create = cast(Any, client.messages.create)
            reply = await create(model="inspect", messages=items, max_tokens=1000, **tools)
        return {"content": [block.model_dump(mode="json") for block in reply.content]}

    def read(self, reply: Any) -> tuple[list[Item], list[Call]]:
        blocks = [{k: v for k, v in block.items() if v is not None} for block in reply["content"]]
        calls = [Call(b["id"], b["name"], b["input"]) for b in blocks if b["type"] == "tool_use"]
        return [{"role": "assistant", "content": blocks}], calls

    def result(self, call_id: str, text: str) -> None:
        block = {"type": "tool_result", "tool_use_id": call_id, "content": text}
        last = self.items[-1]
        if last["role"] == "user" and isinstance(last["content"], list):
            last["content"].append(block)
        else:
            self.items.append({"role": "user", "content": [block]})


DIALECTS: dict[str, type[Program]] = {
    "chat": Chat,
    "responses": Responses,
    "anthropic": Anthropic,
}


@make_solver
async def bridged(
    state: TaskState,
    generate: Generate,
    run: Callable[[], Awaitable[None]],
    compaction: CompactionStrategy | None = None,
) -> TaskState:
    """Run a program under Inspect's agent bridge."""
    async with agent_bridge(compaction=compaction) as bridge:
        await run()
        state.output = bridge.state.output
    return state


async def converse(program: Program, turns: int) -> None:
    """Ask as often as given; answer calls with a result each, and text with a question."""
    for turn in range(turns):
        calls = await program.call()
        for number, call in enumerate(calls):
            program.result(call.id, f"Result {number} of turn {turn}.")
        if not calls:
            program.user(f"And {turn}?")
