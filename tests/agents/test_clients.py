"""Small programs with the client libraries of model APIs, and what such clients do to a call."""

from __future__ import annotations

import asyncio
import socket
import sys
import textwrap
from typing import Any

import pytest
from inspect_ai import Task
from inspect_ai.agent import Agent, AgentState, agent, as_solver, sandbox_agent_bridge
from inspect_ai.dataset import Sample
from inspect_ai.model import ChatMessageAssistant, ModelOutput
from inspect_ai.scorer import Score, Target, accuracy
from inspect_ai.solver import TaskState
from inspect_ai.util import sandbox
from tests.agents.rolled import rolled
from tests.functions import make_scorer
from tests.packages import require_agent_clients
from tests.tokens.conversations import assert_trained

from inspect_tinker_plugin.contracts.episodes import TurnRequest
from inspect_tinker_plugin.testing import say

require_agent_clients()
pytestmark = [pytest.mark.agents, pytest.mark.long, pytest.mark.timeout(900)]

BEGIN = """
import anthropic, openai

openai_client = openai.OpenAI(max_retries=10)
anthropic_client = anthropic.Anthropic(max_retries=10)

def chat(messages, client=openai_client, **options):
    reply = client.chat.completions.create(model="inspect", messages=messages, **options)
    return reply.choices[0].message.content or ""

def talk(first, turns, ask=chat):
    messages = [{"role": "user", "content": first}]
    for turn in range(turns):
        messages.append({"role": "assistant", "content": ask(messages)})
        messages.append({"role": "user", "content": f"And {turn}?"})
    with open("said.txt", "a") as file:
        print(*[each["content"] for each in messages[1::2]], sep="|", file=file)
"""


@agent
def program(source: str) -> Agent:
    """Run a program of Python in the sandbox, with the bridge as its API."""

    async def execute(state: AgentState) -> AgentState:
        with socket.socket() as probe:
            probe.bind(("127.0.0.1", 0))
            port = int(probe.getsockname()[1])
        async with sandbox_agent_bridge(state, port=port) as bridge:
            done = await sandbox().exec(
                [sys.executable, "-c", BEGIN + textwrap.dedent(source)],
                env={
                    "OPENAI_BASE_URL": f"http://localhost:{port}/v1",
                    "ANTHROPIC_BASE_URL": f"http://localhost:{port}",
                    "OPENAI_API_KEY": "none",
                    "ANTHROPIC_API_KEY": "none",
                },
                timeout=200,
            )
        if not done.success:
            raise RuntimeError(f"ended with {done.returncode}: {done.stderr[-1000:]}")
        return bridge.state

    return execute


@make_scorer(accuracy())
async def heard(state: TaskState, target: Target) -> Score:
    """What the program heard, as the answer; always correct."""
    return Score(value=1.0, answer=await sandbox().read_file("said.txt"))


def task(source: str) -> Task:
    return Task(
        dataset=[Sample(input="x", id=1)],
        solver=as_solver(program(source)),
        scorer=heard(),
        sandbox="local",
    )


def turn_of(request: TurnRequest) -> int:
    return sum(isinstance(message, ChatMessageAssistant) for message in request.messages)


def numbered(request: TurnRequest) -> ModelOutput:
    return say(f" Reply {turn_of(request)}. \n")


STREAMS = {
    "chat": """
        def ask(messages):
            stream = openai_client.chat.completions.create(
                model="inspect", messages=messages, stream=True)
            deltas = [chunk.choices[0].delta for chunk in stream if chunk.choices]
            return "".join(delta.content or "" for delta in deltas)
    """,
    "responses": """
        def ask(messages):
            stream = openai_client.responses.create(model="inspect", input=messages, stream=True)
            return "".join(e.delta for e in stream if e.type == "response.output_text.delta")
    """,
    "anthropic": """
        def ask(messages):
            with anthropic_client.messages.stream(
                    model="inspect", messages=messages, max_tokens=100) as stream:
                return "".join(stream.text_stream)
    """,
}


@pytest.mark.parametrize("dialect", STREAMS)
async def test_a_stream_is_a_call_like_any_other(
    dialect: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    source = textwrap.dedent(STREAMS[dialect]) + 'talk("Do it.", 3, ask)'
    ours = await rolled(task(source), numbered, monkeypatch)
    assert len(ours.data) == 1
    assert_trained(ours.sampled, ours.data)


async def test_a_call_that_timed_out_and_is_made_again(monkeypatch: pytest.MonkeyPatch) -> None:
    source = """
        client = openai.OpenAI(timeout=1.0, max_retries=10)
        talk("Do it.", 3, lambda messages: chat(messages, client))
    """
    slow = iter([6.0])

    async def late(request: TurnRequest) -> ModelOutput:
        await asyncio.sleep(next(slow, 0.0))
        return numbered(request)

    script: Any = late
    ours = await rolled(task(source), script, monkeypatch)
    assert_trained(ours.sampled, ours.data)
    assert len(ours.data) == len(ours.sampled) - 2
