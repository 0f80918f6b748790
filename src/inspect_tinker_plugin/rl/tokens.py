"""The tokens of an episode: each prompt continues the one before, sampled tokens included.

::

    context = RenderContext(renderer)                   # one per dataset
    context.check_tools(tools)
    cache = PromptCache()                               # one per group
    episode = EpisodeTokens(context, task="math", sample_id=7, shared_prompts=cache)
    prompt = episode.prompt(request)                    # a TurnRequest
    stop = episode.stop_condition(request)
    output = episode.parse(sampled, stop_reason="stop", request=request)
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import NamedTuple

import tinker
from inspect_ai.model import (
    ChatCompletionChoice,
    ChatMessage,
    ModelOutput,
    ModelUsage,
    StopReason,
)
from inspect_ai.tool import ToolCall, ToolInfo
from tinker_cookbook.renderers import Message

from inspect_tinker_plugin.episode.types import Metrics, TurnRequest
from inspect_tinker_plugin.errors import Cause, EpisodeError, RendererError
from inspect_tinker_plugin.rl.context import ONE_AT_A_TIME, RenderContext
from inspect_tinker_plugin.rl.extension import Tail, merged
from inspect_tinker_plugin.rl.ledger import Ledger
from inspect_tinker_plugin.rl.messages import conversation_prefix, renderer_message
from inspect_tinker_plugin.rl.prompt_cache import PromptCache, prompt_key
from inspect_tinker_plugin.rl.sampling import stop_condition, warn_of_ignored
from inspect_tinker_plugin.rl.turns import (
    Match,
    MessageKey,
    Turn,
    Turns,
    frozen,
    message_key,
    tools_key,
)

__all__ = ["EpisodeTokens", "PromptCache", "RenderContext"]


class _Reply(NamedTuple):
    """A reply of the policy, to be recognised in later requests."""

    key: MessageKey
    rendering: Message
    sampled: int


class EpisodeTokens:
    """Turns requests into prompts, and sampled tokens into replies, for one episode.

    Call :meth:`prompt` and then :meth:`parse` for each request, in turn.

    Args:
        context: the dataset's renderer.
        task: name of the task, for messages.
        sample_id: id of the sample, for messages.
        epoch: epoch of the sample, from 1.
        shared_prompts: first prompts shared by the episodes of a group.
    """

    def __init__(
        self,
        context: RenderContext,
        *,
        task: str,
        sample_id: int | str | None,
        epoch: int = 1,
        shared_prompts: PromptCache | None = None,
    ) -> None:
        self._context = context
        self._task = task
        self._sample_id = sample_id
        self._epoch = epoch
        self._shared = shared_prompts
        self._turns = Turns()
        self._replies: dict[str, _Reply] = {}
        self._ledger = Ledger()
        self._asked: Turn | None = None
        self._reencoded = 0

    def prompt(self, request: TurnRequest) -> tinker.ModelInput:
        """Return the prompt for a request.

        Raises:
            RendererError: The renderer cannot carry a message or the tools.
            EpisodeError: The solver asked for what one sampled reply cannot give
                (``num_choices`` above one); its cause is ``policy``.
        """
        self._check_choices(request)
        warn_of_ignored(self._context, request, self._task)
        messages = list(request.messages)
        tools = _offered(request)
        keys = [message_key(message) for message in messages]
        offer = tools_key(tools)
        match = self._turns.find(offer, keys, messages)
        with self._named():
            turn = self._continued(match, messages, keys, tools) if match else None
            if turn is None:
                turn = self._fresh(messages, keys, tools, offer)
        self._turns.add(turn)
        self._asked = turn
        rendered = messages[len(messages) - len(turn.keys) :]
        self._reencoded = self._sampled_in(rendered)
        return tinker.ModelInput(chunks=turn.all_chunks())

    def stop_condition(self, request: TurnRequest) -> list[str] | list[int]:
        """Return what ends a reply: the renderer's stop sequences and the solver's.

        A sampler takes strings or token ids, not both. A stop sequence that is one token
        joins a renderer's ids; any other is left to :meth:`parse`, which cuts the text there.
        """
        with ONE_AT_A_TIME:
            return stop_condition(self._context, request, self._task)

    def parse(
        self, tokens: Sequence[int], *, stop_reason: str | None, request: TurnRequest
    ) -> ModelOutput:
        """Return the model output that sampled tokens stand for.

        Args:
            tokens: everything that was sampled, the stop token included.
            stop_reason: the sampler's ``"stop"`` or ``"length"``, if it is known.
            request: the request that was last given to :meth:`prompt`.

        Returns:
            One choice with stop reason ``stop``, ``tool_calls`` or ``max_tokens``, and usage.
        """
        turn = self._asked
        if turn is None:
            raise RuntimeError("parse() answers a prompt(): call that first, once a turn")
        with self._named():
            reply = self._context.parser.parse(
                tokens,
                at_limit=stop_reason == "length",
                stop_seqs=request.config.stop_seqs or (),
                tools=_offered(request),
            )
        turn.sampled = tuple(tokens)
        turn.reply = frozen(message_key(reply.message))
        turn.reply_id = reply.message.id
        turn.continues = reply.continues
        if reply.message.id is not None:
            self._replies[reply.message.id] = _Reply(turn.reply, reply.rendering, len(tokens))
        self._ledger.replied(
            turn,
            reencoded=self._reencoded,
            truncated=reply.truncated,
            cut=reply.stop_seq is not None,
        )
        self._asked = None
        reason: StopReason = "tool_calls" if reply.message.tool_calls else "stop"
        if reply.truncated:
            reason = "max_tokens"
        usage = ModelUsage(
            input_tokens=turn.length,
            output_tokens=len(tokens),
            total_tokens=turn.length + len(tokens),
        )
        return ModelOutput(
            model=self._context.model,
            choices=[ChatCompletionChoice(message=reply.message, stop_reason=reason)],
            usage=usage,
            input_context_tokens=turn.length,
        )

    @property
    def metrics(self) -> Metrics:
        """Figures about the episode so far.

        ``tokens/segments``: datums that the trainer will make of the trajectory.
        ``tokens/first_divergence``: turn of the first prompt that did not continue all that
        came before; absent when there was none. ``tokens/resampled``: sampled tokens that
        such prompts hold as text encoded again. ``tokens/prompt``: length of the last prompt.
        ``tokens/sampled``: tokens sampled in all turns. ``tokens/trained``: tokens of all
        segments together. ``tokens/truncated_replies`` and ``tokens/stop_seq_cuts``: replies
        that the token limit, or a stop sequence of the solver, cut short.
        """
        return self._ledger.metrics()

    def _continued(
        self,
        match: Match,
        messages: list[ChatMessage],
        keys: list[MessageKey],
        tools: Sequence[ToolInfo],
    ) -> Turn | None:
        """Return the prompt that continues an earlier one, if there can be one."""
        base = match.turn
        if match.repeats:
            return Turn(base.tools, base.keys, base.chunks, base.length, base.parent)
        if not self._context.extends:
            return None
        new = [self._convert(m, key) for m, key in _pairs(messages, keys, match.position)]
        calls = list(getattr(messages[match.position - 1], "tool_calls", None) or [])
        before = keys[: match.position - 1]
        follows_user = any(key.role == "user" for key in before)
        tail = self._context.extension.after_reply(calls=calls, follows_user=follows_user, new=new)
        if tail is None or not self._verified(tail, calls, messages, keys, tools, match.position):
            return None
        chunks = merged([*self._context.extension.spoken(base.sampled, tail), *tail.chunks])
        return Turn(
            tools=base.tools,
            keys=tuple(map(frozen, keys[match.position :])),
            chunks=chunks,
            length=base.length + sum(chunk.length for chunk in chunks),
            parent=base,
        )

    def _verified(
        self,
        tail: Tail,
        calls: list[ToolCall],
        messages: list[ChatMessage],
        keys: list[MessageKey],
        tools: Sequence[ToolInfo],
        position: int,
    ) -> bool:
        new_roles = dict.fromkeys(message.role for message in messages[position:])
        roles = ("calls" if calls else "text", *new_roles)
        if not self._context.check_is_due(roles):
            return True
        return self._context.verify(tail, self._whole(messages, keys, tools))

    def _fresh(
        self,
        messages: list[ChatMessage],
        keys: list[MessageKey],
        tools: Sequence[ToolInfo],
        offer: str,
    ) -> Turn:
        """Return the prompt of a conversation that is rendered as a whole."""
        shared = None if self._replies else self._shared
        cache_key = prompt_key(offer, keys) if shared is not None else b""
        chunks = shared.get(cache_key) if shared is not None else None
        if chunks is None:
            whole = self._whole(messages, keys, tools)
            chunks = merged(self._context.renderer.build_generation_prompt(whole).chunks)
            if shared is not None:
                shared.put(cache_key, chunks)
        length = sum(chunk.length for chunk in chunks)
        return Turn(offer, tuple(map(frozen, keys)), chunks, length)

    def _whole(
        self, messages: list[ChatMessage], keys: list[MessageKey], tools: Sequence[ToolInfo]
    ) -> list[Message]:
        prefix, consumed = conversation_prefix(self._context.renderer, messages, tools)
        return [*prefix, *(self._convert(m, key) for m, key in _pairs(messages, keys, consumed))]

    def _convert(self, message: ChatMessage, key: MessageKey) -> Message:
        """Convert a message; a reply of the policy is taken as the renderer parsed it."""
        reply = self._replies.get(message.id or "")
        if reply is not None and reply.key == key:
            return reply.rendering
        return renderer_message(message, images=self._context.images)

    def _sampled_in(self, messages: list[ChatMessage]) -> int:
        """Return how many tokens were sampled for the replies among messages."""
        replies = (self._replies.get(message.id or "") for message in messages)
        return sum(reply.sampled for reply in replies if reply is not None)

    def _check_choices(self, request: TurnRequest) -> None:
        choices = request.config.num_choices
        if choices is not None and choices > 1:
            raise EpisodeError(
                f"the solver asked for num_choices={choices}, but a policy under training "
                "gives one reply to a prompt. Use group_size for several replies.",
                cause=Cause.POLICY,
                task=self._task,
                sample_id=self._sample_id,
                epoch=self._epoch,
            )

    @contextmanager
    def _named(self) -> Iterator[None]:
        """Name task and sample in whatever a renderer raises, its own kinds of error included."""
        try:
            with ONE_AT_A_TIME:
                yield
        except Exception as error:
            raise RendererError(
                f"task {self._task!r}, sample {self._sample_id!r}: {error or type(error).__name__}"
            ) from error


def _offered(request: TurnRequest) -> Sequence[ToolInfo]:
    return () if request.tool_choice == "none" else request.tools


def _pairs(
    messages: list[ChatMessage], keys: list[MessageKey], start: int
) -> Iterator[tuple[ChatMessage, MessageKey]]:
    return zip(messages[start:], keys[start:], strict=True)
