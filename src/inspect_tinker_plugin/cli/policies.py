"""Who answers in a rollout: a script, read from a file or made up, or a real model."""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, cast

from inspect_ai.model import ChatMessageAssistant
from inspect_ai.tool import ToolCall
from pydantic import BaseModel, ConfigDict, TypeAdapter, ValidationError

from inspect_tinker_plugin.errors import ConfigError, InspectRLError

if TYPE_CHECKING:
    import tinker
    from tinker_cookbook.completers import StopCondition, TokenCompleter, TokensWithLogprobs
    from tinker_cookbook.renderers import Renderer


class ScriptEndedError(InspectRLError):
    """An episode went on after its script had ended."""


class ScriptedCall(BaseModel):
    """A tool call in a script file."""

    model_config = ConfigDict(extra="forbid")

    name: str
    arguments: dict[str, Any] = {}


class Reply(BaseModel):
    """One reply of a script file: ``{"text": ..., "tool_calls": [{"name", "arguments"}]}``."""

    model_config = ConfigDict(extra="forbid")

    text: str = ""
    tool_calls: list[ScriptedCall] = []

    def message(self, turn: int) -> ChatMessageAssistant:
        """The reply as Inspect's message."""
        calls = [
            ToolCall(id=f"call_{turn}_{i}", function=call.name, arguments=call.arguments)
            for i, call in enumerate(self.tool_calls)
        ]
        return ChatMessageAssistant(content=self.text, tool_calls=calls or None)


ReplyFor = Callable[[int, str], Reply]
"""Gives the reply to a turn (from 0) and the text of its prompt."""

_LINE: TypeAdapter[str | Reply | list[str | Reply]] = TypeAdapter(str | Reply | list[str | Reply])


def read_script(path: Path) -> list[list[Reply]]:
    """Read episodes from a script file of JSON lines.

    A line is one reply, a string or ``{"text", "tool_calls"}``, and the file one episode; or
    every line is a list of replies, an episode of its own.

    Returns:
        At least one episode, each a list of replies.

    Raises:
        ConfigError: The file cannot be read, or a line is something else.
    """
    try:
        lines = path.read_text(encoding="utf-8").splitlines()
    except (OSError, UnicodeDecodeError) as error:
        raise ConfigError(f"the script {path} cannot be read: {error}") from error
    replies: list[Reply] = []
    episodes: list[list[Reply]] = []
    for number, line in enumerate(lines, start=1):
        if not line.strip():
            continue
        try:
            parsed = _LINE.validate_json(line)
        except ValidationError as error:
            raise ConfigError(
                f"{path}, line {number}: neither a reply nor a list of replies "
                f"({_first_problem(error)}). A reply is a string or "
                '{"text": "...", "tool_calls": [{"name": "...", "arguments": {}}]}.'
            ) from error
        if isinstance(parsed, list):
            episodes.append([_reply(each) for each in parsed])
        else:
            replies.append(_reply(parsed))
    if bool(replies) == bool(episodes):
        problem = "mixes replies and lists of replies" if replies else "holds no replies"
        raise ConfigError(f"the script {path} {problem}")
    return episodes or [replies]


def play(replies: Sequence[Reply]) -> ReplyFor:
    """Say the replies of one episode in order."""

    def reply_for(turn: int, prompt: str) -> Reply:
        if turn >= len(replies):
            raise ScriptEndedError(
                f"the script has {len(replies)} replies, and the task asks for another; "
                "add one, or end the episode earlier with --max-turns"
            )
        return replies[turn]

    return reply_for


def answer_with(target: str) -> ReplyFor:
    """Answer every turn with one answer, through the ``submit`` tool where it is on offer."""

    def reply_for(turn: int, prompt: str) -> Reply:
        if re.search(r"\bsubmit\b", prompt):
            return Reply(tool_calls=[ScriptedCall(name="submit", arguments={"answer": target})])
        return Reply(text=f"ANSWER: {target}")

    return reply_for


@dataclass
class ScriptedPolicy:
    """Answers for one episode: scripted words as real tokens of the renderer."""

    renderer: Renderer
    reply_for: ReplyFor
    max_tokens: int
    turn: int = 0

    async def __call__(
        self, model_input: tinker.ModelInput, stop: StopCondition, *, max_tokens: int | None = None
    ) -> TokensWithLogprobs:
        """Say the next reply; cut at ``max_tokens``, as a sampler does."""
        from tinker_cookbook.completers import TokensWithLogprobs

        prompt = [token for chunk in model_input.chunks for token in getattr(chunk, "tokens", ())]
        reply = self.reply_for(self.turn, str(self.renderer.tokenizer.decode(prompt)))
        tokens = reply_tokens(self.renderer, reply.message(self.turn))
        self.turn += 1
        room = self.max_tokens if max_tokens is None else min(self.max_tokens, max_tokens)
        return TokensWithLogprobs(
            tokens=tokens[:room],
            maybe_logprobs=[0.0] * len(tokens[:room]),
            stop_reason="length" if len(tokens) > room else "stop",
        )


def scripted_policy(renderer: Renderer, reply_for: ReplyFor, *, max_tokens: int) -> TokenCompleter:
    """Make the policy of one episode.

    Args:
        renderer: Turns replies into tokens.
        reply_for: What it says.
        max_tokens: Longer replies are cut, as by a sampler.
    """
    # Only called, never checked for its class: a subclass would import the cookbook here.
    return cast("TokenCompleter", ScriptedPolicy(renderer, reply_for, max_tokens))


def reply_tokens(renderer: Renderer, message: ChatMessageAssistant) -> list[int]:
    """The tokens with which a model would say a message, end of turn included."""
    from tinker_cookbook.renderers import Message
    from tinker_cookbook.renderers.base import RenderContext

    from inspect_tinker_plugin.rl.messages import renderer_message

    asked = Message(role="user", content="")
    context = RenderContext(idx=1, is_last=True, prev_message=asked, last_user_index=0)
    rendered = renderer.render_message(renderer_message(message, images=False), context)
    chunks = [*rendered.output, *([rendered.stop_overlap] if rendered.stop_overlap else [])]
    return [token for chunk in chunks for token in getattr(chunk, "tokens", ())]


def tinker_policy(
    model: str, *, base_url: str | None, max_tokens: int, temperature: float
) -> TokenCompleter:
    """Sample from a model through the Tinker API.

    Args:
        model: A base model (``Qwen/Qwen3-8B``) or weights (``tinker://...``).
        base_url: Another server than the hosted one.
        max_tokens: Tokens a turn at most.
        temperature: Sampling temperature.

    Raises:
        ConfigError: There is no key, or the service refuses.
    """
    import tinker
    from tinker_cookbook.completers import TinkerTokenCompleter

    weights = model.startswith("tinker://")
    try:
        client = tinker.ServiceClient(base_url=base_url)
        sampler = client.create_sampling_client(
            model_path=model if weights else None, base_model=None if weights else model
        )
    except (tinker.TinkerError, ValueError) as error:
        raise ConfigError(
            f"cannot sample from {model}: {error}. Set TINKER_API_KEY, or leave --model out to "
            "use the scripted policy."
        ) from error
    return TinkerTokenCompleter(sampler, max_tokens=max_tokens, temperature=temperature)


def _reply(line: str | Reply) -> Reply:
    return Reply(text=line) if isinstance(line, str) else line


def _first_problem(error: ValidationError) -> str:
    problem = error.errors(include_url=False)[-1]
    return json.dumps(problem["msg"])
