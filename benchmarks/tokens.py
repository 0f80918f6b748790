"""CPU of an early and of a late turn in a long tool episode, ours and the cookbook's side by side.

An agent makes 64 tool calls (compact JSON, as policies write them) and gets results of some
500 tokens. Both sides parse the same sampled tokens and make the next prompt: this package
with ``EpisodeTokens``, the cookbook with its ``EnvFromMessageEnv``. Episodes alternate.
Prints the median CPU of turns 4-12 and 56-64, their ratio (to be at most 1.5 for ours) and
what the trainer makes of the trajectories; then the same ratio for turns 50, 200 and 600. Run
``python benchmarks/tokens.py [alternations]``.
"""

from __future__ import annotations

import asyncio
import json
import random
import statistics
import sys
import time
from collections.abc import Callable, Coroutine
from dataclasses import dataclass, field
from typing import Any

import tinker
from inspect_ai.model import (
    ChatMessage,
    ChatMessageSystem,
    ChatMessageTool,
    ChatMessageUser,
    GenerateConfig,
)
from inspect_ai.tool import ToolInfo, ToolParam, ToolParams
from tinker_cookbook.completers import TokensWithLogprobs
from tinker_cookbook.renderers import Message, Renderer, get_renderer
from tinker_cookbook.rl.data_processing import trajectory_to_data
from tinker_cookbook.rl.message_env import EnvFromMessageEnv, MessageEnv, MessageStepResult
from tinker_cookbook.rl.types import Trajectory, Transition
from tinker_cookbook.tokenizer_utils import get_tokenizer

from inspect_tinker_plugin.contracts.episodes import TurnRequest
from inspect_tinker_plugin.testing import tokenizer_path
from inspect_tinker_plugin.tokens.episode import DatasetRenderer, EpisodeTokens
from inspect_tinker_plugin.tokens.messages import tool_specs

TURNS = 64
EARLY = slice(4, 12)
LATE = slice(56, 64)
LIMIT = 1.5
MARKS = (50, 200, 600)
WIDTH = 8
"""Turns that a mark is the median of."""

SYSTEM, QUESTION = "You are a careful agent.", "Find the bug in main.py."
BASH = ToolInfo(
    name="bash",
    description="Run a command.",
    parameters=ToolParams(properties={"cmd": ToolParam(type="string")}, required=["cmd"]),
)


@dataclass
class Run:
    """One episode: CPU of each turn in milliseconds, and its trajectory."""

    turns_ms: list[float] = field(default_factory=list)
    transitions: list[Transition] = field(default_factory=list)

    def add(self, prompt: tinker.ModelInput, sampled: list[int]) -> None:
        action = TokensWithLogprobs(tokens=sampled, maybe_logprobs=[0.0] * len(sampled))
        self.transitions.append(
            Transition(ob=prompt, ac=action, reward=0.0, episode_done=False, metrics={})
        )

    def median_ms(self, turns: slice) -> float:
        return statistics.median(self.turns_ms[turns])

    def trained(self) -> tuple[int, int]:
        """Return datums, and tokens in them."""
        trajectory = Trajectory(transitions=self.transitions, final_ob=tinker.ModelInput.empty())
        data = trajectory_to_data(trajectory, 1.0)
        return len(data), sum(datum.model_input.length for datum in data)


def sampled_call(renderer: Renderer, turn: int) -> list[int]:
    call = {"name": "bash", "arguments": {"cmd": f"cat file_{turn}.py"}}
    text = f"<tool_call>\n{json.dumps(call, separators=(',', ':'))}\n</tool_call>"
    (stop,) = renderer.get_stop_sequences()
    assert isinstance(stop, int)
    return [*renderer.tokenizer.encode(text, add_special_tokens=False), stop]


def result(turn: int) -> str:
    rng = random.Random(turn)
    return " ".join(rng.choice(("file", "the", "error", "42", "print", "x")) for _ in range(360))


async def ours(renderer: Renderer, context: DatasetRenderer, *, turns: int = TURNS) -> Run:
    run = Run()
    episode = EpisodeTokens(context, task="benchmark", sample_id=1)
    messages: list[ChatMessage] = [
        ChatMessageSystem(content=SYSTEM),
        ChatMessageUser(content=QUESTION),
    ]
    for turn in range(turns):
        sampled = sampled_call(renderer, turn)
        request = TurnRequest(
            index=turn,
            # Inspect hands over copies.
            messages=[message.model_copy() for message in messages],
            tools=[BASH.model_copy()],
            tool_choice="auto",
            config=GenerateConfig(),
        )
        started = time.process_time()
        prompt = episode.prompt(request)
        output = episode.parse(sampled, stop_reason="stop", request=request)
        run.turns_ms.append((time.process_time() - started) * 1000)
        run.add(prompt, sampled)
        (call,) = output.message.tool_calls or []
        messages += [
            output.message,
            ChatMessageTool(content=result(turn), tool_call_id=call.id, function=call.function),
        ]
    return run


class ToolLoop(MessageEnv):
    """The same agent as the cookbook would have it."""

    def __init__(self, renderer: Renderer, *, played: int = 0) -> None:
        prefix = renderer.create_conversation_prefix_with_tools(tool_specs([BASH]), SYSTEM)
        self._messages = [*prefix, Message(role="user", content=QUESTION)]
        self._turn = 0
        for turn in range(played):
            reply, _ = renderer.parse_response(sampled_call(renderer, turn))
            self._messages += [reply, Message(role="tool", content=result(turn), name="bash")]

    async def initial_observation(self) -> list[Message]:
        return self._messages

    async def step(self, message: Message) -> MessageStepResult:
        answer = Message(role="tool", content=result(self._turn), name="bash")
        self._turn += 1
        self._messages += [message, answer]
        return MessageStepResult(reward=0.0, episode_done=False, next_messages=self._messages)


async def cookbook(
    renderer: Renderer, _context: DatasetRenderer, *, played: int = 0, turns: int = TURNS
) -> Run:
    run = Run()
    env = EnvFromMessageEnv(renderer, ToolLoop(renderer, played=played))
    first = await env.initial_observation()
    assert isinstance(first, tuple)
    prompt = first[0]
    for turn in range(played, played + turns):
        sampled = sampled_call(renderer, turn)
        run.add(prompt, sampled)
        started = time.process_time()
        prompt = (await env.step(sampled)).next_observation
        run.turns_ms.append((time.process_time() - started) * 1000)
    return run


Side = Callable[[Renderer, DatasetRenderer], Coroutine[Any, Any, Run]]


async def long_episodes(renderer: Renderer, context: DatasetRenderer) -> None:
    """Print what a turn costs late in a long episode, beside an early one."""
    run = await ours(renderer, context, turns=MARKS[-1])
    early = run.median_ms(EARLY)
    start = await cookbook(renderer, context, turns=EARLY.stop)
    cookbook_early = start.median_ms(EARLY)
    print(f"{'turn':>6}{'this package':>16}{'cookbook':>12}   late / early")
    for mark in MARKS:
        here = run.median_ms(slice(mark - WIDTH, mark)) / early
        there = await cookbook(renderer, context, played=mark - WIDTH, turns=WIDTH)
        print(f"{mark:6}{here:16.2f}{there.median_ms(slice(WIDTH)) / cookbook_early:12.2f}")


async def main() -> int:
    alternations = max(5, int(sys.argv[1]) if len(sys.argv) > 1 else 7)
    renderer = get_renderer("qwen3_instruct", get_tokenizer(str(tokenizer_path())))
    context = DatasetRenderer(renderer)
    sides: dict[str, Side] = {"this package": ours, "cookbook": cookbook}
    runs: dict[str, list[Run]] = {name: [] for name in sides}
    for _ in range(alternations):
        for name, side in sides.items():
            runs[name].append(await side(renderer, context))
    print(f"{TURNS} turns, medians of {alternations} alternations, CPU per turn in ms")
    print(f"{'':14}{'turns 4-12':>12}{'turns 56-64':>13}{'ratio':>8}{'datums':>8}{'tokens':>11}")
    late: dict[str, float] = {}
    ratios: dict[str, float] = {}
    for name in sides:
        first = statistics.median(run.median_ms(EARLY) for run in runs[name])
        late[name] = statistics.median(run.median_ms(LATE) for run in runs[name])
        ratios[name] = statistics.median(
            run.median_ms(LATE) / run.median_ms(EARLY) for run in runs[name]
        )
        datums, tokens = runs[name][0].trained()
        print(
            f"{name:14}{first:12.2f}{late[name]:13.2f}{ratios[name]:8.2f}{datums:8d}{tokens:11,d}"
        )
    gain = late["cookbook"] / late["this package"]
    print(f"a late turn costs the cookbook {gain:.0f} times as much")
    ratio = ratios["this package"]
    print(f"late / early: {ratio:.2f}, to be at most {LIMIT}")
    await long_episodes(renderer, context)
    return int(ratio > LIMIT)


if __name__ == "__main__":
    sys.exit(asyncio.run(main()))
