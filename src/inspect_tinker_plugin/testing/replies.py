"""Scripts: the replies of a scripted policy, turn by turn, and a `ModelAPI` that gives them.

The model is usable wherever Inspect takes one.
"""

from __future__ import annotations

import asyncio
import contextlib
import inspect
from collections.abc import Awaitable, Callable, Iterator, Sequence
from contextvars import ContextVar
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, TypeAlias

from inspect_ai.dataset import Sample
from inspect_ai.model import (
    ChatCompletionChoice,
    ChatMessage,
    ChatMessageAssistant,
    ContentReasoning,
    ContentText,
    GenerateConfig,
    Model,
    ModelAPI,
    ModelOutput,
    ModelUsage,
    StopReason,
    get_model,
    modelapi,
)
from inspect_ai.tool import ToolCall, ToolChoice, ToolInfo
from pydantic import BaseModel, ConfigDict, TypeAdapter, ValidationError

from inspect_tinker_plugin import inspect_internals as internals
from inspect_tinker_plugin.contracts.episodes import TurnRequest
from inspect_tinker_plugin.contracts.errors import ConfigError
from inspect_tinker_plugin.episode.model import PlayingAPI

SCRIPTED = "scripted"
"""Name of the model in every scripted output."""

Answer: TypeAlias = Callable[
    [TurnRequest], str | ModelOutput | Exception | Awaitable[ModelOutput | str]
]

ScriptTurn: TypeAlias = str | ModelOutput | Exception | Answer
"""One reply: text, a whole output, an error to raise, or a function of the request."""

Script: TypeAlias = Sequence[ScriptTurn] | Answer
"""Replies in order, or one function that answers every request."""

MOST_REFUSALS = 20
"""Refusals after which a solver that ignores them is not going to end by itself."""


class ScriptExhausted(RuntimeError):
    """The model was asked more often than its script has replies."""


def say(
    text: str = "",
    *calls: ToolCall,
    reasoning: str | None = None,
    stop_reason: StopReason | None = None,
    usage: ModelUsage | None = None,
) -> ModelOutput:
    """Make one assistant reply.

    Args:
        text: What the model says.
        calls: Tool calls, see :func:`call`.
        reasoning: Thoughts before the text.
        stop_reason: ``stop`` or ``tool_calls`` by default; ``max_tokens`` for a cut reply.
        usage: Tokens of this call; counted from the characters by default.
    """
    message = ChatMessageAssistant(
        content=text
        if reasoning is None
        else [ContentReasoning(reasoning=reasoning), ContentText(text=text)],
        tool_calls=list(calls) or None,
        source="generate",
    )
    reason = stop_reason or ("tool_calls" if calls else "stop")
    choice = ChatCompletionChoice(message=message, stop_reason=reason)
    return ModelOutput(model=SCRIPTED, choices=[choice], usage=usage)


def call(function: str, /, **arguments: Any) -> ToolCall:
    """Make a tool call; its id is given when the script is played."""
    return ToolCall(id="", function=function, arguments=arguments)


def unparsed_call(function: str, raw: str, error: str) -> ToolCall:
    """Make a tool call whose arguments did not parse, as a provider reports it."""
    return ToolCall(id="", function=function, arguments={"raw": raw}, parse_error=error)


def submit(answer: str, text: str = "") -> ModelOutput:
    """Make a call of the ``submit`` tool that ``react`` and ``basic_agent`` offer."""
    return say(text, call("submit", answer=answer))


async def resolve_reply(
    script: Script, turn: int, request: Callable[[], TurnRequest]
) -> ModelOutput:
    """Return what a script says in a turn, whose request its functions get.

    Raises:
        ScriptExhausted: There is no reply left.
        Exception: The script says that this call fails.
    """
    if not callable(script) and turn >= len(script):
        raise ScriptExhausted(
            f"the script has {len(script)} replies, but turn {turn} was asked for; add one, or let "
            "the episode end earlier (max_turns)"
        )
    reply: Any = script if callable(script) else script[turn]
    while callable(reply):
        reply = reply(request())
    if inspect.isawaitable(reply):
        reply = await reply
    if isinstance(reply, Exception):
        raise reply
    return say(reply) if isinstance(reply, str) else reply


@dataclass
class Player:
    """Plays a script once: answers requests in the order in which they arrive."""

    script: Script
    name: str = "policy"
    requests: list[TurnRequest] = field(default_factory=list)
    refusals: int = 0
    """Requests for which there was no reply."""

    gave_up: asyncio.Event = field(default_factory=asyncio.Event)
    """Set when the task goes on asking, whatever it is told."""

    @property
    def unused(self) -> int:
        """Replies that were never asked for."""
        return 0 if callable(self.script) else max(0, len(self.script) - len(self.requests))

    async def answer(self, request: TurnRequest) -> ModelOutput:
        """Return the reply to a request, with ids of calls and usage.

        Raises:
            ScriptExhausted: There is no reply left; a solver that ignores this waits for ever.
            Exception: The script says that this call fails.
        """
        turn = len(self.requests)
        self.requests.append(request)
        try:
            output = await resolve_reply(self.script, turn, lambda: request)
        except ScriptExhausted:
            self.refusals += 1
            if self.refusals > MOST_REFUSALS:
                self.gave_up.set()
                await asyncio.get_running_loop().create_future()
            raise
        output = output.model_copy(deep=True)
        for choice in output.choices:
            choice.message.id = None
            choice.message = ChatMessageAssistant.model_validate(choice.message.model_dump())
            for index, tool_call in enumerate(choice.message.tool_calls or []):
                tool_call.id = tool_call.id or f"{self.name}_{turn}_{index}"
        if output.usage is None:
            output.usage = _usage(output, request)
        return output


def _usage(output: ModelOutput, request: TurnRequest) -> ModelUsage:
    """Count one token per four characters, so that token limits mean the same everywhere."""
    read = sum(len(message.text) for message in request.messages) // 4 + 1
    written = len(output.completion) // 4 + 1
    return ModelUsage(input_tokens=read, output_tokens=written, total_tokens=read + written)


MOST_TURNS = 30
"""An episode with more turns is not going to end by itself."""


def default_script(sample: Sample) -> Callable[[TurnRequest], ModelOutput | Exception]:
    """Think first, then answer with the sample's target.

    The first reply is text, so that an agent's way to continue is seen. After it the ``submit``
    tool is called wherever it is offered; other tools are left alone.
    """
    target = target_of(sample)
    answer = answer_with(target)

    def reply(request: TurnRequest) -> ModelOutput | Exception:
        if request.index >= MOST_TURNS:
            return ScriptExhausted(
                f"the task asked {MOST_TURNS} times and did not end; give it a script or a limit"
            )
        return answer(request) if request.index else say(f"I think so.\n\nANSWER: {target}")

    return reply


def target_of(sample: Sample) -> str:
    """Return a sample's target as one text."""
    return sample.target if isinstance(sample.target, str) else ", ".join(sample.target)


def answer_with(target: str) -> Callable[[TurnRequest], ModelOutput]:
    """Answer every turn with one answer, through the ``submit`` tool where it is offered."""

    def answer(request: TurnRequest) -> ModelOutput:
        tools = {tool.name: list(tool.parameters.properties) for tool in request.tools}
        return submit(target) if tools.get("submit") == ["answer"] else say(f"ANSWER: {target}")

    return answer


class ScriptedCall(BaseModel):
    """A tool call in a script file."""

    model_config = ConfigDict(extra="forbid")

    name: str
    arguments: dict[str, Any] = {}


class ScriptedReply(BaseModel):
    """One reply of a script file: ``{"text": ..., "tool_calls": [{"name", "arguments"}]}``."""

    model_config = ConfigDict(extra="forbid")

    text: str = ""
    tool_calls: list[ScriptedCall] = []


_Line = str | ScriptedReply | list[str | ScriptedReply]
_LINE: TypeAdapter[_Line] = TypeAdapter(_Line)


def read_script(path: Path) -> list[list[ScriptTurn]]:
    """Read episodes from a script file of JSON lines.

    A line is one reply, a string or ``{"text", "tool_calls"}``, and the file one episode; or
    every line is a list of replies, an episode of its own.

    Returns:
        At least one episode, each a list of replies.
    """
    try:
        lines = path.read_text(encoding="utf-8-sig").split("\n")
    except (OSError, UnicodeDecodeError) as error:
        raise ConfigError(f"the script {path} cannot be read: {error}") from error
    replies: list[ScriptTurn] = []
    episodes: list[list[ScriptTurn]] = []
    for number, line in enumerate(lines, start=1):
        if not line.strip():
            continue
        try:
            parsed = _LINE.validate_json(line)
        except ValidationError as error:
            faults = error.errors()
            unknown = [each["loc"][-1] for each in faults if each["type"] == "extra_forbidden"]
            fault = "neither a reply nor a list of replies"
            if unknown:
                fault = f"a reply has no key {unknown[0]!r}"
            elif faults[0]["type"] == "json_invalid":
                fault = faults[0]["msg"]
            raise ConfigError(
                f"{path}, line {number}: {fault}. "
                "A reply is a string or "
                '{"text": "...", "tool_calls": [{"name": "...", "arguments": {}}]}.'
            ) from error
        if isinstance(parsed, list):
            episodes.append([_read_reply(each) for each in parsed])
        else:
            replies.append(_read_reply(parsed))
        if replies and episodes:
            raise ConfigError(
                f"{path}, line {number}: the script mixes replies and lists of replies"
            )
    if not replies and not episodes:
        raise ConfigError(f"the script {path} holds no replies")
    return episodes or [replies]


def _read_reply(reply: str | ScriptedReply) -> ModelOutput:
    if isinstance(reply, str):
        return say(reply)
    return say(reply.text, *(call(each.name, **each.arguments) for each in reply.tool_calls))


_players: ContextVar[dict[str, Player] | None] = ContextVar("scripted_players", default=None)


class ScriptedAPI(PlayingAPI):
    """Answers from a script and keeps the requests.

    It declares the same abilities as the policy's provider (images in tool results, merged
    messages …), as Inspect rewrites conversations for what a provider can carry.
    """

    player: Player | None = None
    keep_requests: bool = True

    async def generate(
        self,
        input: list[ChatMessage],
        tools: list[ToolInfo],
        tool_choice: ToolChoice,
        config: GenerateConfig,
    ) -> ModelOutput:
        """Return the script's next reply; the request is kept in ``player.requests``."""
        player = self.player
        if player is None:
            running = internals.active_model()  # which `get_model(str(state.model))` has named
            player = getattr(running and running.api, "player", None)
        if player is None:
            raise RuntimeError("create scripted models with scripted_model(script)")
        kept = self.keep_requests
        request = TurnRequest(
            index=len(player.requests),
            messages=[m.model_copy(deep=True) for m in input] if kept else list(input),
            tools=list(tools),
            tool_choice=tool_choice,
            config=config,
        )
        try:
            return await player.answer(request)
        finally:
            if not kept:
                player.requests.clear()


class ScriptedModel(Model):
    """A model that Inspect's cache never answers for, as it never does for the policy."""

    def generate(self, *args: Any, **kwargs: Any) -> Any:
        """Generate, whatever is said of the cache, which is the fifth argument."""
        return super().generate(*args[:4], **{**kwargs, "cache": False})


@modelapi(SCRIPTED)
def scripted() -> type[ModelAPI]:
    """The provider behind ``scripted/...``."""
    return ScriptedAPI


def scripted_model(script: Script, *, name: str = "model", keep_requests: bool = True) -> Model:
    """Make an Inspect model that answers from a script: a grader, a user, a sub-agent's model.

    A model that is created while :func:`recording` is on is part of what is recorded.

    Args:
        script: Its replies.
        name: Its name after ``scripted/``.
        keep_requests: Keep a copy of every request; without, the script has to be a function,
            and costs are those of the calls alone.
    """
    made = get_model(f"{SCRIPTED}/{name}", memoize=False)
    model = ScriptedModel(made.api, made.config)
    assert isinstance(model.api, ScriptedAPI)
    model.api.player = Player(script, name)
    model.api.keep_requests = keep_requests
    players = _players.get()
    if players is not None:
        players[f"{name}-{len(players)}" if name in players else name] = model.api.player
    return model


@contextlib.contextmanager
def recording() -> Iterator[dict[str, Player]]:
    """Collect the players of all models that :func:`scripted_model` creates, by name."""
    players: dict[str, Player] = {}
    token = _players.set(players)
    try:
        yield players
    finally:
        _players.reset(token)
