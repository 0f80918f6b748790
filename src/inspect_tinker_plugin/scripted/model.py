"""A scripted `ModelAPI`, usable wherever Inspect takes a model."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from contextvars import ContextVar

from inspect_ai.model import (
    ChatMessage,
    GenerateConfig,
    Model,
    ModelAPI,
    ModelOutput,
    get_model,
    modelapi,
)
from inspect_ai.tool import ToolChoice, ToolInfo

from inspect_tinker_plugin.episode.model import PolicyAPI
from inspect_tinker_plugin.episode.types import TurnRequest
from inspect_tinker_plugin.scripted.replies import SCRIPTED, Player, Script

_players: ContextVar[dict[str, Player] | None] = ContextVar("scripted_players", default=None)


class ScriptedAPI(ModelAPI):
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
        if self.player is None:
            raise RuntimeError("create scripted models with scripted_model(script)")
        kept = self.keep_requests
        request = TurnRequest(
            index=len(self.player.requests),
            messages=[m.model_copy(deep=True) for m in input] if kept else list(input),
            tools=list(tools),
            tool_choice=tool_choice,
            config=config,
        )
        try:
            return await self.player.answer(request)
        finally:
            if not kept:
                self.player.requests.clear()

    count_text_tokens = PolicyAPI.count_text_tokens


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
    model = get_model(f"{SCRIPTED}/{name}", memoize=False)
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
