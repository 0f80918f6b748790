"""A scripted policy in tokens: what a sampler would return for a script, without a download.

The shipped tokenizer and renderers over it make real tokens.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import cache
from pathlib import Path
from typing import TYPE_CHECKING

from inspect_ai.model import ChatMessageUser, GenerateConfig, ModelOutput

from inspect_tinker_plugin.contracts.episodes import TurnRequest
from inspect_tinker_plugin.contracts.errors import RendererError
from inspect_tinker_plugin.contracts.policy import TOKENIZER_FOLDER
from inspect_tinker_plugin.testing.replies import Script, ScriptExhausted, resolve_reply

if TYPE_CHECKING:
    import tinker
    from tinker_cookbook.completers import StopCondition, TokensWithLogprobs
    from tinker_cookbook.renderers import Renderer
    from tinker_cookbook.tokenizer_utils import Tokenizer


def tokenizer_path() -> Path:
    """Return the folder of the shipped byte-level tokenizer, which has Qwen3's special tokens."""
    return TOKENIZER_FOLDER


@cache
def load_tokenizer() -> Tokenizer:
    """Load the shipped tokenizer, once per process."""
    from tinker_cookbook.tokenizer_utils import get_tokenizer

    return get_tokenizer(str(tokenizer_path()))


def load_renderer(name: str = "qwen3_instruct") -> Renderer:
    """Make one of the cookbook's renderers over the shipped tokenizer.

    Args:
        name: A renderer of the Qwen3 family, as ``tinker_cookbook.renderers.get_renderer``
            takes it: ``qwen3``, ``qwen3_instruct``, ``qwen3_disable_thinking``.
    """
    from tinker_cookbook.renderers import get_renderer

    return get_renderer(name, load_tokenizer())


class ScriptedPolicy:
    """Answers as a ``tinker_cookbook.completers.TokenCompleter`` does, from a script.

    One policy may serve many episodes at once, as a sampling client does: it recognises the
    turn and conversation of a prompt by the prompt itself, which continues an earlier
    prompt and its reply. A solver that rewrites its conversation needs ``request``.

    Args:
        renderer: Turns replies into tokens.
        script: What to say. Functions in it get the model call that is being answered.
        request: Returns that call. A policy with this argument serves one episode, whose
            calls it counts; without it, functions see the prompt's text as one user message,
            and no tools.
        max_tokens: Longer replies are cut, as a sampler cuts them.
    """

    def __init__(
        self,
        renderer: Renderer,
        script: Script,
        *,
        request: Callable[[], TurnRequest] | None = None,
        max_tokens: int | None = None,
    ) -> None:
        self.renderer = renderer
        self.script = script
        self.calls = 0
        self.exhausted = False
        self._request = request
        self._max_tokens = max_tokens
        self._turns: dict[tuple[int, ...], int] = {}
        self._lengths: set[int] = set()

    async def __call__(
        self,
        model_input: tinker.ModelInput,
        stop: StopCondition,
        *,
        max_tokens: int | None = None,
    ) -> TokensWithLogprobs:
        """Return the next reply as tokens, with log-probabilities of zero.

        Raises:
            ScriptExhausted: There is no reply left.
        """
        from tinker_cookbook.completers import TokensWithLogprobs

        prompt = tuple(
            token for chunk in model_input.chunks for token in getattr(chunk, "tokens", ())
        )
        turn = self.calls if self._request is not None else self._turn_of(prompt)
        self.calls += 1
        try:
            output = await resolve_reply(self.script, turn, lambda: self._call(turn, prompt))
        except ScriptExhausted:
            self.exhausted = True
            raise
        tokens = reply_tokens(self.renderer, output)
        cut = output.stop_reason == "max_tokens"
        room = min((n for n in (max_tokens, self._max_tokens) if n is not None), default=None)
        if room is not None and len(tokens) > room:
            tokens, cut = tokens[:room], True
        key = (*prompt, *tokens)
        self._turns[key] = turn + 1
        self._lengths.add(len(key))
        return TokensWithLogprobs(
            tokens=tokens,
            maybe_logprobs=[0.0] * len(tokens),
            stop_reason="length" if cut else "stop",
        )

    def _turn_of(self, prompt: tuple[int, ...]) -> int:
        for length in sorted(self._lengths, reverse=True):
            if length <= len(prompt) and prompt[:length] in self._turns:
                return self._turns[prompt[:length]]
        return 0

    def _call(self, turn: int, prompt: Sequence[int]) -> TurnRequest:
        if self._request is not None:
            return self._request()
        text = str(self.renderer.tokenizer.decode(list(prompt)))
        return TurnRequest(
            index=turn,
            messages=[ChatMessageUser(content=text)],
            tools=[],
            tool_choice="auto",
            config=GenerateConfig(),
        )


def reply_tokens(renderer: Renderer, output: ModelOutput) -> list[int]:
    """Return the tokens that a model samples for an output, in the renderer's own format.

    Args:
        renderer: The renderer of the model.
        output: The output: text, reasoning and tool calls of its first choice.

    Returns:
        Tokens up to and including the stop token, or without it when the output's stop reason
        is ``max_tokens``.

    Raises:
        RendererError: The renderer's format has no place for what is said, such as reasoning.
    """
    from tinker_cookbook.exceptions import RendererError as NotRendered
    from tinker_cookbook.renderers import Message
    from tinker_cookbook.renderers.base import RenderContext

    from inspect_tinker_plugin.tokens.messages import renderer_message

    asked = Message(role="user", content="")
    context = RenderContext(
        idx=1, is_last=True, prev_message=asked, last_user_index=0, in_last_assistant_turn=True
    )
    message = renderer_message(output.message, images=False)
    try:
        rendered = renderer.render_message(message, context)
    except (NotImplementedError, AttributeError):  # it renders whole conversations only
        prompt = renderer.build_generation_prompt([asked]).to_ints()
        whole, _ = renderer.build_supervised_example([asked, message])
        tokens = whole.to_ints()[len(prompt) :]
    except NotRendered as error:
        raise RendererError(
            f"the renderer {type(renderer).__name__} has no format for a scripted reply ({error}). "
            "Leave out of the script what it cannot say, such as reasoning"
        ) from error
    else:
        chunks = list(rendered.output)
        if rendered.stop_overlap is not None:
            chunks.append(rendered.stop_overlap)
        tokens = [token for chunk in chunks for token in getattr(chunk, "tokens", ())]
    if output.stop_reason == "max_tokens":
        stops = set(renderer.get_stop_sequences())
        while tokens and tokens[-1] in stops:
            tokens.pop()
    return tokens
