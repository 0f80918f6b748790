"""The scripted policies of a rollout: replies read from a file, or made up."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Any, cast

from inspect_ai.model import ModelOutput
from pydantic import BaseModel, ConfigDict, TypeAdapter, ValidationError

from inspect_tinker_plugin.contracts.episodes import TurnRequest
from inspect_tinker_plugin.contracts.errors import ConfigError
from inspect_tinker_plugin.testing import Script, ScriptedPolicy, ScriptTurn, call, say, submit

if TYPE_CHECKING:
    from tinker_cookbook.completers import TokenCompleter
    from tinker_cookbook.renderers import Renderer


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

    def output(self) -> ModelOutput:
        """Return the reply as a scripted model says it."""
        return say(self.text, *(call(each.name, **each.arguments) for each in self.tool_calls))


_Said = str | ScriptedReply | list[str | ScriptedReply]
_LINE: TypeAdapter[_Said] = TypeAdapter(_Said)


def read_script(path: Path) -> list[list[ScriptTurn]]:
    """Read episodes from a script file of JSON lines.

    A line is one reply, a string or ``{"text", "tool_calls"}``, and the file one episode; or
    every line is a list of replies, an episode of its own.

    Returns:
        At least one episode, each a list of replies.

    Raises:
        ConfigError: The file cannot be read, or a line is something else.
    """
    try:
        lines = path.read_text(encoding="utf-8-sig").splitlines()
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
            raise ConfigError(
                f"{path}, line {number}: neither a reply nor a list of replies "
                f"({_first_problem(error)}). A reply is a string or "
                '{"text": "...", "tool_calls": [{"name": "...", "arguments": {}}]}.'
            ) from error
        if isinstance(parsed, list):
            episodes.append([_output(each) for each in parsed])
        else:
            replies.append(_output(parsed))
        if replies and episodes:
            raise ConfigError(
                f"{path}, line {number}: the script mixes replies and lists of replies"
            )
    if not replies and not episodes:
        raise ConfigError(f"the script {path} holds no replies")
    return episodes or [replies]


def answer_with(target: str) -> Script:
    """Answer every turn with one answer, through the ``submit`` tool where it is offered."""

    def answer(request: TurnRequest) -> ModelOutput:
        if any(tool.name == "submit" for tool in request.tools):
            return submit(target)
        return say(f"ANSWER: {target}")

    return answer


def scripted_policy(
    renderer: Renderer,
    script: Script,
    *,
    max_tokens: int,
    request: Callable[[], TurnRequest] | None = None,
) -> TokenCompleter:
    """Make a policy that follows a script.

    Args:
        renderer: Turns replies into tokens.
        script: Its replies.
        max_tokens: Longer replies are cut, as by a sampler.
        request: Returns the model call that is being answered; for a policy of one episode.
    """
    # Only called, its class is never checked: a subclass would import the cookbook here.
    policy = ScriptedPolicy(renderer, script, request=request, max_tokens=max_tokens)
    return cast("TokenCompleter", policy)


def _output(line: str | ScriptedReply) -> ModelOutput:
    return say(line) if isinstance(line, str) else line.output()


def _first_problem(error: ValidationError) -> str:
    """Name what is wrong with a line; of its possible readings, with the one that went furthest."""
    problem = max(error.errors(include_url=False), key=lambda each: len(each["loc"]))
    if problem["type"] == "extra_forbidden":
        return f"there is no key {problem['loc'][-1]!r}"
    return json.dumps(problem["msg"])
