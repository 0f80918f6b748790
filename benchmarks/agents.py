"""Datums and trained tokens of agents that run several conversations at once.

A fan of N sub-agents with T turns each, their turns interleaved, beside what the cookbook makes
of the same trajectory in time order, and beside the unique branches, the least there can be.
The bar: as many datums as branches, and at most 1.05 times their tokens.
Run ``python benchmarks/agents.py``.
"""

from __future__ import annotations

import sys

import tinker
from inspect_ai.model import ChatMessage, ChatMessageTool, ChatMessageUser, GenerateConfig
from inspect_ai.tool import ToolInfo, ToolParam, ToolParams
from tinker_cookbook.completers import TokensWithLogprobs
from tinker_cookbook.renderers import get_renderer
from tinker_cookbook.rl.data_processing import trajectory_to_data
from tinker_cookbook.rl.types import Trajectory, Transition
from tinker_cookbook.tokenizer_utils import get_tokenizer

from inspect_tinker_plugin.contracts.episodes import TurnRequest
from inspect_tinker_plugin.rl.group import in_branch_order
from inspect_tinker_plugin.testing import tokenizer_path
from inspect_tinker_plugin.tokens.episode import DatasetRenderer, EpisodeTokens

FANS = [(1, 8), (2, 8), (8, 8), (16, 4)]
LIMIT = 1.05
BASH = ToolInfo(
    name="bash",
    description="Run a command.",
    parameters=ToolParams(properties={"cmd": ToolParam(type="string")}, required=["cmd"]),
)


def play(
    context: DatasetRenderer, agents: int, turns: int
) -> tuple[EpisodeTokens, list[Transition]]:
    """Play agents that take turns at the policy."""
    episode = EpisodeTokens(context, task="fan", sample_id=1)
    transitions: list[Transition] = []
    talks: list[list[ChatMessage]] = [
        [ChatMessageUser(content=f"You are agent {number}. Look around.")]
        for number in range(agents)
    ]
    (stop,) = context.stops
    for turn in range(turns):
        for talk in talks:
            request = TurnRequest(
                index=len(transitions),
                messages=[message.model_copy() for message in talk],
                tools=[BASH],
                tool_choice="auto",
                config=GenerateConfig(),
            )
            prompt = episode.prompt(request)
            text = (
                f'<tool_call>\n{{"name":"bash","arguments":{{"cmd":"cat {turn}"}}}}\n</tool_call>'
            )
            sampled = [*context.tokenizer.encode(text, add_special_tokens=False), int(stop)]
            action = TokensWithLogprobs(tokens=sampled, maybe_logprobs=[0.0] * len(sampled))
            transitions.append(Transition(prompt, action, 0.0, False))
            message = episode.parse(sampled, stop_reason="stop", request=request).message
            (call,) = message.tool_calls or []
            result = "a line of output " * 8
            talk += [
                message,
                ChatMessageTool(content=result, tool_call_id=call.id, function="bash"),
            ]
    return episode, transitions


def size(transitions: list[Transition]) -> tuple[int, int]:
    """Return datums, and the tokens in them."""
    trajectory = Trajectory(transitions=transitions, final_ob=tinker.ModelInput.empty())
    data = trajectory_to_data(trajectory, 1.0)
    return len(data), sum(datum.model_input.length + 1 for datum in data)


def main() -> int:
    context = DatasetRenderer(get_renderer("qwen3_instruct", get_tokenizer(str(tokenizer_path()))))
    print(f"{'fan':8}{'datums':>8}{'tokens':>9}{'branches':>10}{'ratio':>7}", end="")
    print(f"{'in time: datums':>18}{'tokens':>9}")
    missed = False
    for agents, turns in FANS:
        episode, transitions = play(context, agents, turns)
        ends = transitions[-agents:]
        unique = sum(turn.ob.length + len(turn.ac.tokens) for turn in ends)
        datums, tokens = size(in_branch_order(transitions, episode.turns))
        before = size(transitions)
        print(f"{agents}x{turns:<6}{datums:8}{tokens:9,}{unique:10,}{tokens / unique:7.2f}", end="")
        print(f"{before[0]:18}{before[1]:9,}")
        missed = missed or datums != agents or tokens > LIMIT * unique
    return int(missed)


if __name__ == "__main__":
    sys.exit(main())
