"""CPU of an early and of a late turn of a whole env, beside the cookbook's message env.

64 turns of a ``generate`` loop with one tool whose results have about 500 tokens. Ours is a
complete ``Env.step``: parsing, Inspect's model call, tool call and events, and the next
prompt. The cookbook's side re-renders a list of messages and runs no tool at all. Prints
medians over alternations; the bar is late <= 1.5 x early for ours.
Run ``python benchmarks/turns.py [alternations]``.
"""

from __future__ import annotations

import asyncio
import json
import random
import statistics
import sys
import time

import tinker
from inspect_ai import Task
from inspect_ai.dataset import Sample
from inspect_ai.scorer import includes
from inspect_ai.solver import generate, use_tools
from inspect_ai.tool import Tool, tool
from tinker_cookbook.renderers import Message, get_renderer
from tinker_cookbook.rl.message_env import EnvFromMessageEnv, MessageEnv, MessageStepResult
from tinker_cookbook.rl.types import Env
from tinker_cookbook.tokenizer_utils import get_tokenizer

from inspect_tinker_plugin.rl.dataset import as_rl_dataset
from inspect_tinker_plugin.testing import tokenizer_path

TURNS = 64
EARLY, LATE = slice(4, 12), slice(56, 64)
LIMIT = 1.5
TOKENIZER = get_tokenizer(str(tokenizer_path()))
RENDERER = get_renderer("qwen3_instruct", TOKENIZER)
WORDS = ["error", "value", "return", "import", "line", "def", "print", "file", "test", "x"]


def page(turn: int) -> str:
    """About 500 tokens of text, another for every turn."""
    chooser = random.Random(turn)
    text = " ".join(chooser.choice(WORDS) for _ in range(600))
    return str(TOKENIZER.decode(TOKENIZER.encode(text, add_special_tokens=False)[:500]))


PAGES = [page(turn) for turn in range(TURNS + 1)]


@tool
def read() -> Tool:
    async def execute(page: int) -> str:
        """Read a page.

        Args:
            page: Its number.
        """
        return PAGES[page]

    return execute


class Pages(MessageEnv):
    """The cookbook's way: a list of messages, rendered whole at every turn."""

    def __init__(self) -> None:
        self.messages: list[Message] = [{"role": "user", "content": "Read everything."}]
        self.turn = 0

    async def initial_observation(self) -> list[Message]:
        return self.messages

    async def step(self, message: Message) -> MessageStepResult:
        result: Message = {"role": "tool", "content": PAGES[self.turn], "name": "read"}
        self.messages = [*self.messages, message, result]
        self.turn += 1
        return MessageStepResult(0.0, False, self.messages)


def call(turn: int) -> list[int]:
    body = json.dumps({"name": "read", "arguments": {"page": turn}}, separators=(",", ":"))
    text = f"<tool_call>\n{body}\n</tool_call><|im_end|>"
    return [int(token) for token in TOKENIZER.encode(text, add_special_tokens=False)]


async def ours() -> Env:
    task = Task(
        dataset=[Sample(id=1, input="Read everything.", target="done")],
        solver=[use_tools(read()), generate()],
        scorer=includes(),
    )
    return (await as_rl_dataset(task, RENDERER).get_batch(0)[0].make_envs())[0]


async def cookbook() -> Env:
    return EnvFromMessageEnv(RENDERER, Pages())


async def episode(env: Env) -> list[float]:
    """CPU of each turn, in milliseconds."""
    await env.initial_observation()
    turns = []
    for turn in range(TURNS):
        action = call(turn)
        started = time.process_time()
        result = await env.step(action)
        turns.append((time.process_time() - started) * 1000)
        assert not result.episode_done
        assert isinstance(result.next_observation, tinker.ModelInput)
    return turns


async def main(alternations: int) -> bool:
    sides = {"this package": ours, "cookbook": cookbook}
    early: dict[str, list[float]] = {name: [] for name in sides}
    late: dict[str, list[float]] = {name: [] for name in sides}
    for repeat in range(alternations + 1):
        for name, make in sides.items():
            turns = await episode(await make())
            if repeat:  # the first round warms up
                early[name].append(statistics.median(turns[EARLY]))
                late[name].append(statistics.median(turns[LATE]))
    ratios = {}
    for name in sides:
        first, last = statistics.median(early[name]), statistics.median(late[name])
        ratios[name] = last / first
        print(
            f"{name:14} early {first:6.2f} ms  late {last:6.2f} ms  late/early {last / first:.2f}"
        )
    print(f"bar: late/early at most {LIMIT} for this package")
    return ratios["this package"] <= LIMIT


if __name__ == "__main__":
    ok = asyncio.run(main(int(sys.argv[1]) if len(sys.argv) > 1 else 5))
    sys.exit(0 if ok else 1)
