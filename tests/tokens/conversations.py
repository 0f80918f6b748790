"""Scripted conversations that the token tests and the benchmark share."""

from __future__ import annotations

import json
import random
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

import tinker
from inspect_ai import Task
from inspect_ai.model import (
    ChatMessage,
    ChatMessageSystem,
    ChatMessageTool,
    ChatMessageUser,
    GenerateConfig,
    ModelOutput,
)
from inspect_ai.tool import ToolChoice, ToolInfo, ToolParam, ToolParams
from tests.functions import make_tool
from tinker_cookbook.completers import TokensWithLogprobs
from tinker_cookbook.rl.data_processing import trajectory_to_data
from tinker_cookbook.rl.types import Trajectory, Transition

from inspect_tinker_plugin.contracts.episodes import EpisodeResult, TurnRequest
from inspect_tinker_plugin.episode.runner import Episode, EpisodeRunner
from inspect_tinker_plugin.options import EpisodeOptions
from inspect_tinker_plugin.rl.group import in_branch_order
from inspect_tinker_plugin.testing import say
from inspect_tinker_plugin.testing.policy import reply_tokens
from inspect_tinker_plugin.tokens.episode import DatasetRenderer, EpisodeTokens
from inspect_tinker_plugin.tokens.prompts import PromptCache, flatten

BASH = ToolInfo(
    name="bash",
    description="Run a command.",
    parameters=ToolParams(
        properties={"cmd": ToolParam(type="string", description="The command.")},
        required=["cmd"],
    ),
)
SUBMIT = ToolInfo(
    name="submit",
    description="Submit an answer.",
    parameters=ToolParams(properties={"answer": ToolParam(type="string")}, required=["answer"]),
)


@make_tool
async def bash(cmd: str) -> str:
    """Run a command.

    Args:
        cmd: The command.
    """
    return f"ran {cmd}"


def compact_call(command: str) -> str:
    """A call as a model under training writes it: JSON without spaces."""
    call = json.dumps({"name": "bash", "arguments": {"cmd": command}}, separators=(",", ":"))
    return f"<tool_call>\n{call}\n</tool_call>"


def call_after_text(command: str) -> str:
    """A line of text, then a call."""
    call = json.dumps({"name": "bash", "arguments": {"cmd": command}})
    return f"I look at it now.\n\n<tool_call>\n{call}\n</tool_call>"


def words(count: int, *, seed: int) -> str:
    """Return text of some ``count`` words."""
    rng = random.Random(seed)
    return " ".join(rng.choice(("file", "the", "error", "42", "print", "x")) for _ in range(count))


def request(
    messages: Sequence[ChatMessage],
    *,
    tools: Sequence[ToolInfo] = (),
    index: int = 0,
    config: GenerateConfig | None = None,
    tool_choice: ToolChoice = "auto",
) -> TurnRequest:
    """Return a request with copies of the messages, as Inspect hands them over."""
    return TurnRequest(
        index=index,
        messages=[message.model_copy(deep=True) for message in messages],
        tools=[tool.model_copy(deep=True) for tool in tools],
        tool_choice=tool_choice,
        config=config or GenerateConfig(),
    )


@dataclass
class Rollout:
    """Plays an episode through the token layer and keeps its trajectory."""

    context: DatasetRenderer
    tools: Sequence[ToolInfo] = ()
    shared_prompts: PromptCache | None = None
    transitions: list[Transition] = field(default_factory=list)

    def __post_init__(self) -> None:
        self.tokens = EpisodeTokens(
            self.context, task="scripted", sample_id="one", shared_prompts=self.shared_prompts
        )

    def sample(self, text: str, *, stop: bool = True) -> list[int]:
        """Return the tokens of a sampled text, with the renderer's end of turn."""
        tokenizer = self.context.tokenizer
        first = self.context.stops[0]
        if type(self.context.renderer).__name__ == "TmlV0Renderer":  # a reply begins with a header
            said = say(text, stop_reason="stop" if stop else "max_tokens")
            return reply_tokens(self.context.renderer, said)
        if isinstance(first, str):
            return list(tokenizer.encode(text + (first if stop else ""), add_special_tokens=False))
        return [*tokenizer.encode(text, add_special_tokens=False), *([first] if stop else [])]

    def turn(
        self,
        messages: Sequence[ChatMessage],
        text: str,
        *,
        stop: bool = True,
        stop_reason: str | None = "stop",
        config: GenerateConfig | None = None,
        tools: Sequence[ToolInfo] | None = None,
    ) -> ModelOutput:
        """Prompt with messages, answer with a text, and return what the solver gets."""
        asked = request(
            messages,
            tools=self.tools if tools is None else tools,
            index=len(self.transitions),
            config=config,
        )
        return self.answer(asked, text, stop=stop, stop_reason=stop_reason)

    def answer(
        self,
        asked: TurnRequest,
        text: str,
        *,
        stop: bool = True,
        stop_reason: str | None = "stop",
    ) -> ModelOutput:
        """Answer a request with a text."""
        prompt = self.tokens.prompt(asked)
        sampled = self.sample(text, stop=stop)
        action = TokensWithLogprobs(tokens=sampled, maybe_logprobs=[-1.0] * len(sampled))
        self.transitions.append(
            Transition(ob=prompt, ac=action, reward=0.0, episode_done=False, metrics={})
        )
        return self.tokens.parse(sampled, stop_reason=stop_reason, request=asked)

    def continues(self, later: int, earlier: int) -> bool:
        """Whether a turn's prompt begins with all of an earlier turn, to the token."""
        turn = self.transitions[earlier]
        start = [*flatten(turn.ob.chunks), *turn.ac.tokens]
        return flatten(self.transitions[later].ob.chunks)[: len(start)] == start

    def data(self) -> list[tinker.Datum]:
        """Return what the trainer makes of the episode, ordered as its group would."""
        transitions = in_branch_order(self.transitions, self.tokens.turns)
        trajectory = Trajectory(transitions=transitions, final_ob=tinker.ModelInput.empty())
        return trajectory_to_data(trajectory, 1.0)


def opening() -> list[ChatMessage]:
    """Return a system and a user message."""
    return [
        ChatMessageSystem(content="You are a careful agent."),
        ChatMessageUser(content="Find the bug in main.py."),
    ]


def tool_results(output: ModelOutput, content: str) -> list[ChatMessage]:
    """Return one result for each call of a reply."""
    return [
        ChatMessageTool(content=content, tool_call_id=call.id, function=call.function)
        for call in output.message.tool_calls or []
    ]


def assert_trained(
    sampled: Sequence[tuple[list[int], list[int]]], data: Sequence[tinker.Datum]
) -> None:
    """Check that datums train on what the sampler said to what it was asked, and nothing else."""
    remaining = list(sampled)
    for datum in data:
        targets = datum.loss_fn_inputs["target_tokens"].data
        mask = datum.loss_fn_inputs["mask"].data
        whole = [*datum.model_input.to_ints(), targets[-1]]
        trained = {index + 1 for index, value in enumerate(mask) if value}
        for asked, said in list(remaining):
            span = range(len(asked), len(asked) + len(said))
            if whole[: span.stop] == [*asked, *said] and trained.issuperset(span):
                trained.difference_update(span)
                remaining.remove((asked, said))
        assert not trained
    assert not [said for _, said in remaining if said]


async def play_out(
    task: Task,
    says: Callable[[TurnRequest], ModelOutput],
    options: EpisodeOptions | None = None,
) -> EpisodeResult:
    """Play one episode to its end."""
    episode: Episode = EpisodeRunner(task, options=options).episode(task.dataset[0])
    try:
        outcome = await episode.start()
        while isinstance(outcome, TurnRequest):
            outcome = await episode.reply(says(outcome))
    finally:
        await episode.close()
    return outcome
