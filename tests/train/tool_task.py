"""A react agent that is paid for really using its tool, and for ending with an answer."""

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
    """Call the tool in each turn; paid by the share of replies that the tool answered."""
    return Task(
        dataset=MemoryDataset(
            [Sample(id=i, input=f"{i}. Ask the tool.") for i in range(1, samples + 1)]
        ),
        solver=asking(turns),
        scorer=share_of_answered_calls(),
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
def share_of_answered_calls() -> Scorer:
    async def score(state: TaskState, target: Target) -> Score:
        replies = [each for each in state.messages if isinstance(each, ChatMessageAssistant)]
        answers = [
            each
            for each in state.messages
            if isinstance(each, ChatMessageTool) and each.error is None
        ]
        return Score(value=len(answers) / max(1, len(replies)))

    return score
