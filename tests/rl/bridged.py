"""Programs that speak a model API, run as solvers through Inspect's own agent bridge.

A program keeps its conversation in the words of its API, sends all of it with every call and
appends what comes back, as command-line agents do. The client libraries and the bridge are
the real ones.
"""

from __future__ import annotations

import copy
import json
from abc import ABC, abstractmethod
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass, field
from typing import Any, cast

from inspect_ai.agent import agent_bridge
from inspect_ai.solver import Generate, Solver, TaskState, solver

PARAMETERS = {
    "type": "object",
    "properties": {"cmd": {"type": "string", "description": "The command."}},
    "required": ["cmd"],
}
Item = dict[str, Any]


def unchanged(item: Item) -> Item:
    return item


@dataclass
class Program(ABC):
    """A program's conversation in one API; items are what it sends."""

    items: list[Item] = field(default_factory=list)
    tools: bool = True
    as_it_keeps: Callable[[Item], Item] = unchanged
    """What the program does to the items of a reply before it stores them."""

    def user(self, text: str) -> None:
        """Append a message of the user."""
        self.items.append({"role": "user", "content": text})

    @abstractmethod
    async def call(self) -> list[tuple[str, str, Any]]:
        """Ask the model, store its reply, and return its calls: id, name, arguments."""

    @abstractmethod
    def result(self, call_id: str, text: str) -> None:
        """Append the result of a tool call."""

    def copy(self) -> Program:
        """Return a program with the same history."""
        return type(self)(copy.deepcopy(self.items), self.tools, self.as_it_keeps)


class Chat(Program):
    """OpenAI's Chat Completions."""

    async def call(self) -> list[tuple[str, str, Any]]:
        from openai import AsyncOpenAI

        function = {"name": "bash", "description": "Run a command.", "parameters": PARAMETERS}
        tools: Any = [{"type": "function", "function": function}]
        async with AsyncOpenAI(api_key="none", base_url="http://nowhere.invalid") as client:
            reply = await client.chat.completions.create(
                model="inspect",
                messages=cast(Any, copy.deepcopy(self.items)),
                **({"tools": tools} if self.tools else {}),
            )
        message = reply.choices[0].message
        self.items.append(self.as_it_keeps(message.model_dump(mode="json", exclude_none=True)))
        return [
            (call.id, call.function.name, call.function.arguments)
            for call in message.tool_calls or []
            if call.type == "function"
        ]

    def result(self, call_id: str, text: str) -> None:
        self.items.append({"role": "tool", "tool_call_id": call_id, "content": text})


class Responses(Program):
    """OpenAI's Responses."""

    async def call(self) -> list[tuple[str, str, Any]]:
        from openai import AsyncOpenAI

        tools: Any = [
            {
                "type": "function",
                "name": "bash",
                "description": "Run a command.",
                "parameters": PARAMETERS,
                "strict": False,
            }
        ]
        async with AsyncOpenAI(api_key="none", base_url="http://nowhere.invalid") as client:
            reply = await client.responses.create(
                model="inspect",
                input=cast(Any, copy.deepcopy(self.items)),
                **({"tools": tools} if self.tools else {}),
            )
        calls = []
        for output in reply.output:
            item = output.model_dump(mode="json", exclude_none=True)
            self.items.append(self.as_it_keeps(item))
            if item["type"] == "function_call":
                calls.append((item["call_id"], item["name"], item["arguments"]))
        return calls

    def result(self, call_id: str, text: str) -> None:
        item = {"type": "function_call_output", "call_id": call_id, "output": text}
        self.items.append(item)


class Anthropic(Program):
    """Anthropic's Messages."""

    async def call(self) -> list[tuple[str, str, Any]]:
        from anthropic import AsyncAnthropic

        tools: Any = [{"name": "bash", "description": "Run a command.", "input_schema": PARAMETERS}]
        async with AsyncAnthropic(api_key="none", base_url="http://nowhere.invalid") as client:
            reply = await client.messages.create(
                model="inspect",
                max_tokens=1000,
                messages=cast(Any, copy.deepcopy(self.items)),
                **({"tools": tools} if self.tools else {}),
            )
        blocks = [
            {
                key: value
                for key, value in block.model_dump(mode="json").items()
                if value is not None
            }
            for block in reply.content
        ]
        self.items.append(self.as_it_keeps({"role": "assistant", "content": blocks}))
        return [(b["id"], b["name"], b["input"]) for b in blocks if b["type"] == "tool_use"]

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


@solver
def bridged(run: Callable[[TaskState], Awaitable[None]]) -> Solver:
    """Run a program under Inspect's agent bridge."""

    async def solve(state: TaskState, generate: Generate) -> TaskState:
        async with agent_bridge() as bridge:
            await run(state)
            state.output = bridge.state.output
        return state

    return solve


async def converse(program: Program, turns: int) -> None:
    """Ask as often as given; answer calls with a result each, and text with a question."""
    for turn in range(turns):
        calls = await program.call()
        for number, (call_id, _, arguments) in enumerate(calls):
            program.result(call_id, f"result {turn}.{number} of {json.dumps(arguments)[:20]}")
        if not calls:
            program.user(f"And {turn}?")


def texts(messages: Sequence[Any]) -> list[Any]:
    return [(m.role, m.content, getattr(m, "tool_calls", None)) for m in messages]
