"""The same work in several ways: as an episode, written by hand for the cookbook, and as an eval.

One scripted policy answers all of them, and the cookbook's own ``do_group_rollout`` runs all that
are envs. CPU is that of the process, so that what else runs on the machine counts little.
"""

from __future__ import annotations

import asyncio
import json
import os
import statistics
import sys
import tempfile
import time
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any

os.environ.setdefault("INSPECT_DISPLAY", "none")

import tinker
from inspect_ai import Task, eval_async
from inspect_ai.agent import as_solver, react
from inspect_ai.dataset import Sample
from inspect_ai.model import ModelOutput, ModelUsage
from inspect_ai.scorer import includes, match
from inspect_ai.solver import chain, generate, use_tools
from inspect_ai.tool import Tool, tool
from tinker_cookbook.completers import StopCondition, TokenCompleter, TokensWithLogprobs
from tinker_cookbook.renderers import Message, get_renderer
from tinker_cookbook.rl.problem_env import ProblemEnv
from tinker_cookbook.rl.rollouts import do_group_rollout
from tinker_cookbook.rl.types import Env, EnvGroupBuilder
from tinker_cookbook.tokenizer_utils import get_tokenizer
from tinker_cookbook.tool_use.agent_tool_message_env import build_agent_tool_env
from tinker_cookbook.tool_use.tools import simple_tool_result
from tinker_cookbook.tool_use.types import ToolInput, ToolResult

from inspect_tinker_plugin.contracts.episodes import TurnRequest
from inspect_tinker_plugin.rl.dataset import as_rl_dataset
from inspect_tinker_plugin.testing import scripted_model, tokenizer_path

GROUP = 8
TOKENIZER = get_tokenizer(str(tokenizer_path()))
RENDERER = get_renderer("qwen3_instruct", TOKENIZER)


def text_of(tokens: int, topic: str) -> str:
    """Return text of so many tokens."""
    words = f"{topic} sold clips to 48 friends in April and half as many in May, then counted. "
    ids = TOKENIZER.encode(words * (tokens // 10 + 1), add_special_tokens=False)
    return str(TOKENIZER.decode(ids[:tokens]))


QUESTION, ANSWER = text_of(190, "Natalia"), text_of(130, "She") + "\nANSWER: 72"


def question(number: int) -> str:
    return f"{number}: {QUESTION}"


@cache
def encode_reply(text: str) -> list[int]:
    """Return what a policy samples to say a text; that it is encoded is no work of any side."""
    return list(TOKENIZER.encode(f"{text}<|im_end|>", add_special_tokens=False))


def call_of(name: str, **arguments: Any) -> str:
    body = json.dumps({"name": name, "arguments": arguments}, separators=(",", ":"))
    return f"<tool_call>\n{body}\n</tool_call>"


class Policy(TokenCompleter):
    """Says one reply after the other, and the last to all who still ask.

    Attributes:
        turns: CPU between a reply and the next question, for a policy that one env asks.
    """

    def __init__(self, replies: Sequence[list[int]]) -> None:
        self._replies = replies
        self.turns: list[float] = []
        self._since: float | None = None
        self._asked = 0

    async def __call__(
        self,
        model_input: tinker.ModelInput,
        stop: StopCondition,
        *,
        max_tokens: int | None = None,
    ) -> TokensWithLogprobs:
        now = time.process_time()
        if self._since is not None:
            self.turns.append(now - self._since)
        reply = self._replies[min(self._asked, len(self._replies) - 1)]
        self._asked += 1
        answer = TokensWithLogprobs(tokens=list(reply), maybe_logprobs=[0.0] * len(reply))
        self._since = time.process_time()
        return answer


class Builder(EnvGroupBuilder):
    """Groups of envs that somebody has written by hand."""

    def __init__(self, make: Callable[[], Env], size: int = GROUP) -> None:
        self._make, self._size = make, size

    async def make_envs(self) -> list[Env]:
        return [self._make() for _ in range(self._size)]


Side = Callable[[], Awaitable[float]]
"""Does one round of the work; returns its figure."""


async def cpu_ms(work: Callable[[], Awaitable[Any]], units: int) -> float:
    """CPU of one unit of the work, in milliseconds."""
    started = time.process_time()
    await work()
    return (time.process_time() - started) / units * 1000


# one turn

GROUPS = 8
BATCHES = 4
"""Batches per round: enough for most garbage collections to fall into every round."""
EPISODES = BATCHES * GROUPS * GROUP


def one_turn_task(samples: int) -> Task:
    dataset = [Sample(id=i, input=question(i), target="72") for i in range(samples)]
    return Task(dataset=dataset, solver=generate(), scorer=match(), name="one_turn")


class HandWritten(ProblemEnv):
    """What a user of the cookbook would write for this one task."""

    def get_question(self) -> str:
        return question(1)

    def check_answer(self, sample_str: str) -> bool:
        return sample_str.strip().endswith("72")

    def check_format(self, sample_str: str) -> bool:
        return True

    def get_reference_answer(self) -> str:
        return "72"


async def _roll(groups: Sequence[EnvGroupBuilder], policy: Callable[[], TokenCompleter]) -> None:
    for done in await asyncio.gather(*[do_group_rollout(group, policy()) for group in groups]):
        assert min(done.get_total_rewards()) == 1.0, done.get_total_rewards()


def one_turn_ours(**options: Any) -> Side:
    dataset = as_rl_dataset(
        one_turn_task(GROUPS), RENDERER, batch_size=GROUPS, group_size=GROUP, **options
    )

    async def work() -> None:
        for _ in range(BATCHES):
            await _roll(dataset.get_batch(0), lambda: Policy([encode_reply(ANSWER)]))

    return lambda: cpu_ms(work, EPISODES)


def one_turn_by_hand() -> Side:
    async def work() -> None:
        for _ in range(BATCHES):
            groups = [Builder(lambda: HandWritten(RENDERER)) for _ in range(GROUPS)]
            await _roll(groups, lambda: Policy([encode_reply(ANSWER)]))

    return lambda: cpu_ms(work, EPISODES)


def one_turn_bridge(source: Path) -> Side:
    """The older bridge, whose source is in a folder."""
    sys.path.insert(0, str(source / "src" if (source / "src").is_dir() else source))
    from inspect_tinker_bridge import load_environment  # type: ignore[import-not-found]

    dataset = load_environment(
        lambda: one_turn_task(GROUPS), RENDERER, num_envs_per_group=GROUP, batch_size=GROUPS
    )

    async def work() -> None:
        for _ in range(BATCHES):
            await _roll(dataset.get_batch(0), lambda: Policy([encode_reply(ANSWER)]))

    return lambda: cpu_ms(work, EPISODES)


@dataclass(frozen=True)
class Logging:
    """What an eval writes.

    Attributes:
        samples: Whether its log has the samples.
        live: Whether it can be watched while it runs, as an eval's can by default.
    """

    samples: bool
    live: bool = False


EVALS = {
    "eval": Logging(samples=False),
    "eval, logs": Logging(samples=True),
    "eval, live log": Logging(samples=True, live=True),
}


async def evaluated(task: Task, script: Any, logging: Logging) -> None:
    with tempfile.TemporaryDirectory() as folder:
        [log] = await eval_async(
            task,
            model=scripted_model(script, keep_requests=False),
            log_samples=logging.samples,
            log_realtime=logging.live,
            log_dir=folder,
        )
    assert log.status == "success", log.error


def _make_output(text: str) -> ModelOutput:
    output = ModelOutput.from_content("scripted", text)
    output.usage = ModelUsage(input_tokens=199, output_tokens=141, total_tokens=340)
    return output


def one_turn_eval(name: str) -> Side:
    logging = EVALS[name]
    return lambda: cpu_ms(
        lambda: evaluated(one_turn_task(EPISODES), lambda _: _make_output(ANSWER), logging),
        EPISODES,
    )


# several turns with a tool


def pages(count: int, tokens: int) -> list[str]:
    return [text_of(tokens, f"Page {number}:") for number in range(count)]


@tool
def read(texts: list[str]) -> Tool:
    async def execute(page: int) -> str:
        """Read a page.

        Args:
            page: Its number.
        """
        return texts[page]

    return execute


class CookbookRead:
    """The same tool for the cookbook."""

    name = "read"
    description = "Read a page."
    parameters_schema: dict[str, Any] = {  # noqa: RUF012 - the cookbook's protocol
        "type": "object",
        "properties": {"page": {"type": "integer", "description": "Its number."}},
        "required": ["page"],
    }

    def __init__(self, texts: list[str]) -> None:
        self._texts = texts

    async def run(self, input: ToolInput) -> ToolResult:
        text = self._texts[int(input.arguments["page"])]
        return simple_tool_result(text, call_id=input.call_id or "", name=self.name)

    def to_spec(self) -> Any:
        return {
            "name": self.name,
            "description": self.description,
            "parameters": self.parameters_schema,
        }


AT_ONCE = 16
"""Rollouts, or samples of an eval, that run at once where a turn of them is measured."""


class ToolWork:
    """An episode of several turns: a tool call in each but the last, which answers.

    Args:
        turns: Model calls.
        tokens: Tokens of each result.
        agent: Solve with ``react()``, which ends with ``submit()``.
    """

    def __init__(self, turns: int, tokens: int, *, agent: bool = False) -> None:
        self.turns = turns
        self._calls = turns - 1
        self._texts = pages(self._calls, tokens)
        self._agent = agent
        last = call_of("submit", answer="done") if agent else "done"
        self._dataset = as_rl_dataset(self.task(), RENDERER)
        self._says = [*[call_of("read", page=turn) for turn in range(self._calls)], last]

    def task(self, samples: int = 1) -> Task:
        tool_of = read(self._texts)
        loop = chain(use_tools(tool_of), generate())
        solver = as_solver(react(tools=[tool_of])) if self._agent else loop
        dataset = [Sample(id=i, input="Read all.", target="done") for i in range(samples)]
        return Task(dataset=dataset, solver=solver, scorer=includes(), name="pages")

    def policy(self) -> Policy:
        return Policy([encode_reply(text) for text in self._says])

    def ours(self) -> list[EnvGroupBuilder]:
        return list(self._dataset.get_batch(0))

    def by_hand(self) -> list[EnvGroupBuilder]:
        async def reward(history: list[Message]) -> tuple[float, dict[str, float]]:
            return float("done" in str(history[-1]["content"])), {}

        prefix = RENDERER.create_conversation_prefix_with_tools(
            [CookbookRead(self._texts).to_spec()]
        )

        def make() -> Env:
            return build_agent_tool_env(
                RENDERER,
                [CookbookRead(self._texts)],
                [*prefix, {"role": "user", "content": "Read all."}],
                reward,
                max_turns=self.turns,
            )

        return [Builder(make, 1)]

    async def rollout(self, groups: Sequence[EnvGroupBuilder]) -> Policy:
        policy = self.policy()
        [group] = [await do_group_rollout(builder, policy) for builder in groups]
        assert group.get_total_rewards() == [1.0]
        return policy

    def script(self, turns: list[float] | None = None) -> Callable[[TurnRequest], ModelOutput]:
        """Return the policy's replies for an eval, which may note the CPU of each turn."""
        from inspect_ai.model import ChatMessageAssistant, ChatMessageTool
        from inspect_ai.tool import ToolCall

        since: list[float] = []

        def answer(request: TurnRequest) -> ModelOutput:
            now = time.process_time()
            if turns is not None and since:
                turns.append(now - since[-1])
            number = sum(isinstance(message, ChatMessageTool) for message in request.messages)
            output = ModelOutput.from_content("scripted", "done")
            if number < self._calls or self._agent:
                name, arguments = (
                    ("read", {"page": number})
                    if number < self._calls
                    else ("submit", {"answer": "done"})
                )
                call = ToolCall(id=f"call-{number}", function=name, arguments=arguments)
                output = ModelOutput.from_message(
                    ChatMessageAssistant(content="", tool_calls=[call]), stop_reason="tool_calls"
                )
            output.usage = ModelUsage(input_tokens=100, output_tokens=10, total_tokens=110)
            since.append(time.process_time())
            return output

        return answer

    # figures

    def turn_of_rollout(self, make: Callable[[], list[EnvGroupBuilder]]) -> Side:
        """CPU of a turn: that of many rollouts at once, as in an eval, by their turns."""

        async def work() -> None:
            if make == self.by_hand:  # its threads would change settings of the one tokenizer
                for _ in range(AT_ONCE):
                    await self.rollout(make())
            else:
                await asyncio.gather(*[self.rollout(make()) for _ in range(AT_ONCE)])

        return lambda: cpu_ms(work, AT_ONCE * self.turns)

    def turn_of_eval(self, name: str) -> Side:
        logging = EVALS[name]
        return lambda: cpu_ms(
            lambda: evaluated(self.task(AT_ONCE), self.script(), logging), AT_ONCE * self.turns
        )

    def late_turn_of_rollout(self, make: Callable[[], list[EnvGroupBuilder]]) -> Side:
        """CPU of one of the last eight turns."""

        async def round_() -> float:
            policy = await self.rollout(make())
            return statistics.median(policy.turns[-9:-1]) * 1000

        return round_

    def early_turn_of_rollout(self, make: Callable[[], list[EnvGroupBuilder]]) -> Side:
        async def round_() -> float:
            policy = await self.rollout(make())
            return statistics.median(policy.turns[4:12]) * 1000

        return round_

    def late_turn_of_eval(self) -> Side:
        async def round_() -> float:
            turns: list[float] = []
            await evaluated(self.task(), self.script(turns), EVALS["eval"])
            return statistics.median(turns[-9:-1]) * 1000

        return round_
