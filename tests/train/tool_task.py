"""A react agent that is paid for using its tool."""

from __future__ import annotations

from inspect_ai import Task, task
from inspect_ai.agent import Agent, AgentState, agent, react
from inspect_ai.dataset import MemoryDataset, Sample
from inspect_ai.model import ChatMessageAssistant, ChatMessageTool
from inspect_ai.scorer import Score, Scorer, Target, mean, scorer
from inspect_ai.solver import TaskState
from inspect_ai.tool import Tool, tool


@task
def ask_tool(samples: int = 64, turns: int = 2) -> Task:
    """Call the tool in each turn: 1 for an answered call, a half for a malformed one."""
    return Task(
        dataset=MemoryDataset(
            [Sample(id=i, input=f"{i}. Ask the tool.") for i in range(1, samples + 1)]
        ),
        solver=asking(turns),
        scorer=worth_of_calls(),
        message_limit=4 * turns + 4,
    )


@agent
def asking(turns: int) -> Agent:
    async def more(state: AgentState) -> bool | str:
        replies = [each for each in state.messages if isinstance(each, ChatMessageAssistant)]
        if len(replies) >= turns:
            return False
        return True if state.output.message.tool_calls else "Ask the tool."

    return react(prompt=None, tools=[hint()], submit=False, on_continue=more)


@tool
def hint() -> Tool:
    async def execute() -> str:
        """Give a hint."""
        return "none"

    return execute


@scorer(metrics=[mean()])
def worth_of_calls() -> Scorer:
    async def score(state: TaskState, target: Target) -> Score:
        replies = [each for each in state.messages if isinstance(each, ChatMessageAssistant)]
        calls = sum(bool(each.tool_calls) for each in replies)
        answers = [
            each
            for each in state.messages
            if isinstance(each, ChatMessageTool) and each.error is None
        ]
        return Score(value=(calls + len(answers)) / (2 * max(1, len(replies))))

    return score
