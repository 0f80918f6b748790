"""Arguments that Inspect cannot convert for a tool: the policy's have a price, others raise."""

from __future__ import annotations

from datetime import date
from typing import Any

import pytest
from inspect_ai import Task
from inspect_ai.agent import Agent, AgentState, agent, handoff
from inspect_ai.dataset import Sample
from inspect_ai.model import ChatMessageAssistant, execute_tools
from inspect_ai.scorer import includes
from inspect_ai.solver import Generate, TaskState, generate, use_tools
from inspect_ai.tool import Tool, ToolCall, ToolDef
from pydantic import BaseModel, Field
from tests.functions import make_solver
from tests.rl.policies import roll_out_task, tool_call

from inspect_tinker_plugin import Cause
from inspect_tinker_plugin.testing import call, play_episode, say


class Item(BaseModel):
    """A thing to buy."""

    count: int = Field(gt=0)


def shop(broken: bool = False) -> Tool:
    async def remind(due: date | None = None, item: Item | None = None) -> str:
        """Remind somebody.

        Args:
            due: The day.
            item: What to buy.
        """
        if broken:
            raise ValueError("the shop is closed")
        return "noted"

    return ToolDef(remind, name="remind").as_tool()


@agent
def clerk() -> Agent:
    async def execute(state: AgentState, due: date) -> AgentState:
        """A clerk.

        Args:
            state: The conversation.
            due: The day.
        """
        return state

    return execute


def task(tool: Any) -> Task:
    solver = [use_tools(tool), generate()]
    return Task(dataset=[Sample(id=1, input="Go.", target="x")], solver=solver, scorer=includes())


@pytest.mark.parametrize(
    ("tool", "said"),
    [
        (shop(), call("remind", due="soon")),
        (shop(), call("remind", item={"count": 0})),
        (handoff(clerk(), description="a clerk"), call("transfer_to_clerk", due="soon")),
    ],
    ids=["a date", "a model", "a handoff"],
)
async def test_arguments_of_the_policy_have_a_price(tool: Any, said: ToolCall) -> None:
    result = await play_episode(task(tool), [say("", said), say("x")])
    assert result.error is not None
    assert result.error.cause is Cause.ARGUMENTS
    assert f"in arguments of the tool '{said.function}'" in str(result.error)


async def test_the_price_is_a_wrong_answer_in_the_same_words() -> None:
    said = tool_call("remind", '{"due": "soon"}')
    group = await roll_out_task(task(shop()), [said], reward='format(mean(), pattern="ANSWER")')
    assert group.get_total_rewards() == [-1.0]
    assert group.trajectories_G[0].transitions[-1].metrics["error/arguments"] == 1.0


async def test_a_failure_of_the_tool_itself_raises() -> None:
    script = [say("", call("remind", due="2026-01-31")), say("x")]
    result = await play_episode(task(shop(broken=True)), script)
    assert result.error is not None
    assert result.error.cause is Cause.TOOL


async def test_so_do_arguments_of_another_model() -> None:
    @make_solver
    async def ask_clerk(state: TaskState, generate: Generate) -> TaskState:
        said = ChatMessageAssistant(content="", tool_calls=[call("remind", due="soon")])
        await execute_tools([said], [shop()])
        return await generate(state)

    dataset = [Sample(id=1, input="Go.", target="x")]
    asked = Task(dataset=dataset, solver=[generate(), ask_clerk()], scorer=includes())
    result = await play_episode(asked, [say("x"), say("x")])
    assert result.error is not None
    assert result.error.cause is Cause.TOOL
